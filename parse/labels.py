"""Names for runs that are shown together: what varies among them, and the engine."""

from __future__ import annotations

from collections.abc import Sequence

from parse.log.records import Setting, engine_label
from parse.run_folder import Run

_NAMED = {
    "model": "",
    "tp": "TP ",
    "dp": "DP ",
    "global_batch_size": "global batch ",
    "micro_batch_size": "micro-batch ",
    "offload_ratio": "offload ratio ",
    "subgroup_numel": "subgroup ",
    "hog_share": "hogged ",
}


def label_runs(runs: Sequence[Run]) -> None:
    """Set ``case`` and ``label`` of every run.

    The case names the settings that are not the same in all runs; the label adds the engine, and
    the repeat, or a number where nobody counted them, where that is not unique.
    """
    varying = [key for key in _NAMED if len({run.log.settings.get(key) for run in runs}) > 1]
    seen: set[tuple[str, str, int]] = set()
    for run in runs:
        settings = run.log.settings
        parts = [_part(key, settings[key]) for key in varying if key in settings]
        run.case = ", ".join(parts)
        label = ", ".join([*parts, engine_label(settings)])
        number = run.repeat or 1
        while (label, run.source, number) in seen:
            number += 1
        seen.add((label, run.source, number))
        run.label = label if number == 1 else f"{label} #{number}"


def _part(key: str, value: Setting) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if key == "subgroup_numel" and isinstance(value, int) and value % 1_000_000 == 0:
        text = f"{value // 1_000_000}M"
    return _NAMED[key] + text
