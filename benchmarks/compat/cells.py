"""Cells of docs/compatibility.md: what is run in each, and what came of it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.compat import environments
from benchmarks.compat.environments import BUILT, EnvironmentFailedError
from benchmarks.compat.runs import SETTINGS, TRAINER_TESTS, run_equality, run_trainer, versions_of
from benchmarks.process import SOURCE_FOLDER

EQUALITY, TRAINER = "equality", "trainer"
_CODE = {
    EQUALITY: (
        "src/deep_optimizer_states/**/*",
        *(f"tests/integration/engine/{name}.py" for name in ("equality_*", "cases_*", "engine_*")),
        "requirements/run.txt",
    ),
    TRAINER: (
        *(f"{name}/**/*" for name in ("src", "configs", "launch", "dataset", "tests/support")),
        *(f"{name}/**/*" if Path(name).suffix == "" else name for name in TRAINER_TESTS),
        "requirements/*.txt",
    ),
}
"""Files that decide what a cell says."""
_CODE_ENDS = (".py", ".cpp", ".inc", ".toml", ".txt")
_LIMIT_S = 3600.0
EXTENT = "once"
"""Of the table of comparisons, in every cell: each feature under one policy."""


@dataclass(frozen=True)
class Cell:
    """Releases that are run together.

    Attributes:
        kind: ``equality``, the table of comparisons with stock, or ``trainer``, the tests of the
            trainers on megatron-core.
        python: For example ``3.12``.
        deepspeed: Its release.
        megatron: Release of megatron-core; empty where it is not used.
    """

    kind: str
    python: str
    deepspeed: str
    megatron: str = ""

    @property
    def name(self) -> str:
        """For people and files."""
        megatron = f", megatron-core {self.megatron}" if self.megatron else ""
        return f"{self.kind}, Python {self.python}, DeepSpeed {self.deepspeed}{megatron}"

    @property
    def ranks(self) -> tuple[int, ...]:
        """Numbers of ranks that are compared: one, and also two where the Python is the oldest."""
        return (1, 2) if self.python == next(iter(trainers_by_python())) else (1,)

    @property
    def releases(self) -> dict[str, str]:
        """Package -> release."""
        megatron = {"megatron-core": self.megatron} if self.megatron else {}
        return {"deepspeed": self.deepspeed, **megatron}


@dataclass(frozen=True)
class Result:
    """What came of a cell.

    Attributes:
        code: Identifies the code that was run.
        versions: Package -> release, as the environment itself says.
        equal: Number of ranks -> comparisons without a difference, or, of trainers, 1 -> tests
            that passed.
        different: ``ranks: feature | policy`` that differed, or tests that failed.
        refused: Feature -> why the plugin refuses it with these releases.
        features: Feature -> whether its comparisons were all equal.
        reason: Why it did not come to its end; empty if it did.
        seconds: How long it ran, environment included.
    """

    code: str
    versions: dict[str, str] = field(default_factory=dict)
    equal: dict[str, int] = field(default_factory=dict)
    different: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    features: dict[str, bool] = field(default_factory=dict)
    reason: str = ""
    seconds: float = 0.0

    @property
    def is_ok(self) -> bool:
        """Whether it came to its end and nothing differed."""
        return not self.reason and not self.different


def trainers_by_python() -> dict[str, list[str]]:
    """Python -> releases of megatron-core, as pyproject.toml has them."""
    found: dict[str, list[str]] = SETTINGS["megatron-core"]
    return found


def all_cells(deepspeeds: Iterable[str]) -> list[Cell]:
    """Every cell of the tables.

    Args:
        deepspeeds: Releases of DeepSpeed, the oldest first.
    """
    releases, pythons = tuple(deepspeeds), trainers_by_python()
    cells = [Cell(EQUALITY, python, release) for python in pythons for release in releases]
    return cells + [
        Cell(TRAINER, python, releases[-1], megatron)
        for python, megatrons in pythons.items()
        for megatron in megatrons
    ]


def code_of(kind: str) -> str:
    """Identifies the code that cells of a kind run."""
    digest = hashlib.sha256()
    paths = {path for pattern in _CODE[kind] for path in SOURCE_FOLDER.glob(pattern)}
    for path in sorted(paths):
        if path.suffix in _CODE_ENDS:
            digest.update(str(path.relative_to(SOURCE_FOLDER)).encode() + b"\0")
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def stored(cells: Iterable[Cell]) -> dict[Cell, Result]:
    """Results of cells that were run with the code as it is now."""
    codes = {kind: code_of(kind) for kind in _CODE}
    found = {}
    for cell in cells:
        path = _path(cell)
        if path.is_file():
            result = Result(**json.loads(path.read_text(encoding="utf-8")))
            if result.code == codes[cell.kind]:
                found[cell] = result
    return found


def run_cell(cell: Cell, limit_s: float = _LIMIT_S) -> Result:
    """Make a cell's environment, run what belongs in it, and keep what came of it.

    Args:
        cell: What to run.
        limit_s: Of each of its processes.
    """
    begin, code = time.monotonic(), code_of(cell.kind)
    found: dict[str, Any] = {}
    try:
        environment = environments.make(cell.python, cell.releases)
        found["versions"] = versions_of(environment)
        if found["versions"] != {**found["versions"], **cell.releases}:
            raise EnvironmentFailedError(f"the environment has {found['versions']}")
        if cell.kind == EQUALITY:
            found |= run_equality(environment, EXTENT, cell.ranks, limit_s)
        else:
            found |= run_trainer(environment, limit_s)
    except EnvironmentFailedError as error:
        found["reason"] = str(error)
    result = Result(code, **found, seconds=round(time.monotonic() - begin, 1))
    path = _path(cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(asdict(result), indent=1), encoding="utf-8")
    beside.replace(path)
    return result


def _path(cell: Cell) -> Path:
    return BUILT / "results" / f"{cell.name.replace(', ', '-').replace(' ', '-')}.json"
