"""What a configuration costs a model: memory of a rank by array, and the time of an iteration."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.predict.machine import Machine
from deep_optimizer_states.predict.memory import Peaks, peaks_of
from deep_optimizer_states.predict.model import Model
from deep_optimizer_states.predict.predict import Prediction, predict
from deep_optimizer_states.predict.workload import workload_of_json
from deep_optimizer_states.units import GIB
from ds_config.lenient import Placeholder
from ds_config.release import without
from ds_config.rules import AUTO, ZERO

SHOWN_ARRAYS = 8
_DECIDED_BY = (
    ("activations|logits", "train_micro_batch_size_per_gpu"),
    ("bucket", f"{ZERO}.reduce_bucket_size"),
    ("gathered", f"{ZERO}.stage3_max_live_parameters"),
    ("slots|weights on their way", f"{ZERO}.sub_group_size"),
    ("stays on the device", "deep_optimizer_states.ratio"),
    ("moments|master|gradient", f"{ZERO}.stage, .offload_optimizer"),
    ("weights$", f"{ZERO}.stage, .offload_param"),
)
"""Patterns of arrays' names, to the keys that say how large such an array is, or where."""


@dataclass(frozen=True)
class Cost:
    """One array of the moment at which a rank holds the most while it trains."""

    name: str
    place: str
    """``GPU`` or ``host``."""
    num_bytes: float
    decided_by: str
    """Keys, or empty where the model alone decides."""


@dataclass(frozen=True)
class Costs:
    """Predicted costs of a configuration."""

    model: str
    ranks: int
    peaks: Peaks | None
    """Memory of one rank; None where it is not known."""
    recomputed: Peaks | None
    """The same where the model recomputes its layers in backward, which no JSON says."""
    time: Prediction | None
    """None without a machine, or where its time is not known."""
    reason: str
    """Why something is not known; empty where all is."""

    @property
    def arrays(self) -> list[Cost]:
        """Return the largest arrays, the largest first."""
        found = self.peaks.train.arrays if self.peaks else ()
        largest = sorted(found, key=lambda array: -array.num_bytes)[:SHOWN_ARRAYS]
        return [
            Cost(one.name, "host" if one.on_host else "GPU", one.num_bytes, _decided_by(one.name))
            for one in largest
        ]

    def as_json(self) -> dict[str, Any]:
        """Return the costs as an object for JSON; sizes in bytes, times in seconds."""
        sizes = {"kept": self.peaks, "recomputed": self.recomputed}
        return {
            "model": self.model,
            "ranks": self.ranks,
            "predicted": True,
            "memory": {
                name: {
                    phase: {"device_bytes": int(p.device_bytes), "host_bytes": int(p.host_bytes)}
                    for phase, p in peaks.phases
                }
                for name, peaks in sizes.items()
                if peaks
            },
            "arrays": [vars(one) for one in self.arrays],
            "iteration_s": self.time and self.time.iteration_s,
            "phases_s": self.time and dict(_phases(self.time)),
            "reason": self.reason,
        }

    def lines(self) -> Iterator[str]:
        """Yield the costs as lines of text."""
        ranks = f"{self.ranks} rank{'s'[: self.ranks > 1]}"
        yield f"What it costs {self.model} on {ranks} (predicted, not run)"
        for peaks, words in (
            (self.peaks, "the model keeps its activations"),
            (self.recomputed, "it recomputes its layers in backward"),
        ):
            if peaks:
                size = peaks.train.device_bytes / GIB, peaks.train.host_bytes / GIB
                yield f"  a rank takes {size[0]:.1f} GiB of its GPU and {size[1]:.1f} GiB of host"
                yield f"    memory while it trains, where {words}"
        for one in self.arrays:
            decided = f"  [{one.decided_by}]" if one.decided_by else ""
            yield f"  {one.num_bytes / GIB:8.2f} GiB  {one.place:4s}  {one.name}{decided}"
        if self.time:
            parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in _phases(self.time))
            yield f"  an iteration takes {self.time.iteration_s:.2f} s: {parts}"
            yield f"    the update waits for: {self.time.binding}"
        if self.reason:
            yield f"  not known: {self.reason}"


def costs_of(
    table: Mapping[str, Any], model: Model, ranks: int, machine: Machine | None, sequence: int
) -> Costs:
    """Predict what a configuration costs.

    Args:
        table: As read; what is still to be filled in is left to DeepSpeed's defaults.
        model: What is trained.
        ranks: Data-parallel ranks.
        machine: Measured rates, for a time; None for memory on a GPU alone.
        sequence: Tokens a sample; 0 for the model's.
    """
    known = without(table, lambda _, value: value == AUTO or isinstance(value, Placeholder))
    peaks: list[Peaks] = []
    has_gpu, time, reason = machine is None or machine.gpus > 0, None, ""
    try:
        for recomputes in (False, True):
            workload = workload_of_json(
                known,
                model,
                dp=ranks,
                sequence_length=sequence,
                activation_checkpointing=recomputes,
                materialized_attention=False,
            )
            peaks.append(peaks_of(workload, has_gpu))
            reason = workload.kept.unknown
            if machine is not None and not recomputes:
                time = predict(workload, machine)
    except (DeepOptimizerStatesError, TypeError, ValueError, AttributeError) as error:
        # A value that is a fault, and is told as one, may be of any type.
        reason = " ".join(str(error).split())
    both = [*peaks, None, None]
    return Costs(model.name, ranks, both[0], both[1], time, reason)


def _decided_by(name: str) -> str:
    return next((keys for pattern, keys in _DECIDED_BY if re.search(pattern, name)), "")


def _phases(time: Prediction) -> Iterator[tuple[str, float]]:
    yield "forward", time.forward_s
    yield "backward", time.backward_s
    yield "update", time.update_s
    if time.hidden_s:
        yield "hidden behind forward", -time.hidden_s
