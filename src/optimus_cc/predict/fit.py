"""Times of a trained run, from its folder; what was measured holds for links that cost nothing."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from optimus_cc.predict.cluster import ELEMENT_BYTES
from optimus_cc.predict.pipeline import Links, Times, predict
from optimus_cc.predict.workload import (
    Model,
    PredictionError,
    Workload,
    factorise_flops,
    product_flops,
)
from optimus_cc.settings import Settings, SettingsError
from optimus_cc.sizes import matrix_shape

FREE = Links(bytes_per_s=float("inf"), latency_s=0.0)
"""Links that cost nothing, as memory's are beside those of a network."""
ETHERNET_SHARE = 1448 / 1514
"""Payload of a full TCP segment in its Ethernet frame, which is what a link's rate is of."""
LATENCY_S = 1e-4
"""From posting a transfer to its first byte, between processes of a machine; assumed."""
BUFFER_BYTES = 87_380.0
"""What Linux takes from a sender before it is on its way, at the least; assumed."""
BURST_BYTES = 15 * 1024 * ETHERNET_SHARE
"""Payload in the token bucket of HTB that shaped links are made with."""
_ROUNDS = 40
_LEAST_MS = 1e-6
_WARM_UP = 3
"""First iterations that are left out."""


@dataclass(frozen=True)
class Run:
    """A run of the trainer ``megatron-pipeline``."""

    path: Path
    engine: str
    workload: Workload
    settings: Settings
    cores: int
    link_mbit: float
    """Of its ranks' links; 0 for the memory of one machine."""
    iteration_s: float
    """Median over the iterations after the first, as is every other number."""
    stages_ms: dict[str, list[float]]
    """Phases by stage; empty where they were not recorded."""
    sent_bytes: dict[str, int]

    @property
    def compresses(self) -> bool:
        """Whether it spent time on compressing."""
        return self.settings.inter_grad_comp or self.settings.grad_comp


def read_run(path: Path) -> Run:
    """Read a run folder.

    Raises:
        PredictionError: it is none, or of something that is not predicted.
    """
    try:
        return _read(path)
    except (PredictionError, SettingsError) as error:
        raise PredictionError(f"{path}: {error}") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise PredictionError(
            f"{path}: no run folder of the trainer megatron-pipeline ({error!r})"
        ) from None


def _read(path: Path) -> Run:
    run = json.loads((path / "run.json").read_text(encoding="utf-8"))
    config = json.loads((path / "ds_config.json").read_text(encoding="utf-8"))
    lines = (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    point = run["point"]
    settings = Settings(**config.get("optimus_cc", {}))
    workload = _workload(point)
    first = max(_WARM_UP, settings.warm_up_iterations(point["iterations"]))
    iterations = [e for e in events if e["event"] == "iteration" and e["iteration"] > first]
    if not iterations:
        raise PredictionError(f"no iteration after the first {first}; train more")
    return Run(
        path=path,
        engine=point.get("engine", ""),
        workload=workload,
        settings=settings,
        cores=run.get("provenance", {}).get("cpu", {}).get("cores_usable", 0),
        link_mbit=point.get("link_mbit", 0),
        iteration_s=_median(e["iteration_ms"] for e in iterations) / 1e3,
        stages_ms=_stages(iterations),
        sent_bytes={kind: iterations[-1][f"{kind}_bytes"] for kind in _KINDS},
    )


_KINDS = ("forward", "backward", "gradients", "embedding")


def _workload(point: dict[str, Any]) -> Workload:
    model = dict(point["model"])
    architecture = model.pop("architecture")
    if architecture != "gpt2":
        raise PredictionError(f"architecture = '{architecture}': only 'gpt2' is predicted")
    if point["tp"] != 1:
        raise PredictionError(
            f"tp = {point['tp']}: exchanges of shards over a network are not predicted; give tp = 1"
        )
    replica = point["micro_batch_size"] * point["dp"]
    return Workload(
        model=Model(**model),
        pp=point["pp"],
        dp=point["dp"],
        tp=1,
        micro_batch_size=point["micro_batch_size"],
        num_micro_batches=point["global_batch_size"] // replica,
        element_bytes=ELEMENT_BYTES[point["dtype"]],
        recomputes=point["activation_checkpointing"],
    )


def _stages(iterations: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Medians of each phase of each stage."""
    given = iterations[0].get("stages_ms", {})
    return {
        name: [
            _median(event["stages_ms"][name][stage] for event in iterations)
            for stage in range(len(given[name]))
        ]
        for name in given
    }


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


@dataclass(frozen=True)
class Fit:
    """Times of a rank alone on a core."""

    times: Times
    """Of computing; those of compression are that run's own."""
    compression_flops_per_s: float
    """From the run's compression, or from its computing where it compressed nothing."""


def fit(run: Run, cores: int) -> Fit:
    """Times of computing with which a simulation of a run has its measured phases.

    Ranks that compute at once share the machine's cores, in the run as in the simulation; what is
    found are the times of a rank alone on a core. Forward is a third of a micro-batch's computing,
    a quarter with recomputation.

    Args:
        run: on links that cost nothing.
        cores: of its machine, that the ranks may use.

    Raises:
        PredictionError: the run does not say what each stage took, or its links are shaped.
    """
    if run.link_mbit:
        raise PredictionError(
            f"{run.path}: link_mbit = {run.link_mbit:g}: times are taken from a run on links as "
            "they are; give one with link_mbit = 0"
        )
    if not run.stages_ms:
        raise PredictionError(
            f"{run.path}: metrics.jsonl has no stages_ms, the phases of each stage; run it again"
        )
    # Times may be rounded to zero, and are divided by.
    measured = {
        name: [max(ms, _LEAST_MS) / 1e3 for ms in values] for name, values in run.stages_ms.items()
    }
    num_stages, one = run.workload.pp, run.workload
    reducing = [stage for stage in range(num_stages) if one.dp > 1 or one.has_embedding(stage)]
    # The last rank to come does not wait for others: the least is its own work.
    reduction_s = min(measured["gradients"][s] + measured["embedding"][s] for s in reducing)
    # The first stage is the last to come to the update, which does not wait before it either.
    update_s, compression_s = measured["update"][0], sum(measured["compression"])
    share = [one.numel(stage) / one.numel(0) for stage in range(num_stages)]
    unit = 4 if run.workload.recomputes else 3
    forward = [s / run.workload.num_micro_batches / unit for s in measured["compute"]]
    reduction, update, exchange, flops_per_s = reduction_s, update_s, 0.0, math.inf
    for _ in range(_ROUNDS):
        times = Times(
            forward_s=forward,
            backward_s=[(unit - 1) * seconds for seconds in forward],
            reduction_s=[reduction * (stage in reducing) for stage in range(num_stages)],
            update_s=[update * numel for numel in share],
            exchange_s=exchange,
            cores=cores,
        )
        if math.isinf(flops_per_s):
            flops_per_s = _flops_per_s(run.workload, times)
        simulated = predict(
            one, run.settings, with_compression(times, one, run.settings, flops_per_s), FREE
        )
        found = simulated.phases_s
        forward = [
            seconds * wanted / got
            for seconds, wanted, got in zip(
                forward, measured["compute"], found["compute"], strict=True
            )
        ]
        reduction *= reduction_s / min(found["reduction"][stage] for stage in reducing)
        update *= update_s / found["update"][0]
        # What is left of the iteration is the messages'; half of it a round, not to overshoot.
        left_s = run.iteration_s - simulated.iteration_s
        exchange = max(0.0, exchange + left_s / (4 * (one.num_micro_batches + one.pp)))
        if sum(found["compression"]):
            flops_per_s *= sum(found["compression"]) / compression_s
    return Fit(times, flops_per_s)


def _flops_per_s(workload: Workload, times: Times) -> float:
    """Rate at which micro-batches are computed, which stands in for that of compression."""
    flops = sum(sum(workload.forward_flops(stage)) for stage in range(workload.pp))
    return flops / sum(times.forward_s)


def with_compression(
    times: Times, workload: Workload, settings: Settings, flops_per_s: float
) -> Times:
    """Add the times of compressing to those of computing.

    Args:
        times: of computing.
        workload: what is sent.
        settings: what of it is compressed.
        flops_per_s: of compressing, by one rank alone.
    """
    rows, columns = matrix_shape(workload.message_shape)
    rank = settings.inter_grad_comp_rank
    pairs = (workload.averaged(stage, settings)[0] for stage in range(workload.pp))
    return replace(
        times,
        pack_s=factorise_flops(rows, columns, rank) / flops_per_s,
        restore_s=product_flops(rows, columns, rank) / flops_per_s,
        power_sgd_s=tuple(
            sum(factorise_flops(*matrix_shape(s), settings.grad_comp_rank) for s in of_stage)
            / flops_per_s
            for of_stage in pairs
        ),
    )


def ethernet(link_mbit: float) -> Links:
    """Links of ranks in network namespaces, shaped to a rate in Mbit/s."""
    return Links(link_mbit * 1e6 / 8 * ETHERNET_SHARE, LATENCY_S, BUFFER_BYTES, BURST_BYTES)
