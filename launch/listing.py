"""What there is to run, for ``--list``: studies with their sweeps, points and engines.

Studies are data, so that this reads their files by the standard library alone and answers before
anything is installed: ``python -m launch.listing [--study NAME]``. What else stands on the command
line is left to the main job, which checks the files too.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from configs.errors import ConfigError, explain
from configs.templates import laid_over

STUDIES = Path(__file__).resolve().parents[1] / "configs" / "studies"


def listing(study: str | None) -> str:
    """Return the sweeps, points and engines of a study, or of every shipped one.

    Raises:
        ConfigError: there is no such study, or a file is not TOML.
    """
    shipped = {path.parent.name: path.parent for path in sorted(STUDIES.glob("*/study.toml"))}
    if study is None:
        found = [_read(folder) for folder in shipped.values()]
        found.sort(key=lambda table: not table.get("is_default"))
    else:
        folder = shipped.get(study, Path(study).resolve())
        if not (folder / "study.toml").is_file():
            raise ConfigError(explain.unknown("study", study, shipped))
        found = [_read(folder)]
    return "\n".join(line for table in found for line in _lines(table))


def _read(folder: Path) -> dict[str, Any]:
    """Return the study of a folder over the one that it extends; ``files`` are those of both."""
    own, kinds = _toml(folder / "study.toml"), ("sweeps", "points")
    files = {kind: {p.stem: p for p in folder.glob(f"{kind}/*.toml")} for kind in kinds}
    if base := own.get("extends"):
        sibling = folder.parent / str(base)
        whole = _read(sibling if sibling.is_dir() else STUDIES / str(base))
        files = {kind: {**whole["files"][kind], **files[kind]} for kind in kinds}
        own = laid_over({**whole, "is_default": False}, own)
    return {**own, "name": folder.name, "files": files}


def _lines(study: dict[str, Any]) -> Iterator[str]:
    default = " [default]" if study.get("is_default") else ""
    yield f"study {study['name']}{default}: {study.get('title', '')}"
    yield "  sweeps (--sweep NAME)"
    for name, path in sorted(study["files"]["sweeps"].items()):
        yield f"    {name:24} {_toml(path).get('description', '')}"
    yield "  points (python -m launch.run NAME)"
    for name, path in sorted(study["files"]["points"].items()):
        yield f"    {name:24} {', '.join(f'{key} {value}' for key, value in _toml(path).items())}"
    yield "  engines (--engines NAME,NAME)"
    for name, engine in study.get("engines", {}).items():
        notes = ["the reference"] if name == study.get("reference") else []
        notes += [f"also {', '.join(names)}" for names in [engine.get("aliases", ())] if names]
        notes += [f"needs {need}" for need in engine.get("needs", ())]
        note = f" ({', '.join(notes)})" if notes else ""
        about = str(engine.get("description") or engine.get("title"))
        yield f"    {name:24} {about.rstrip('.')}{note}"


def _toml(path: Path) -> dict[str, Any]:
    import tomllib  # Python 3.11 has it; `main` says so on an older one

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def main(argv: Sequence[str]) -> int:
    """List on the terminal; takes ``--study NAME`` out of the main job's command line."""
    study = None
    for word, after in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if name == "--study":
            study = value if equals else after
    try:
        sys.stdout.write(f"{listing(study)}\n")
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except ModuleNotFoundError:
        found = ".".join(map(str, sys.version_info[:2]))
        sys.stderr.write(f"error: python3 is {found}; give 3.11 to 3.13 as PYTHON=python3.12\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
