"""The error a user can mend by giving another path."""

from __future__ import annotations


class LogError(ValueError):
    """A log or a sweep folder cannot be used; the message names it and says why."""
