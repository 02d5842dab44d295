"""Errors a user can mend."""

from __future__ import annotations


class DatasetError(Exception):
    """Text or prepared files cannot be used; the message says which, why and what to do."""
