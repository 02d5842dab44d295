"""Modules that are imported when a test needs them, and not by every worker that collects it."""

from importlib import import_module


class Later:
    """A module that is imported as soon as something of it is asked for."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        if attribute.startswith("_"):  # pytest asks for such of whatever a test file has
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)
