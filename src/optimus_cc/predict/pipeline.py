"""What every rank does in an iteration, and how long that takes on links that they share.

A rank here is one of stages x replicas; its tensor-parallel shards do the same at the same time.
Where they share a link, each message goes over it once for every copy.

The order of calls is that of megatron-core's 1F1B: a stage computes and exchanges in turn, and
waits for what it sends too. A transfer begins when both sides have posted it, as in gloo and NCCL.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from optimus_cc.predict.fluid import Event, Process, Resource, Simulation
from optimus_cc.predict.workload import Shape, Workload
from optimus_cc.settings import Settings
from optimus_cc.sizes import ring_bytes

PHASES = ("compute", "messages", "compression", "reduction", "update")
"""What ranks do but wait; of messages and of the reduction what they cost beside the link."""
Span = tuple[int, str, float, float]
"""A rank, what it did, and from when to when, in seconds."""


@dataclass(frozen=True)
class Links:
    """A rank's own interface; both directions at once, and every kind of communication on it."""

    bytes_per_s: float
    latency_s: float
    buffer_bytes: float = 0.0
    """What of a message the sender does not wait for: the system's send buffer."""
    burst_bytes: float = 0.0
    """What goes through at once after a pause: the token bucket of a shaped link."""
    copies: int = 1
    """Ranks behind an interface that each send the same: shards of a node."""


@dataclass(frozen=True)
class Times:
    """Times of what a rank computes, alone on its core or GPU, in seconds; lists are by stage."""

    forward_s: list[float]
    backward_s: list[float]
    reduction_s: list[float]
    """Work of the reduction that is no communication, such as copies into one buffer."""
    update_s: list[float]
    pack_s: float = 0.0
    """To compress an activation gradient."""
    restore_s: float = 0.0
    """To make a gradient of P and Q."""
    power_sgd_s: tuple[float, ...] = ()
    """To compress a stage's gradients and restore them, by stage; empty for nothing."""
    exchange_s: float = 0.0
    """Of each exchange with neighbours: what posting it and waking up cost."""
    cores: float = float("inf")
    """How many ranks can compute at once."""


@dataclass(frozen=True)
class Prediction:
    """An iteration; times are means over ranks, as the trainer's are."""

    iteration_s: float
    phases_s: dict[str, list[float]]
    """Each of :data:`PHASES` by stage; on busy cores longer than alone."""
    sent_bytes: dict[str, int]
    """By kind of communication, of all ranks and copies; reductions as rings."""
    num_compressed: Counter[int]
    """Messages compressed, by the stage that receives them; of all replicas."""
    spans: list[Span]


class _Channel:
    """Messages of one kind from one rank to another, first in, first out."""

    def __init__(self, simulation: Simulation, links: Links, ends: tuple[Resource, Resource]):  # noqa: ANN204
        self._simulation, self._links, self._ends = simulation, links, ends
        self._sends: deque[tuple[float, Event]] = deque()
        self._receives: deque[Event] = deque()

    def send(self, nbytes: float) -> Event:
        """Post a message; returns when the sender may go on."""
        self._sends.append((nbytes, Event()))
        event = self._sends[-1][1]
        self._match()
        return event

    def receive(self) -> Event:
        """Post a receive; returns its arrival."""
        event = Event()
        self._receives.append(event)
        self._match()
        return event

    def _match(self) -> None:
        if self._sends and self._receives:
            nbytes, sent = self._sends.popleft()
            self._simulation.follow(self._transfer(nbytes, sent, self._receives.popleft()))

    def _transfer(self, nbytes: float, sent: Event, received: Event) -> Process:
        start, links = self._simulation.start, self._links
        buffered = min(nbytes, links.buffer_bytes)
        if nbytes > buffered:
            yield [start(nbytes - buffered, *self._ends)]
        self._simulation.happen(sent)
        if buffered:
            yield [start(buffered, *self._ends)]
        yield [self._simulation.pause(links.latency_s)]
        self._simulation.happen(received)


class _Iteration:
    """All ranks of an iteration, and what they share."""

    def __init__(self, workload: Workload, settings: Settings, times: Times, links: Links) -> None:
        self.workload, self.settings, self.times, self.links = workload, settings, times, links
        self.simulation = Simulation()
        num_ranks = workload.pp * workload.dp
        self.interfaces = [
            tuple(Resource(links.bytes_per_s, links.burst_bytes) for _ in range(2))
            for _ in range(num_ranks)
        ]
        self.cores = Resource(times.cores)
        self.channels: dict[tuple[str, int, int], _Channel] = {}
        self.meetings: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
        self.meeting_ends: defaultdict[tuple[object, ...], Event] = defaultdict(Event)
        self.sent_bytes: Counter[str] = Counter(forward=0, backward=0, gradients=0, embedding=0)
        self.num_compressed: Counter[int] = Counter()
        self.spans: list[Span] = []
        self.ends_s: dict[int, float] = {}

    def channel(self, kind: str, source: int, target: int) -> _Channel:
        key = (kind, source, target)
        if key not in self.channels:
            ends = (self.interfaces[source][0], self.interfaces[target][1])
            self.channels[key] = _Channel(self.simulation, self.links, ends)
        return self.channels[key]

    def all_reduce(
        self, rank: int, key: tuple[object, ...], group: list[int], nbytes: int
    ) -> Event:
        """A ring over ``group``, once all its ranks are there; each calls it with the same key."""
        meeting, end = self.meetings[key], self.meeting_ends[key]
        meeting.append(rank)
        if len(meeting) == len(group):
            self.simulation.follow(self._ring(group, nbytes, end))
        return end

    def _ring(self, group: list[int], nbytes: int, end: Event) -> Process:
        sent = ring_bytes(nbytes, len(group)) * self.links.copies
        if sent:
            yield [
                self.simulation.start(sent, self.interfaces[one][0], self.interfaces[other][1])
                for one, other in zip(group, [*group[1:], group[0]], strict=True)
            ]
        yield [self.simulation.pause(2 * (len(group) - 1) * self.links.latency_s)]
        self.simulation.happen(end)


class _Rank:
    """One rank's program."""

    def __init__(self, iteration: _Iteration, stage: int, replica: int) -> None:
        self.all, self.stage, self.replica = iteration, stage, replica
        workload = iteration.workload
        self.workload, self.times = workload, iteration.times
        self.rank = self._rank_of(stage, replica)
        self.is_first, self.is_last = stage == 0, stage == workload.pp - 1

    def _rank_of(self, stage: int, replica: int) -> int:
        return stage * self.workload.dp + replica

    def run(self) -> Process:
        yield from self._schedule()
        yield from self._reduce()
        whole = [self._rank_of(stage, self.replica) for stage in range(self.workload.pp)]
        # The norm of the gradient is the whole model's.
        yield [self.all.all_reduce(self.rank, ("norm", self.replica), whole, 0)]
        yield from self._compute("update", self.times.update_s[self.stage])
        self.all.ends_s[self.rank] = self.all.simulation.now_s

    def _schedule(self) -> Process:
        count = self.workload.num_micro_batches
        num_warm_up = min(self.workload.pp - self.stage - 1, count)
        for _ in range(num_warm_up):
            yield from self._exchange(self._receive_forward())
            yield from self._compute("forward", self.times.forward_s[self.stage])
            yield from self._exchange(self._send_forward())
        if count > num_warm_up:
            yield from self._exchange(self._receive_forward())
        for index in range(count - num_warm_up):
            is_final = index == count - num_warm_up - 1
            yield from self._compute("forward", self.times.forward_s[self.stage])
            yield from self._exchange([*self._receive_backward(), *self._send_forward()])
            yield from self._backward(in_epilogue=False)
            yield from self._pack(in_epilogue=is_final)
            received = [] if is_final else self._receive_forward()
            sent = self._send_backward(in_epilogue=is_final)
            yield from self._exchange([*received, *sent])
        for _ in range(num_warm_up):
            yield from self._exchange(self._receive_backward())
            yield from self._backward(in_epilogue=True)
            yield from self._pack(in_epilogue=True)
            yield from self._exchange(self._send_backward(in_epilogue=True))

    def _exchange(self, events: list[Event]) -> Process:
        yield events
        if events:
            yield from self._compute("messages", self.times.exchange_s)

    def _backward(self, *, in_epilogue: bool) -> Process:
        if not self.is_last and self._message(in_epilogue)[1]:
            yield from self._compute("compression", self.times.restore_s)
        yield from self._compute("backward", self.times.backward_s[self.stage])

    def _pack(self, *, in_epilogue: bool) -> Process:
        if not self.is_first and self._message(in_epilogue)[1]:
            self.all.num_compressed[self.stage - 1] += 1
            yield from self._compute("compression", self.times.pack_s)

    def _message(self, in_epilogue: bool) -> tuple[int, bool]:
        return self.workload.gradient_message(self.all.settings, in_epilogue)

    def _send(self, kind: str, stage: int, nbytes: int) -> list[Event]:
        nbytes *= self.all.links.copies
        self.all.sent_bytes[kind] += nbytes
        target = self._rank_of(stage, self.replica)
        return [self.all.channel(kind, self.rank, target).send(nbytes)]

    def _receive(self, kind: str, stage: int) -> list[Event]:
        source = self._rank_of(stage, self.replica)
        return [self.all.channel(kind, source, self.rank).receive()]

    def _send_forward(self) -> list[Event]:
        size = self.workload.message_bytes()
        return [] if self.is_last else self._send("forward", self.stage + 1, size)

    def _receive_forward(self) -> list[Event]:
        return [] if self.is_first else self._receive("forward", self.stage - 1)

    def _send_backward(self, *, in_epilogue: bool) -> list[Event]:
        size, _ = self._message(in_epilogue)
        return [] if self.is_first else self._send("backward", self.stage - 1, size)

    def _receive_backward(self) -> list[Event]:
        return [] if self.is_last else self._receive("backward", self.stage + 1)

    def _reduce(self) -> Process:
        yield from self._compute("reduction", self.times.reduction_s[self.stage])
        replicas = [self._rank_of(self.stage, other) for other in range(self.workload.dp)]
        for number, nbytes in enumerate(self._averaged_bytes() if len(replicas) > 1 else ()):
            yield self._all_reduce("gradients", (number, self.stage), replicas, nbytes)
        if self.times.power_sgd_s:
            yield from self._compute("compression", self.times.power_sgd_s[self.stage])
        if self.workload.has_embedding(self.stage):
            fused = self.all.settings.emb_comm_opt
            others = range(self.workload.dp) if fused else [self.replica]
            group = [self._rank_of(s, r) for s in (0, self.workload.pp - 1) for r in others]
            rows, columns = self.workload.embedding
            nbytes = rows * columns * self.workload.element_bytes
            yield self._all_reduce("embedding", (others[0],), group, nbytes)

    def _averaged_bytes(self) -> Iterator[int]:
        """What the replicas all-reduce one after another: each P and Q, then all that is whole."""
        size, settings = self.workload.element_bytes, self.all.settings
        pairs, whole = self.workload.averaged(self.stage, settings)
        alike: Counter[Shape] = Counter(pairs)
        for (rows, columns), number in alike.items():
            rank = min(settings.grad_comp_rank, rows, columns)
            yield number * rows * rank * size
            yield number * columns * rank * size
        yield sum(map(math.prod, whole)) * size

    def _all_reduce(
        self, kind: str, key: tuple[int, ...], group: list[int], nbytes: int
    ) -> list[Event]:
        self.all.sent_bytes[kind] += ring_bytes(nbytes, len(group)) * self.all.links.copies
        return [self.all.all_reduce(self.rank, (kind, *key), group, nbytes)]

    def _compute(self, name: str, seconds: float) -> Process:
        simulation = self.all.simulation
        begin_s = simulation.now_s
        if seconds:
            yield [simulation.start(seconds, self.all.cores, limit=1.0)]
        self.all.spans.append((self.rank, name, begin_s, simulation.now_s))


def predict(workload: Workload, settings: Settings, times: Times, links: Links) -> Prediction:
    """Predict an iteration after SC's warm-up.

    Args:
        workload: what is computed and sent.
        settings: what is compressed.
        times: what computing takes.
        links: of the ranks.

    Raises:
        SettingsError: the settings do not go with the pipeline.
    """
    settings.check_stages(workload.pp)
    iteration = _Iteration(workload, settings, times, links)
    for stage in range(workload.pp):
        for replica in range(workload.dp):
            iteration.simulation.follow(_Rank(iteration, stage, replica).run())
    iteration.simulation.run()
    phases = {name: [0.0] * workload.pp for name in PHASES}
    phase_of = {"forward": "compute", "backward": "compute"}
    for rank, name, begin_s, end_s in iteration.spans:
        seconds = (end_s - begin_s) / workload.dp
        phases[phase_of.get(name, name)][rank // workload.dp] += seconds
    return Prediction(
        iteration_s=sum(iteration.ends_s.values()) / len(iteration.ends_s),
        phases_s=phases,
        sent_bytes=dict(iteration.sent_bytes),
        num_compressed=iteration.num_compressed,
        spans=iteration.spans,
    )
