"""What there is to run, study by study: ``bash master-script.sh --list``."""

from __future__ import annotations

from collections.abc import Iterator

from configs.naming import Namer, flat
from configs.study import Study, load_study, study_names
from configs.sweep import load_sweep, sweep_names


def listing(chosen: Study | None) -> str:
    """Sweeps, points and engines of one study, or of every shipped one."""
    studies = [load_study(name) for name in study_names()] if chosen is None else [chosen]
    return "\n".join(line for study in studies for line in _lines(study))


def _lines(study: Study) -> Iterator[str]:
    default = " [default]" if study.is_default else ""
    yield f"study {study.name}{default}: {study.title}"
    yield "  sweeps (--sweep NAME)"
    for name in sweep_names(study):
        yield f"    {name:24} {load_sweep(name, study).description}"
    yield "  points (python -m launch.run NAME)"
    namer = Namer(study)
    for name, path in sorted(study.files("points").items()):
        point = study.load_point(path)
        words = f"{point.model.name} {namer.engine(flat(point))}, {point.num_ranks} rank(s)"
        yield f"    {name:24} {words}"
    yield "  engines (--engines NAME,NAME:field=value)"
    for name, engine in study.engines.items():
        notes = ["the reference"] if name == study.reference else []
        notes += [f"needs {need}" for need in engine.needs]
        note = f" ({', '.join(notes)})" if notes else ""
        yield f"    {name:24} {(engine.description or engine.title).rstrip('.')}{note}"
