"""Names for runs that are read together, made by the namer that names points everywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from configs.errors import ConfigError
from configs.naming import Namer
from configs.study import Study, default_study, study_from
from parse.errors import LogError
from parse.run_folder import Run


def label_runs(runs: Sequence[Run]) -> Study:
    """Set ``study``, ``case``, ``name`` and ``label`` of every run.

    Points keep the names that they were run under, unless two of different settings share one. The
    label adds the repeat, or a number where the repeats are not counted, where that is not unique.

    Returns:
        The study that the runs are of.

    Raises:
        LogError: the runs are of several studies, or theirs is damaged.
    """
    study = study_of(runs)
    namer = Namer(study)
    for run in runs:
        run.study = study
    points = [run.fields for run in runs]
    varying = namer.varying(points)
    # Runs that differ in their seed alone are judged together, so no case is named by a seed.
    of_case = [name for name in varying if name not in free_by_gate(study)]
    own = _own_names(points)
    seen: set[tuple[str, str, int]] = set()
    lengths: dict[str, set[int]] = {}
    for run, point in zip(runs, points, strict=True):
        run.case = namer.case(point, of_case)
        if not run.point and "iterations" in run.settings:
            lengths.setdefault(run.case, set()).add(run.settings["iterations"])
    for run, point, given in zip(runs, points, own, strict=True):
        run.name = given or namer.name(point, varying)
        if not run.point and len(lengths.get(run.case, ())) > 1:
            length = f"{run.settings.get('iterations', 'no')} iterations"
            run.case, run.name = f"{run.case}, {length}", f"{run.name} {length}"
        number = run.repeat or 1
        while (run.name, run.source, number) in seen:
            number += 1
        seen.add((run.name, run.source, number))
        run.label = run.name if number == 1 else f"{run.name} #{number}"
    return study


def free_by_gate(study: Study) -> tuple[str, ...]:
    """Fields in which the repeats of a point may differ, because the gate allows for it."""
    return () if study.gate.kind == "bitwise" else ("seed",)


def study_of(runs: Sequence[Run]) -> Study:
    """The study that travelled with the runs; the default one where none did.

    Raises:
        LogError: the runs are of several studies, or theirs is damaged.
    """
    tables: list[Any] = []
    for run in runs:
        table = run.run_json.get("study")
        if table is not None and table not in tables:
            tables.append(table)
    try:
        studies = [study_from(table, "the study of the runs") for table in tables]
    except ConfigError as error:
        raise LogError(f"{error}; parse it with the version that ran it") from None
    names = sorted({study.name for study in studies})
    if len(names) > 1:
        raise LogError(
            f"runs of the studies {', '.join(names)}: parse each study into a folder of its own"
        )
    return studies[-1] if studies else default_study()


def _own_names(points: Sequence[dict[str, Any]]) -> list[str]:
    """Names that the points have; none at all where one of them is of two points."""
    settings: dict[str, set[str]] = {}
    names = [str(point.get("name") or "") for point in points]
    for name, point in zip(names, points, strict=True):
        rest = {key: value for key, value in point.items() if key != "name"}
        settings.setdefault(name, set()).add(json.dumps(rest, sort_keys=True, default=str))
    unique = all(len(found) == 1 for name, found in settings.items() if name)
    return names if unique else [""] * len(names)
