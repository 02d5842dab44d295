"""``python -m optimus_cc predict``: an iteration of 1F1B scheme by scheme, simulated.

A rank here is one of stages x replicas; its tensor-parallel shards do the same at the same time.
Where they share a link, each message goes over it once for every copy. The order of calls is that
of megatron-core's 1F1B: a stage computes and exchanges in turn, and waits for what it sends too. A
transfer begins when both sides have posted it, as in gloo and NCCL. Nothing needs torch.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from deep_optimizer_states.predict import gpt
from deep_optimizer_states.predict.model import Model, ModelError, model_from_table
from deep_optimizer_states.predict.simulator import Job, Simulator
from optimus_cc.settings import Settings, SettingsError
from optimus_cc.sizes import matrix_shape, pair_numel, ring_bytes, saves

ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
SEQUENCE = 1024
"""Tokens of a sample of the published models."""
_PASSES = 8
"""How often compression reads or writes a matrix in fp32: conversion, error, products, rest."""
_ADAM_BYTES = 28
"""Read and written for a parameter: weight, gradient and both moments, in fp32."""
_EPILOGUE = {"inter_grad_comp": True, "inter_grad_comp_epilogue_only": True}
PARTS: dict[str, dict[str, Any]] = {
    "uncompressed": {},
    "cb-without-lep": _EPILOGUE,
    "cb": {**_EPILOGUE, "use_error_feedback": True},
    "cb-all": {"inter_grad_comp": True, "use_error_feedback": True},
    "fe": {"emb_comm_opt": True},
    "sc": {"grad_comp": True, "selective_grad_comp": True, "use_error_feedback": True},
}
"""Parts that ``+`` puts together; ``cb-all`` compresses all messages, not the epilogue's alone."""
UNCOMPRESSED = "uncompressed"
"""The scheme that ``times_faster`` compares with."""
ALL = (UNCOMPRESSED, "cb-without-lep", "cb", "cb-all", "cb+fe", "cb+fe+sc", "cb-all+fe+sc")
"""Schemes of ``--scheme all``: the published ones, and two with all messages compressed."""
_NUMBERS = ("inter_grad_comp_rank", "grad_comp_rank", "selective_grad_comp_way")
SLOWEST_GBIT, FASTEST_GBIT = 1e-6, 1e6
"""Links that are simulated, Gb/s a node; beyond them times lose their digits."""
_EPILOG = f"""\
schemes: {", ".join(PARTS)}, and several with '+' between them; 'all' is
{", ".join(ALL)}.
Nothing is run: every time is simulated; times_faster is beside uncompressed.
SC is taken as after its warm-up."""
Shape = tuple[int, ...]


class PredictionError(ValueError):
    """Something cannot be predicted; the message says what to do instead."""


@dataclass(frozen=True)
class Workload:
    """An iteration of a GPT-2 on stages x replicas x shards, forward and backward in 1F1B.

    A GPT-2 has LayerNorm, biases, learned positions, and the output layer tied to the embedding.

    Raises:
        PredictionError: It is no GPT-2, or there are too few stages, or more of them than layers.
    """

    model: Model
    pp: int  # stages
    dp: int  # replicas
    tp: int  # shards of a stage
    micro_batch_size: int  # samples
    num_micro_batches: int  # of each replica, an iteration
    element_bytes: int  # of activations and gradients
    recomputes: bool = False  # backward computes every layer's activations once more

    def __post_init__(self) -> None:
        if self.model.architecture != "gpt2":
            raise PredictionError(
                f"architecture = {self.model.architecture!r}: predictions are of a GPT-2; give gpt2"
            )
        if self.pp < 2:
            raise PredictionError(
                f"pp = {self.pp}: predictions are of a pipeline; give two stages or more"
            )
        if self.model.layers < self.pp:
            raise PredictionError(
                f"pp = {self.pp}: a stage needs a layer, and the model has {self.model.layers}; "
                "give a smaller pp"
            )

    @functools.cached_property
    def layers_of_stages(self) -> tuple[int, ...]:
        """Layers of each stage, as the trainer ``megatron-pipeline`` cuts them."""
        return gpt.layers_of_stages(self.model.layers, self.pp)

    @property
    def message_shape(self) -> Shape:
        """Shape of an activation, and of its gradient."""
        return self.model.seq_length, self.micro_batch_size, self.model.hidden

    @property
    def message_bytes(self) -> int:
        """Bytes of an activation or a whole gradient."""
        return math.prod(self.message_shape) * self.element_bytes

    def gradient_message(self, settings: Settings, in_epilogue: bool) -> tuple[int, bool]:
        """Return the bytes of an activation gradient's message, and whether it is compressed.

        The rule is that of :class:`optimus_cc.backpropagation.BackwardCompressor`.
        """
        rank = settings.inter_grad_comp_rank
        if settings.compresses_message(in_epilogue) and saves(self.message_shape, rank):
            rows, columns = matrix_shape(self.message_shape)
            return pair_numel(rows, columns, rank) * self.element_bytes, True
        return self.message_bytes, False

    @functools.cached_property
    def embedding(self) -> Shape:
        """A rank's shard of the tied embedding."""
        return self._parameters.before[0]

    @functools.cached_property
    def _parameters(self) -> gpt.Parameters:
        return gpt.parameters_of(self.model, self.tp)

    def parameters(self, stage: int, with_embedding: bool = False) -> list[Shape]:
        """Return the shapes of a rank's parameters, with its copy of the tied embedding or not."""
        found = self._parameters
        shapes = [*found.layer] * self.layers_of_stages[stage]
        if stage == 0:
            shapes += found.before[1:]
        if stage == self.pp - 1:
            shapes += found.after
        if with_embedding and self.has_embedding(stage):
            shapes.append(self.embedding)
        return shapes

    def has_embedding(self, stage: int) -> bool:
        """Return whether a stage has a copy of the tied embedding."""
        return stage in (0, self.pp - 1)

    def averaged(self, stage: int, settings: Settings) -> tuple[list[tuple[int, int]], list[Shape]]:
        """Return the shapes of gradients that replicas average: as low-rank pairs, and whole.

        SC's warm-up is over. The rule is that of :class:`optimus_cc.gradients.GradientReduction`.
        """
        shapes = self.parameters(stage, with_embedding=not settings.emb_comm_opt)
        if not settings.compresses_gradients_of(stage) or self.dp == 1:
            return [], shapes
        pairs: list[tuple[int, int]] = []
        whole: list[Shape] = []
        for shape in shapes:
            if len(shape) == 2 and saves(shape, settings.grad_comp_rank):
                pairs.append((shape[0], shape[1]))
            else:
                whole.append(shape)
        return pairs, whole

    def forward_flops(self, stage: int) -> tuple[float, float]:
        """Return the FLOPs of a micro-batch's forward, of all shards: layers, and logits."""
        model, tokens = self.model, self.model.seq_length * self.micro_batch_size
        weights = sum(
            math.prod(shape) * self.tp for shape in self.parameters(stage) if len(shape) == 2
        ) - (model.seq_length * model.hidden * self.tp if stage == 0 else 0)
        scores = 4 * model.seq_length * model.hidden * tokens * self.layers_of_stages[stage]
        logits = self.embedding[0] * self.tp * model.hidden if stage == self.pp - 1 else 0
        return 2.0 * weights * tokens + scores, 2.0 * logits * tokens


@dataclass(frozen=True)
class Costs:
    """Times of a rank that is alone on its core or GPU, and its link; lists are by stage."""

    forward_s: list[float]  # of a micro-batch
    backward_s: list[float]
    reduction_s: list[float]  # work of the reduction beside communication, such as copies
    update_s: list[float]
    bytes_per_s: float = 1e30  # payload in each direction of a rank's own interface
    latency_s: float = 0.0  # from the end of a transfer to its arrival
    copies: int = 1  # ranks behind an interface that each send the same: shards of a node
    pack_s: float = 0.0  # to compress an activation gradient
    restore_s: float = 0.0  # to make a gradient of P and Q
    power_sgd_s: tuple[float, ...] = ()  # to compress a stage's gradients and restore them
    exchange_s: float = 0.0  # of each exchange with neighbours: to post it, and to wake up
    cores: float = float("inf")  # ranks that can compute at once


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs, each with a link of its own; a node holds a stage of a replica."""

    name: str
    source: str  # where the figures come from; printed with every prediction
    gpus_per_node: int  # shards of a stage
    pp: int
    dp: int
    micro_batch_size: int
    global_batch_size: int  # samples of all replicas, an iteration
    flops_per_s: dict[str, float]  # of a GPU, by type
    memory_bytes_per_s: float  # of a GPU
    nvlink_bytes_per_s: float  # what a GPU sends over NVLink while it receives as much
    link_gbit: float  # a node's own link, in each direction
    link_share: float  # of its rate, what is left for payload
    latency_s: float
    orthogonalisation_s: float  # of a thin factor: a chain of small steps, whatever its size
    exchange_s: float = 0.0
    cores: float = float("inf")
    recomputes: bool = True

    def workload(self, model: Model, dtype: str) -> Workload:
        """Return the iteration of a model that the cluster's file describes."""
        return Workload(
            model=model,
            pp=self.pp,
            dp=self.dp,
            tp=self.gpus_per_node,
            micro_batch_size=self.micro_batch_size,
            num_micro_batches=self.global_batch_size // self.micro_batch_size // self.dp,
            element_bytes=ELEMENT_BYTES[dtype],
            recomputes=self.recomputes,
        )

    def costs(
        self, workload: Workload, settings: Settings, dtype: str, gbit: float = 0, copies: int = 1
    ) -> Costs:
        """Return what each GPU takes, its tensor-parallel exchanges included.

        Args:
            workload: What is computed and sent.
            settings: What is compressed.
            dtype: Of the model.
            gbit: A node's link in Gb/s; 0 for the cluster's own.
            copies: How often each message goes over the link.

        Raises:
            PredictionError: The link is slower or faster than any.
        """
        stages, gbit = range(workload.pp), gbit or self.link_gbit
        if not SLOWEST_GBIT <= gbit <= FASTEST_GBIT:
            known = f"give {SLOWEST_GBIT:g} to {FASTEST_GBIT:g} Gb/s"
            raise PredictionError(f"a link of {gbit:g} Gb/s cannot be simulated: {known}")
        flops_per_s, memory = self.flops_per_s[dtype], self.memory_bytes_per_s
        # A layer has two all-reduces of activations over the shards.
        shared_s = 2 * ring_bytes(workload.message_bytes, workload.tp) / self.nvlink_bytes_per_s
        forward, backward = [], []
        for stage in stages:
            layers, logits = (
                flops / workload.tp / flops_per_s for flops in workload.forward_flops(stage)
            )
            layers += shared_s * workload.layers_of_stages[stage]
            forward.append(layers + logits)
            backward.append((3 if workload.recomputes else 2) * layers + 2 * logits)
        numels = [sum(map(math.prod, workload.parameters(stage, True))) for stage in stages]
        rows, columns = matrix_shape(workload.message_shape)
        rank = settings.inter_grad_comp_rank
        pairs = [workload.averaged(stage, settings)[0] for stage in stages]
        return Costs(
            forward_s=forward,
            backward_s=backward,
            reduction_s=[4 * numel * workload.element_bytes / memory for numel in numels],
            update_s=[_ADAM_BYTES * numel / memory for numel in numels],
            bytes_per_s=gbit * 1e9 / 8 * self.link_share,
            latency_s=self.latency_s,
            copies=copies,
            pack_s=self._factorise_s(rows, columns, rank, dtype),
            restore_s=2 * rows * columns * 4 / memory
            + product_flops(rows, columns, rank) / flops_per_s,
            power_sgd_s=tuple(
                sum(self._factorise_s(*pair, settings.grad_comp_rank, dtype) for pair in of_stage)
                for of_stage in pairs
            ),
            exchange_s=self.exchange_s,
            cores=self.cores,
        )

    def _factorise_s(self, rows: int, columns: int, rank: int, dtype: str) -> float:
        """Return the time of a step of subspace iteration and of the product of its pair.

        Three products with the matrix (M Q, M^T P, P Q^T), and Householder QR of both factors,
        which takes 4 rank^2 for a row with the making of its Q.
        """
        flops = 3 * product_flops(rows, columns, rank)
        flops += 4.0 * min(rank, rows, columns) ** 2 * (rows + columns)
        bytes_s = _PASSES * rows * columns * 4 / self.memory_bytes_per_s
        return 2 * self.orthogonalisation_s + flops / self.flops_per_s[dtype] + bytes_s


def product_flops(rows: int, columns: int, rank: int) -> float:
    """Return the FLOPs of P Q^T; those of M Q and of M^T P are as many."""
    return 2.0 * rows * columns * min(rank, rows, columns)


@dataclass(frozen=True)
class Prediction:
    """An iteration."""

    iteration_s: float  # from its begin to the end of the update, the mean over ranks
    sent_bytes: dict[str, int]  # by kind, of all ranks and copies; reductions as rings


def predict(workload: Workload, settings: Settings, costs: Costs) -> Prediction:
    """Predict an iteration after SC's warm-up.

    Raises:
        SettingsError: The settings do not go with the pipeline.
    """
    settings.check_stages(workload.pp)
    iteration = _Iteration(workload, settings, costs)
    updates = [
        _Rank(iteration, stage, replica).submit()
        for stage in range(workload.pp)
        for replica in range(workload.dp)
    ]
    iteration.simulator.run_until()
    return Prediction(
        iteration_s=sum(job.end_s for job in updates) / len(updates),
        sent_bytes=dict(iteration.sent_bytes),
    )


class _Iteration:
    """The simulator, transfers and counts that the ranks of an iteration share."""

    def __init__(self, workload: Workload, settings: Settings, costs: Costs) -> None:
        self.workload, self.settings, self.costs = workload, settings, costs
        self.simulator = Simulator(
            lambda resource, _: costs.cores if resource == "cores" else costs.bytes_per_s
        )
        self.sent_bytes: Counter[str] = Counter(forward=0, backward=0, gradients=0, embedding=0)
        self._transfers: dict[tuple[object, ...], tuple[Job, Job]] = {}

    def transfer(
        self,
        key: tuple[object, ...],
        nbytes: float,
        after: Job | None,
        latency_s: float,
        links: Sequence[str] = (),
    ) -> tuple[Job, Job]:
        """Join a transfer, which begins once all its ranks have; return it and its arrival.

        Args:
            key: Names it. Of those whose keys begin alike one leaves when the one before has left.
            nbytes: What is sent in each direction.
            after: What the rank that joins has to do first.
            latency_s: From the end of the transfer to its arrival.
            links: Which it shares with others. A ring shares none: its ranks have sent and received
                all else before they join.
        """
        if key not in self._transfers:
            channel = f"{key[:3]}"
            rate, draws = self.costs.bytes_per_s, dict.fromkeys(links, 1.0)
            sent = self.simulator.submit(Job(channel, "transfer", nbytes, rate, draws))
            there = Job(f"arrival {channel}", "arrival", latency_s, after=(sent,))
            self._transfers[key] = sent, self.simulator.submit(there)
        sent, arrival = self._transfers[key]
        if after is not None:
            sent.after += (after,)
        return sent, arrival


class _Rank:
    """One rank's program: its jobs, in the order of its calls."""

    def __init__(self, iteration: _Iteration, stage: int, replica: int) -> None:
        self.all, self.stage, self.replica = iteration, stage, replica
        self.workload, self.costs = iteration.workload, iteration.costs
        self._last: Job | None = None
        self._posted: Counter[tuple[str, int]] = Counter()

    def submit(self) -> Job:
        """Submit all jobs; return the last one, the update."""
        self._schedule()
        self._reduce()
        # The norm of the gradient is the whole model's.
        self._all_reduce("norm", ("norm", self.replica), self.workload.pp, 0)
        return self._do("update", self.costs.update_s[self.stage])

    def _schedule(self) -> None:
        send, receive = (functools.partial(self._post, sends) for sends in (True, False))
        count = self.workload.num_micro_batches
        num_warm_up = min(self.workload.pp - self.stage - 1, count)
        for _ in range(num_warm_up):
            self._exchange(receive("forward"))
            self._forward()
            self._exchange(send("forward"))
        if count > num_warm_up:
            self._exchange(receive("forward"))
        for index in range(count - num_warm_up):
            is_final = index == count - num_warm_up - 1
            self._forward()
            self._exchange(receive("backward"), send("forward"))
            self._backward()
            sent = send("backward", in_epilogue=is_final)
            self._exchange(sent, None if is_final else receive("forward"))
        for _ in range(num_warm_up):
            self._exchange(receive("backward", in_epilogue=True))
            self._backward(in_epilogue=True)
            self._exchange(send("backward", in_epilogue=True))

    def _do(self, name: str, seconds: float, *after: Job) -> Job:
        lane = f"{self.stage} {self.replica}"
        draws = {} if math.isinf(self.costs.cores) else {"cores": 1.0}
        self._last = self.all.simulator.submit(Job(lane, name, seconds, 1.0, draws, after))
        return self._last

    def _exchange(self, *transfers: Job | None) -> None:
        waited_for = [job for job in transfers if job is not None]
        if waited_for:
            self._do("exchange", self.costs.exchange_s, *waited_for)

    def _forward(self) -> None:
        self._do("forward", self.costs.forward_s[self.stage])

    def _backward(self, *, in_epilogue: bool = False) -> None:
        if self.stage < self.workload.pp - 1 and self._size("backward", in_epilogue)[1]:
            self._do("compression", self.costs.restore_s)
        self._do("backward", self.costs.backward_s[self.stage])

    def _size(self, kind: str, in_epilogue: bool) -> tuple[int, bool]:
        if kind == "forward":
            return self.workload.message_bytes, False
        return self.workload.gradient_message(self.all.settings, in_epilogue)

    def _post(self, sends: bool, kind: str, *, in_epilogue: bool = False) -> Job | None:
        """Post the next message to or from a neighbour; return what is then waited for, if any."""
        step = 1 if kind == "forward" else -1
        source = self.stage if sends else self.stage - step
        target = source + step
        if not {source, target} <= set(range(self.workload.pp)):
            return None
        size, is_compressed = self._size(kind, in_epilogue)
        nbytes = size * self.costs.copies
        if sends:
            self.all.sent_bytes[kind] += nbytes
        if sends and is_compressed:
            self._do("compression", self.costs.pack_s)
        self._posted[kind, source] += 1
        ends = [f"out {source} {self.replica}", f"in {target} {self.replica}"]
        key = (kind, source, self.replica, self._posted[kind, source])
        transfer = self.all.transfer(key, nbytes, self._last, self.costs.latency_s, ends)
        return transfer[0 if sends else 1]

    def _reduce(self) -> None:
        dp = self.workload.dp
        self._do("reduction", self.costs.reduction_s[self.stage])
        for number, nbytes in enumerate(self._averaged_bytes() if dp > 1 else ()):
            self._all_reduce("gradients", (number, self.stage), dp, nbytes)
        if self.costs.power_sgd_s:
            self._do("compression", self.costs.power_sgd_s[self.stage])
        if self.workload.has_embedding(self.stage):
            is_fused = self.all.settings.emb_comm_opt
            group = ("all" if is_fused else self.replica,)
            nbytes = math.prod(self.workload.embedding) * self.workload.element_bytes
            self._all_reduce("embedding", group, 2 * dp if is_fused else 2, nbytes)

    def _averaged_bytes(self) -> Iterator[int]:
        """Yield what replicas all-reduce in turn: each P and Q, then all that is whole."""
        size, settings = self.workload.element_bytes, self.all.settings
        pairs, whole = self.workload.averaged(self.stage, settings)
        for (rows, columns), number in Counter(pairs).items():
            rank = min(settings.grad_comp_rank, rows, columns)
            yield number * rows * rank * size
            yield number * columns * rank * size
        yield sum(map(math.prod, whole)) * size

    def _all_reduce(self, kind: str, key: tuple[object, ...], ranks: int, nbytes: int) -> None:
        """Join a ring over so many ranks, and wait for its end."""
        sent = ring_bytes(nbytes, ranks) * self.costs.copies
        if sent:
            self.all.sent_bytes[kind] += sent
        latency_s = 2 * (ranks - 1) * self.costs.latency_s
        ring = self.all.transfer((kind, *key), sent, self._last, latency_s)
        self._do("wait", 0.0, ring[1])


def settings_of(scheme: str, **numbers: Any) -> Settings:
    """Return the settings of a scheme.

    Args:
        scheme: Parts with ``+`` between them.
        numbers: Fields of :class:`Settings` that are numbers, such as ranks.

    Raises:
        PredictionError: A part is not known.
        SettingsError: A number is out of range.
    """
    chosen: dict[str, Any] = {}
    for part in scheme.split("+"):
        if part not in PARTS:
            raise PredictionError(
                f"--scheme {scheme}: '{part}' is not known; put together {', '.join(PARTS)} with "
                "'+', or give 'all'"
            )
        chosen |= PARTS[part]
    return Settings(**chosen, **numbers)


def load_cluster(name: str) -> Cluster:
    """Return a cluster by its name, or by the path of a TOML file with the same keys.

    Raises:
        PredictionError: There is none, or the file is wrong.
    """
    table = _table_of("cluster", name)
    try:
        return Cluster(**table)
    except TypeError as error:
        said = str(error).removeprefix("Cluster.__init__() ")
        raise PredictionError(f"--cluster {name}: {said}; add or remove it") from None


def load_gpt2(name: str) -> Model:
    """Return a model by its name, or by the path of a TOML file with the same keys.

    Raises:
        PredictionError: There is none, or the file is wrong.
    """
    table = _table_of("model", name)
    usual = {"architecture": "gpt2", "seq_length": SEQUENCE, "kv_heads": table.get("heads")}
    try:
        return model_from_table({**usual, **table}, f"--model {name}")
    except ModelError as error:
        raise PredictionError(str(error)) from None


def _table_of(option: str, name: str) -> dict[str, Any]:
    is_file = name.endswith(".toml")
    path = Path(name) if is_file else Path(__file__).with_name(f"{option}s.toml")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PredictionError(f"--{option} {name}: {error}") from None
    if not is_file and name not in table:
        near = get_close_matches(name, table, n=1, cutoff=0.0)[0]
        raise PredictionError(
            f"--{option} {name}: not known; did you mean '{near}'? known: {', '.join(table)}, or "
            "give a TOML file"
        )
    return {"name": name, **(table if is_file else table[name])}


def main(argv: Sequence[str] | None = None) -> int:
    """Predict and print.

    Returns:
        The exit status: 0, or 2 for a wrong argument.
    """
    given = _parser().parse_args(argv)
    numbers = {name: getattr(given, name) for name in _NUMBERS}
    try:
        cluster = load_cluster(given.cluster)
        workload = cluster.workload(load_gpt2(given.model), given.dtype)
        names = ALL if given.scheme == "all" else given.scheme.split(",")
        schemes = {name: settings_of(name, **numbers) for name in names}
        rows: list[dict[str, Any]] = []
        for gbit in given.links or [cluster.link_gbit]:
            copies = 1 if given.scatter_gather else workload.tp
            found = {
                name: predict(
                    workload, one, cluster.costs(workload, one, given.dtype, gbit, copies)
                )
                for name, one in {UNCOMPRESSED: settings_of(UNCOMPRESSED), **schemes}.items()
            }
            rows += _rows(gbit, found, list(schemes))
    except (PredictionError, SettingsError) as error:
        sys.stderr.write(f"predict: {error}\n")
        return 2
    sys.stdout.write(_text(workload, f"{cluster.name}: {cluster.source}", rows))
    return 0


def _rows(
    gbit: float, found: dict[str, Prediction], schemes: Sequence[str]
) -> Iterator[dict[str, Any]]:
    best_s = min(found[scheme].iteration_s for scheme in schemes)
    for scheme in schemes:
        one = found[scheme]
        yield {
            "kind": "simulated",
            "link": f"{gbit:g} Gb/s",
            "scheme": scheme,
            "iteration_ms": round(one.iteration_s * 1e3, 1),
            "times_faster": round(found[UNCOMPRESSED].iteration_s / one.iteration_s, 3),
            "best": "best" if one.iteration_s == best_s else "",
            **{f"{kind}_mb": round(nbytes / 1e6, 3) for kind, nbytes in one.sent_bytes.items()},
        }


def _text(workload: Workload, source: str, rows: list[dict[str, Any]]) -> str:
    lines = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    body = [
        "  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    w = workload
    head = (
        f"simulated, not run: {w.model.name}, pp {w.pp}, dp {w.dp}, tp {w.tp}, "
        f"{w.num_micro_batches} micro-batches of {w.micro_batch_size} x {w.model.seq_length} tokens"
    )
    return "\n".join([head, source, "", *body]) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m optimus_cc predict",
        description="Predict an iteration of 1F1B with compressed communication.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help="a model's name or TOML file, as `2.5B`")
    add("--cluster", default="a100x64", help="a cluster's name or TOML file [a100x64]")
    add("--links", type=_rates, metavar="GBIT,...", help="a node's link, Gb/s [the cluster's own]")
    add("--dtype", choices=ELEMENT_BYTES, default="fp32", help="of the model [fp32, as published]")
    text = "shards of a node send a message once between them, not each its copy as here"
    add("--scatter-gather", action="store_true", help=text)
    add("--scheme", default="all", help="schemes, with ',' between them [all]")
    for name in _NUMBERS:
        default = getattr(Settings(), name)
        add(f"--{name}", type=int, default=default, help=f"[{default}]")
    return parser


def _rates(text: str) -> list[float]:
    try:
        rates = [float(word) for word in text.split(",")]
    except ValueError:
        rates = [0.0]
    if not all(0 < rate < float("inf") for rate in rates):
        raise argparse.ArgumentTypeError(f"{text!r}: give positive rates, as 0.1,1,10")
    return rates
