"""The pieces of ``make gpu-check``, in the order of their worth. Standard library alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

MARKED = r"^\* "
"""Lines of a log that a piece means for the summary."""
LEFT_OUT_STATUS = 77
"""With which a piece ends that this machine cannot run; its last line says why."""
_SPARE_S = 40
"""What a piece that watches its own time keeps free of its limit, for tables and figures."""


@dataclass(frozen=True)
class Setting:
    """What a piece's command depends on.

    Attributes:
        root: The checkout.
        results: The piece's own folder, empty.
        site: Where packages are installed to.
        wheels: Folder of wheels to install from; None without one.
        small: Whether this is the form for a machine without a GPU.
        limit_s: When the piece is ended.
        memory_gib: Host memory that the piece ``memory`` touches.
    """

    root: Path
    results: Path
    site: Path
    wheels: Path | None
    small: bool
    limit_s: float
    memory_gib: int


@dataclass(frozen=True)
class Piece:
    """One thing to find out.

    Attributes:
        name: On the command line and in the summary.
        what: What it shows.
        limit_s: After which it is ended.
        least_s: With less time left it is not started.
        arguments: Python's, for a setting.
        group: Pieces that fit into ten minutes together.
        needs: Pieces that have to have succeeded.
        shows: Matches the lines of its log that go into the summary.
    """

    name: str
    what: str
    limit_s: float
    least_s: float
    arguments: Callable[[Setting], Sequence[str]]
    group: str = ""
    needs: tuple[str, ...] = ("facts", "install", "build")
    shows: str = MARKED


def _module(name: str, *arguments: str) -> Sequence[str]:
    return ("-m", f"benchmarks.gpu_check.{name}", *arguments)


def _install(setting: Setting) -> Sequence[str]:
    wheels = ("--wheels", str(setting.wheels)) if setting.wheels else ()
    return _module("install", str(setting.site), *wheels)


def _equality(name: str) -> Callable[[Setting], Sequence[str]]:
    def arguments(setting: Setting) -> Sequence[str]:
        small = ("--small",) if setting.small else ()
        return _module("equality", name, str(setting.results / "equality.json"), *small)

    return arguments


def _gpu_tests(setting: Setting) -> Sequence[str]:
    # Other packages than the pinned ones may warn, which is no fault of what is tested.
    options = ("-o", "filterwarnings=default", "-p", "no:cacheprovider", "--timeout", "120")
    return ("-m", "pytest", "-q", "-rs", *options, "tests/gpu")


def _calibrate(setting: Setting) -> Sequence[str]:
    on_cpu = ("--device", "cpu") if setting.small else ()
    profile = str(setting.results / "machine.toml")
    return ("-m", "deep_optimizer_states", "calibrate", "-o", profile, *on_cpu)


def _sweep(study: str, sweep: str, spare_s: int = _SPARE_S) -> Callable[[Setting], Sequence[str]]:
    """A sweep of a study of peers; without a GPU in its small form."""

    def arguments(setting: Setting) -> Sequence[str]:
        seconds = f"{max(30.0, setting.limit_s - spare_s):.0f}"
        return _module("rows", str(setting.results), study, sweep, seconds)

    return arguments


LANES = str(Path(__file__).parent / "lanes")
"""A study whose runs keep timelines."""
PIECES: tuple[Piece, ...] = (
    Piece(
        "facts",
        "what machine this is",
        60,
        5,
        lambda setting: _module("facts", str(setting.results / "facts.json")),
        needs=(),
    ),
    Piece(
        "install",
        "the packages that lack, without a network",
        90,
        10,
        _install,
        needs=("facts",),
    ),
    Piece(
        "build",
        "DeepSpeed's CPUAdam and our kernel compile here and have the same bits",
        300,
        20,
        lambda setting: _module("build"),
        needs=("facts", "install"),
        shows=r"equal to DeepSpeedCPUAdam",
    ),
    Piece("smoke", "six policies have stock's bits", 120, 40, _equality("few"), "first"),
    Piece(
        "tests",
        "the device's kernel has the host's bits; page locks",
        150,
        40,
        _gpu_tests,
        "first",
        shows=r"^(FAILED|ERROR)|\d (passed|failed|skipped|error)",
    ),
    Piece(
        "mappings",
        "what page-locking memory costs, by how it is mapped",
        60,
        20,
        lambda setting: _module("mappings"),
        "first",
        needs=("facts",),
    ),
    Piece(
        "calibrate",
        "rates of links, host memory, Adam and page locks",
        110,
        40,
        _calibrate,
        "first",
        shows=r"^  \S+_per_s: |^  \d+ thread|rates in",
    ),
    Piece(
        "lanes",
        "which lane is busy how long, with and without DeepSpeed's synchronising timer",
        420,
        90,
        _sweep(LANES, "lanes"),
        "first",
    ),
    Piece(
        "bench",
        "make bench-gpu: whole iterations beside stock's, and the bounds",
        545,
        120,
        _sweep("peers", "gpu", spare_s=100),  # calibration comes last
        "second",
    ),
    Piece(
        "4b",
        "a size that stock holds as well",
        545,
        150,
        _sweep(LANES, "4b"),
        "third",
    ),
    Piece(
        "7b",
        "7 billion parameters; stock's comes last and may not fit",
        545,
        150,
        _sweep(LANES, "7b"),
        "fourth",
    ),
    Piece("equality", "every feature, five policies", 545, 60, _equality("all"), "fifth"),
    Piece(
        "sanitizer",
        "compute-sanitizer finds nothing in the device's kernel",
        250,
        60,
        lambda setting: _module("sanitizer", f"{setting.limit_s - _SPARE_S:.0f}"),
        "sixth",
    ),
    Piece(
        "memory",
        "host memory that shows only once it is used; asked for with --memory",
        90,
        10,
        lambda setting: _module("memory", str(setting.memory_gib)),
        needs=("facts",),
    ),
)
BY_NAME = {piece.name: piece for piece in PIECES}
GROUPS = tuple(dict.fromkeys(piece.group for piece in PIECES if piece.group))


def chosen_pieces(words: Sequence[str], memory_gib: int) -> list[Piece]:
    """Pieces by names of pieces and groups, all without a name, each behind what it needs.

    Args:
        words: From the command line.
        memory_gib: Host memory to touch before anything else is run; 0 for none.

    Raises:
        ValueError: A word names neither.
    """
    for word in words:
        if word not in (*BY_NAME, *GROUPS):
            known = ", ".join((*GROUPS, *BY_NAME))
            raise ValueError(f"unknown piece or group '{word}'; known: {known}")
    wanted = {p.name for p in PIECES if p.name in words or p.group in words or not words}
    wanted.discard("memory")
    if memory_gib:
        wanted.add("memory")
    for piece in reversed(PIECES):
        if piece.name in wanted:
            wanted.update(piece.needs)
    # Memory is touched early: what comes after sees all of it.
    order = sorted(PIECES, key=lambda piece: piece.name not in ("facts", "memory"))
    return [piece for piece in order if piece.name in wanted]
