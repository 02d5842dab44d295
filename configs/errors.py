"""Errors that a user can mend: they name field, value, why, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """A setting is wrong; the message names it, its value and the way out."""


class explain:
    """Words of such errors, read as ``explain.unknown(...)``."""

    @staticmethod
    def unknown(kind: str, name: str, known: Iterable[str]) -> str:
        """``unknown model '7': did you mean '7B'? known: ...``; no guess where nothing is near."""
        names = list(known)
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
        hint = f"did you mean '{near[0]}'? " if near else ""
        return f"unknown {kind} {name!r}: {hint}known: {', '.join(names)}"
