"""Predicted beside measured, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.memory.cases import key_of, load_cases
from benchmarks.memory.estimators import accelerate_bytes, deepspeed_bytes
from benchmarks.memory.measure import read_results
from deep_optimizer_states.predict.memory.architecture import architecture_of
from deep_optimizer_states.predict.memory.peaks import CPU_PROCESS_BYTES, MIB, Peaks, peaks_of
from deep_optimizer_states.predict.memory.setting import Setting, setting_of

MEASURED = Path(__file__).with_name("measured.jsonl")
"""What the figures of docs/memory.md were measured as."""
PHASES = ("load", "train", "save")


@dataclass(frozen=True)
class Row:
    """A case that was measured.

    Attributes:
        name: In words.
        measured: Bytes above the process's own, by phase.
        predicted: The same.
        others: Bytes while training by DeepSpeed's estimator and by accelerate's; None where it has
            none.
    """

    name: str
    measured: Mapping[str, float]
    predicted: Mapping[str, float]
    others: Mapping[str, float | None]

    def error(self, phase: str) -> float:
        """Relative error of a prediction; below 0 where it was too little."""
        return self.predicted[phase] / self.measured[phase] - 1


def setting_of_case(case: Mapping[str, Any]) -> Setting:
    """A case as the model of memory knows it."""
    return setting_of(
        case["ds_config"],
        architecture_of(case["model"], case["model_name"]),
        case["ranks"],
        sequence=case["sequence"],
        checkpointing=case["checkpointing"],
        is_flash=case["attention"] == "sdpa",
    )


def rows_of(name: str, path: Path, with_others: bool = False) -> list[Row]:
    """Cases of a set (``fitted``, ``judged``) that have a result, in the order of the file."""
    results, found = read_results(path), []
    for case in load_cases()[name]:
        result = results.get(key_of(case))
        if result is None:
            continue
        setting = setting_of_case(case)
        measured = {phase: float(result[f"{phase}_bytes"]) for phase in PHASES}
        others = _others(setting) if with_others else {}
        found.append(Row(result["name"], measured, _above(peaks_of(setting, False)), others))
    return found


def _above(peaks: Peaks) -> dict[str, float]:
    """Predicted bytes above the process's own."""
    return {phase: getattr(peaks, phase).host_bytes - CPU_PROCESS_BYTES for phase in PHASES}


def _others(setting: Setting) -> dict[str, float | None]:
    pair = deepspeed_bytes(setting)
    return {"DeepSpeed": sum(pair) if pair else None, "accelerate": accelerate_bytes(setting)}


def as_markdown(rows: Iterable[Row]) -> str:
    """A table of MiB and errors."""
    lines = [
        "| case | load | train | save | DeepSpeed's estimate | accelerate's |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        cells = [
            f"{row.predicted[phase] / MIB:.0f} / {row.measured[phase] / MIB:.0f} "
            f"({row.error(phase):+.1%})"
            for phase in PHASES
        ]
        for num_bytes in row.others.values():
            error = "" if num_bytes is None else f" ({num_bytes / row.measured['train'] - 1:+.0%})"
            cells.append("-" if num_bytes is None else f"{num_bytes / MIB:.0f}{error}")
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(rows: list[Row]) -> str:
    """Median and worst errors of each phase, ours and others'."""
    lines = [
        "| | cases | median error | most under | most over |",
        "|---|---:|---:|---:|---:|",
    ]
    found = {f"this model, {phase}": [row.error(phase) for row in rows] for phase in PHASES}
    for other in ("DeepSpeed", "accelerate"):
        pairs = ((row.others.get(other), row.measured["train"]) for row in rows)
        found[f"{other}, train"] = [said / seen - 1 for said, seen in pairs if said is not None]
    for name, errors in found.items():
        if errors:
            lines.append(
                f"| {name} | {len(errors)} | {median(map(abs, errors)):.1%} | "
                f"{min(*errors, 0.0):+.1%} | {max(*errors, 0.0):+.1%} |"
            )
    return "\n".join(lines)
