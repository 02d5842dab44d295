"""Search of configurations: the product of a few lists, with memory and time of each.

A rung is what decides who holds and updates what: stage, offload, engine and types of states. Each
rung is taken in the way that is fastest for it: micro-batch, recomputation, share of the state in
host memory, buckets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from deep_optimizer_states.core.host import HEADROOM
from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.predict.machine import Machine
from deep_optimizer_states.predict.memory import Peaks, peaks_of, with_share_for_host
from deep_optimizer_states.predict.model import Model
from deep_optimizer_states.predict.predict import Prediction, bound_update_s, phases_of, predict
from deep_optimizer_states.predict.workload import BYTES, Workload, workload_of_json

STAGES = (0, 1, 2, 3)
PLACES = {
    ("none", "none"): "nothing",
    ("none", "cpu"): "weights",
    ("cpu", "none"): "optimizer",
    ("cpu", "cpu"): "optimizer + weights",
    ("nvme", "none"): "optimizer to NVMe",
    ("nvme", "cpu"): "both, NVMe + host",
    ("nvme", "nvme"): "both to NVMe",
}
"""Where the optimizer state and the 16-bit weights are, and what that is called."""
STOCK, PLUGIN = "stock", "plugin"
ENGINES = (PLUGIN, STOCK)
FP32_STATES, HALF_STATES = "fp32", "16-bit"
STATES = (FP32_STATES, HALF_STATES)
RECOMPUTE = (False, True)
SMALL_BUCKET_NUMEL = 50_000_000
SMALL_LIVE_NUMEL = 100_000_000
SUBGROUP_NUMEL = 100_000_000
"""``sub_group_size`` of the plugin, and beside small buckets."""
BUCKETS: tuple[dict[str, int], ...] = (
    {},
    {
        "reduce_bucket_size": SMALL_BUCKET_NUMEL,
        "stage3_prefetch_bucket_size": SMALL_BUCKET_NUMEL,
        "stage3_max_live_parameters": SMALL_LIVE_NUMEL,
        "stage3_max_reuse_distance": SMALL_LIVE_NUMEL,
        "sub_group_size": SUBGROUP_NUMEL,
    },
)
"""DeepSpeed's own sizes of buckets (5e8 and 1e9), and smaller ones where these do not fit."""
ADAM = {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
SMALL_BUCKETS = "no profile has a rate of the start of a collective, of which there are many more"
_ALIKE = 1.1
"""Times that differ by less than this may be the same in the two digits that are compared."""
MEMORY_ALONE = "memory alone is given: name a profile with --machine"


@dataclass(frozen=True)
class NodeMemory:
    """Memory of one node, whose ranks share its host memory."""

    gpus: int
    """Ranks in all."""
    ranks_a_node: int
    device_bytes: float | None  # of one GPU; None without one
    host_bytes: float  # of one node
    nvme: str = ""
    """A folder on a local disk; empty without one."""
    machine: Machine | None = None
    """The profile with its rates; None where memory alone is given."""
    gpus_a_node: int = 0
    """Places for GPUs of a node; 0 where that is not known."""

    def excess(self, short_bytes: Mapping[str, float]) -> float:
        """Return the largest of some lacks as a share of the memory that there is."""
        there = {"host": self.host_bytes, "device": self.device_bytes}
        lacks = ((lack, there[place]) for place, lack in short_bytes.items())
        return max((lack / size if size else math.inf for lack, size in lacks), default=0.0)

    @property
    def profile(self) -> Machine | None:
        """Return the profile with this memory of a GPU, whose free part state may take."""
        if self.machine is None or self.device_bytes is None or not self.machine.gpus:
            return self.machine
        return replace(self.machine, device_memory_bytes=self.device_bytes)

    def with_gpu(self) -> NodeMemory:
        """Return the room with one GPU more, in the same node where it has a place for it."""
        slots = self.gpus_a_node or self.gpus + 1
        full = self.ranks_a_node < self.gpus or self.ranks_a_node >= slots
        ranks = self.ranks_a_node + (not full)
        return replace(self, gpus=self.gpus + 1, ranks_a_node=ranks)

    def with_host_memory(self, num_bytes: float) -> NodeMemory:
        """Return the room with more host memory in each node."""
        return replace(self, host_bytes=self.host_bytes + num_bytes)


@dataclass(frozen=True)
class Training:
    """A model, and how it is to be trained."""

    model: Model
    sequence: int
    """Tokens a sample."""
    micro_batch: int
    """Samples a rank would like to handle at once."""
    dtype: str
    samples: int = 0
    """Samples of an update, of one rank; 0 for one micro-batch."""

    @property
    def micro_batches(self) -> tuple[int, ...]:
        """Return the sizes that are tried, the largest first; accumulation makes up for each."""
        samples = self.samples or self.micro_batch
        sizes = range(min(self.micro_batch, samples), 0, -1)
        return tuple(size for size in sizes if samples % size == 0)


@dataclass(frozen=True)
class Setting:
    """What decides who holds and updates what."""

    stage: int
    optimizer_at: str
    weights_at: str
    engine: str
    states: str
    dtype: str

    def is_possible(self, room: NodeMemory) -> bool:
        """Return whether DeepSpeed, the plugin and the room have it."""
        on_host = self.optimizer_at == "cpu"
        return (
            (self.optimizer_at == "none" or self.stage > 0)
            and (self.weights_at == "none" or self.stage == 3)
            and ("nvme" not in (self.optimizer_at, self.weights_at) or self._uses(room.nvme))
            and (self.engine == STOCK or on_host)
            and (self.has_fp32_states or self._has_half_states)
        )

    def _uses(self, nvme: str) -> bool:
        return bool(nvme) and self.stage == 3

    @property
    def _has_half_states(self) -> bool:
        return self.engine == PLUGIN and self.stage == 3 and self.dtype != "fp32"

    @property
    def offloaded(self) -> str:
        """Return what is offloaded, in words."""
        return PLACES[self.optimizer_at, self.weights_at]

    @property
    def name(self) -> str:
        """Return a name that no other setting has."""
        parts = [f"stage {self.stage}", self.dtype]
        parts += [f"{self.offloaded} offloaded"] if self.offloaded != "nothing" else []
        parts += [self.engine] if self.engine == PLUGIN else []
        parts += [] if self.has_fp32_states else [f"{self.states} states"]
        return ", ".join(parts)

    @property
    def has_fp32_states(self) -> bool:
        """Return whether master weights and moments are kept in fp32."""
        return self.states == FP32_STATES


@dataclass(frozen=True)
class Way:
    """A setting with all that is to be said for a run."""

    config: dict[str, Any]
    workload: Workload
    has_small_buckets: bool
    peaks: Peaks
    """Memory of one rank."""
    short_bytes: dict[str, float]
    """Lack of a GPU (``device``) or a node (``host``) for every rank to load, train, save."""
    room: NodeMemory

    @property
    def fits(self) -> bool:
        """True where there is room for every rank."""
        return not self.short_bytes

    @property
    def no_time(self) -> str:
        """Return why the machine's profile has no time for it; empty where it may have one."""
        if self.room.machine is None:
            return MEMORY_ALONE
        return SMALL_BUCKETS if self.has_small_buckets else ""

    @property
    def excess(self) -> float:
        """Return the largest lack as a share of the memory; 0 where it fits."""
        return self.room.excess(self.short_bytes)

    @cached_property
    def parts_s(self) -> tuple[float, float]:
        """Return forward and backward, and what no update is faster than; infinite if not known."""
        if self.no_time or self.room.machine is None:
            return math.inf, 0.0
        try:
            passes = phases_of(self.workload, self.room.machine)
            is_offloaded = self.workload.host_share > 0
            update = bound_update_s(self.workload, self.room.machine) if is_offloaded else 0.0
        except DeepOptimizerStatesError:
            return math.inf, 0.0
        return passes.forward_s + passes.backward_s, update

    @property
    def least_s(self) -> float:
        """Return a time below which no iteration is: forward may hide the plugin's update."""
        return max(self.parts_s)


@dataclass(frozen=True)
class Rung:
    """A setting, in the way that is fastest for it."""

    setting: Setting
    config: dict[str, Any]
    """DeepSpeed's JSON, complete."""
    checkpointing: bool
    """True where the model computes its layers again in backward."""
    peaks: Peaks
    """Memory of one rank."""
    short_bytes: dict[str, float]
    """Lack of a GPU (``device``) or a node (``host``) for every rank to load, train, save."""
    leanest_short_bytes: dict[str, float]
    """The same in the leanest way, whose time may not be known."""
    workload: Workload
    """What runs, as the model of time has it."""
    prediction: Prediction | None
    """Of the whole batch; None where there is no time."""
    no_time: str
    """Why there is no time; empty where there is one."""
    is_exact: bool
    """False where it trains in fewer bits than were asked for, which changes the losses."""
    unknown: str
    """Why activations are not known, which are not counted then; empty where they are."""

    @property
    def name(self) -> str:
        """Return the setting's name."""
        return self.setting.name

    @property
    def fits(self) -> bool:
        """True where there is room for every rank."""
        return not self.short_bytes

    @property
    def iteration_s(self) -> float | None:
        """Return the predicted time of the whole batch; None where there is none."""
        return None if self.prediction is None else self.prediction.iteration_s

    @property
    def share(self) -> float:
        """Return the share of the optimizer state that is in host memory, if it is offloaded."""
        return self.workload.offload_ratio

    @property
    def has_small_buckets(self) -> bool:
        """True where DeepSpeed's own buckets do not fit."""
        return "reduce_bucket_size" in self.config["zero_optimization"]

    @property
    def urgency(self) -> tuple[bool, bool, bool, float]:
        """Return what the list is sorted by: fits, trains what was asked for, has a time, time.

        Of times that are the same in the two digits that a prediction is good for, the way that
        offloads less comes first.
        """
        seconds = math.inf if self.iteration_s is None else float(f"{self.iteration_s:.2g}")
        return not self.fits, not self.is_exact, self.iteration_s is None, seconds


def ladder(task: Training, room: NodeMemory) -> list[Rung]:
    """Return all rungs: first those that fit, of these the fastest first.

    Those in fewer bits than were asked for come after the others, and those without a time after
    those with one, those that offload less first.
    """
    rungs = [_rung(one, ways, task) for one, ways in _candidates(task, room)]
    return sorted(rungs, key=lambda rung: rung.urgency)


def best(task: Training, room: NodeMemory) -> Rung | None:
    """Return the first of :func:`ladder` if it fits, without the times of what is slower."""
    every = [(setting, _best(ways)) for setting, ways in _candidates(task, room)]
    fitting = [(setting, way) for setting, way in every if way.fits]
    exact = [pair for pair in fitting if not _loses(pair[0], task)]
    found: list[tuple[int, Rung]] = []
    for place, (setting, way) in sorted(
        enumerate(exact or fitting), key=lambda pair: pair[1][1].least_s
    ):
        known = min((r.iteration_s for _, r in found if r.iteration_s), default=math.inf)
        if found and way.least_s > _ALIKE * known:
            break
        found.append((place, _rung(setting, [way], task)))
    first = min(found, key=lambda pair: (pair[1].urgency, pair[0]), default=None)
    return first[1] if first else None


def _loses(setting: Setting, task: Training) -> bool:
    """Return whether a setting trains in fewer bits than were asked for."""
    return not setting.has_fp32_states or BYTES[setting.dtype] < BYTES[task.dtype]


def _candidates(task: Training, room: NodeMemory) -> Iterator[tuple[Setting, list[Way]]]:
    dtypes = dict.fromkeys((task.dtype, "bf16" if task.dtype == "fp32" else task.dtype))
    product = itertools.product(dtypes, STATES, PLACES, ENGINES, STAGES)
    for dtype, states, (optimizer, weights), engine, stage in product:
        setting = Setting(stage, optimizer, weights, engine, states, dtype)
        if not setting.is_possible(room):
            continue
        ways: list[Way] = []
        for buckets in BUCKETS if setting.stage else BUCKETS[:1]:
            if not any(way.fits for way in ways):
                ways += _ways(setting, task, room, buckets)
        yield setting, ways


def _ways(
    setting: Setting, task: Training, room: NodeMemory, buckets: Mapping[str, int]
) -> Iterator[Way]:
    """Yield every way with some buckets: the leanest is the last."""
    for micro_batch, recompute in itertools.product(task.micro_batches, RECOMPUTE):
        config = _config(setting, task, room, micro_batch)
        zero = config["zero_optimization"]
        is_of_3 = setting.stage == 3
        zero |= {name: v for name, v in buckets.items() if is_of_3 or name == "reduce_bucket_size"}
        workload = workload_of_json(
            config,
            task.model,
            dp=room.gpus,
            sequence_length=task.sequence,
            activation_checkpointing=recompute,
            materialized_attention=False,
        )
        if room.device_bytes is not None:
            host, device = HEADROOM * room.host_bytes, HEADROOM * room.device_bytes
            workload = with_share_for_host(workload, host, device, room.ranks_a_node)
        yield Way(config, workload, bool(buckets), *_memory(workload, room), room)


def _config(setting: Setting, task: Training, room: NodeMemory, micro_batch: int) -> dict[str, Any]:
    accumulation = (task.samples or task.micro_batch) // micro_batch
    zero: dict[str, Any] = {"stage": setting.stage}
    for block, place in (
        ("offload_optimizer", setting.optimizer_at),
        ("offload_param", setting.weights_at),
    ):
        path = {"nvme_path": room.nvme} if place == "nvme" else {}
        if place != "none":
            zero[block] = {"device": place, **path, "pin_memory": True}
    config: dict[str, Any] = {
        "train_batch_size": micro_batch * accumulation * room.gpus,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": dict(ADAM)},
        **({setting.dtype: {"enabled": True}} if setting.dtype != "fp32" else {}),
        "zero_optimization": zero,
    }
    if setting.engine == PLUGIN:
        zero["sub_group_size"] = SUBGROUP_NUMEL
        config["deep_optimizer_states"] = {"enabled": True}
    if setting.states == HALF_STATES:
        # Master weights, the gradients beside them and both moments are kept in 16 bits.
        config[setting.dtype][f"{setting.dtype}_master_weights_and_grads"] = True
        config["optimizer"]["params"]["fp32_optimizer_states"] = False
    return config


def _memory(workload: Workload, room: NodeMemory) -> tuple[Peaks, dict[str, float]]:
    """Return what a rank takes, and what the room is short of for all of them."""
    peaks = peaks_of(workload, room.device_bytes is not None)
    lacks = {"host": peaks.node_bytes(room.ranks_a_node) - HEADROOM * room.host_bytes}
    if room.device_bytes is not None:
        lacks["device"] = peaks.device_bytes - HEADROOM * room.device_bytes
    return peaks, {place: num_bytes for place, num_bytes in lacks.items() if num_bytes > 0}


def _best(ways: list[Way]) -> Way:
    """Return the fastest way that fits; where none does, the leanest with DeepSpeed's buckets."""
    fitting = [way for way in ways if not way.workload.kept.unknown and way.fits]
    usual = [way for way in ways if not way.has_small_buckets]
    if fitting:
        return min(fitting, key=lambda way: (way.has_small_buckets, sum(way.parts_s)))
    # Where activations are not known, nothing says how much less another way would leave.
    return usual[-1] if usual[-1].workload.kept.unknown else min(usual, key=lambda w: w.excess)


def _rung(setting: Setting, ways: list[Way], task: Training) -> Rung:
    way = _best(ways)
    workload, config, machine = way.workload, way.config, way.room.profile
    reason, found = way.no_time, None
    if not reason and machine is not None:
        try:
            found = predict(workload, machine)
        except DeepOptimizerStatesError as error:  # the profile lacks a rate, or cannot run it
            reason = str(error)
    leanest, is_exact = min(ways, key=lambda one: one.excess), not _loses(setting, task)
    return Rung(
        setting,
        config,
        workload.activation_checkpointing,
        way.peaks,
        way.short_bytes,
        leanest.short_bytes,
        workload,
        found,
        reason,
        is_exact,
        workload.kept.unknown,
    )
