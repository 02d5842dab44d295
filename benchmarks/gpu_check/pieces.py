"""The pieces of ``make gpu-check``, read from pieces.toml. Standard library alone."""

from __future__ import annotations

import tomllib
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


Arguments = Callable[[Setting], Sequence[str]]
"""Python's arguments for a setting."""


@dataclass(frozen=True)
class Piece:
    """One thing to find out, by its name; pieces.toml says what the other fields mean."""

    name: str
    what: str
    limit_s: float
    least_s: float
    arguments: Arguments
    group: str = ""
    needs: Sequence[str] = ("facts", "install", "build")
    shows: str = MARKED


def _arguments(words: Sequence[str], small: Sequence[str], spare_s: float) -> Arguments:
    def arguments(setting: Setting) -> Sequence[str]:
        seconds = f"{max(30.0, setting.limit_s - spare_s):.0f}"
        places = {**vars(setting), "wheels": setting.wheels or "", "seconds": seconds}
        filled = (word.format(**places, lanes=LANES) for word in words)
        return (*filled, *(small if setting.small else ()))

    return arguments


def _read_pieces() -> tuple[Piece, ...]:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    pieces = []
    for name, row in table.items():
        parts = row.pop("arguments"), row.pop("small", ()), row.pop("spare_s", _SPARE_S)
        pieces.append(Piece(name, **row, arguments=_arguments(*parts)))
    return tuple(pieces)


LANES = str(Path(__file__).parent / "lanes")
"""A study whose runs keep timelines."""
PIECES = _read_pieces()
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
