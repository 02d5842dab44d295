"""Refuse a DeepSpeed whose internals differ from those this package was checked against.

A version number says little: a patch release may rewrite a method we override. So the source of
every such method is hashed, and a difference is named.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

from deep_optimizer_states.errors import UnsupportedDeepSpeedError

_REFUSES = "which this package overrides or relies on"


def _table(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="ascii"))


NEWEST = "0.19.8"
"""The newest DeepSpeed release that this package was checked against."""

FINGERPRINTS: dict[str, dict[str, str]] = _table("deepspeed_methods.toml")
"""Class -> method -> first 12 hex digits of the sha256 of its source in ``NEWEST``."""

OLDER: dict[str, dict[str, dict[str, str]]] = _table("deepspeed_releases.toml")
"""The same of what older releases have otherwise, by release, the oldest first."""

CHECKED_VERSIONS = (*OLDER, NEWEST)
"""Every release that this package was checked against, the oldest first."""


def check_deepspeed() -> None:
    """Compare the installed DeepSpeed's methods with those of its release that were checked.

    A release that is not known must have the methods of the newest one that is.

    Raises:
        UnsupportedDeepSpeedError: DeepSpeed is missing or a method differs; names them.
    """
    install = f"install one of deepspeed=={', '.join(CHECKED_VERSIONS)}"
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ImportError as error:
        raise UnsupportedDeepSpeedError(
            f"DeepSpeed cannot be imported ({error}); {install}"
        ) from error
    installed = deepspeed.__version__
    known = installed if installed in OLDER else NEWEST
    changed = changed_methods(known)
    if changed:
        than = "as it was released" if installed == known else known
        raise UnsupportedDeepSpeedError(
            f"DeepSpeed {installed} differs from {than} in {', '.join(changed)}, {_REFUSES}; "
            f"{install}"
        )


def changed_methods(version: str) -> list[str]:
    """Methods of the installed DeepSpeed that are not those of a checked release: ``class.method``.

    Args:
        version: one of :data:`CHECKED_VERSIONS`.
    """
    return [
        f"{path.partition(':')[2]}.{method}"
        for path, methods in fingerprints_of(version).items()
        for method, expected in methods.items()
        if fingerprint(path, method) != expected
    ]


def fingerprints_of(version: str) -> dict[str, dict[str, str]]:
    """Hashes of a checked release: class -> method -> hash, empty for no such method.

    Args:
        version: one of :data:`CHECKED_VERSIONS`.
    """
    own = OLDER.get(version, {})
    return {path: {**methods, **own.get(path, {})} for path, methods in FINGERPRINTS.items()}


def fingerprint(path: str, method: str) -> str:
    """Hash of a method's source, indentation and trailing blanks left out; empty if it is gone.

    Args:
        path: ``module:class``.
        method: Name of a method of that class.
    """
    module, _, name = path.partition(":")
    try:
        function = getattr(getattr(importlib.import_module(module), name), method)
    except (ImportError, AttributeError):
        return ""
    source = textwrap.dedent(inspect.getsource(_innermost(function)))
    lines = "\n".join(line.rstrip() for line in source.splitlines())
    return hashlib.sha256(lines.encode()).hexdigest()[:12]


def _innermost(function: Any) -> Any:  # noqa: ANN401 - a function as DeepSpeed decorates it
    """The method inside DeepSpeed's decorators, which do not say what they wrap."""
    function = inspect.unwrap(function)
    while function.__name__ == "wrapped_fn" and function.__closure__:
        names = function.__code__.co_freevars
        function = function.__closure__[names.index("func")].cell_contents
    return function


def table_of_installed() -> str:
    """What the installed DeepSpeed has otherwise than the newest, as the table of releases has it.

    It is the first thing that a release which is to be supported needs; its equality the second.
    """
    version = importlib.import_module("deepspeed").__version__
    lines: list[str] = []
    for path, methods in FINGERPRINTS.items():
        found = {method: fingerprint(path, method) for method in methods}
        changed = {method: own for method, own in found.items() if own != methods[method]}
        if changed:
            lines += [
                f'["{version}"."{path}"]',
                *(f'{key} = "{own}"' for key, own in changed.items()),
            ]
            lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table_of_installed())
