"""Refuse a DeepSpeed whose internals differ from those this package was checked against.

A version number says little: a patch release may rewrite a method we override. So the source of
every such method is hashed, and a difference is named.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import textwrap
import tomllib
from pathlib import Path
from typing import Any

from deep_optimizer_states.errors import UnsupportedDeepSpeedError

CHECKED_VERSION = "0.19.8"
"""The DeepSpeed release whose methods are hashed below."""

FINGERPRINTS: dict[str, dict[str, str]] = tomllib.loads(
    Path(__file__).with_name("deepspeed_methods.toml").read_text(encoding="ascii")
)
"""Class -> method -> first 12 hex digits of the sha256 of its source in ``CHECKED_VERSION``."""


def check_deepspeed() -> None:
    """Compare the installed DeepSpeed's methods with those checked.

    Raises:
        UnsupportedDeepSpeedError: DeepSpeed is missing or a method differs; names them.
    """
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ImportError as error:
        raise UnsupportedDeepSpeedError(
            f"DeepSpeed cannot be imported ({error}); install deepspeed=={CHECKED_VERSION}"
        ) from error
    changed = [
        f"{path.partition(':')[2]}.{method}"
        for path, methods in FINGERPRINTS.items()
        for method, expected in methods.items()
        if fingerprint(path, method) != expected
    ]
    if changed:
        raise UnsupportedDeepSpeedError(
            f"DeepSpeed {deepspeed.__version__} differs from {CHECKED_VERSION} in "
            f"{', '.join(changed)}, which this package overrides or relies on; "
            f"install deepspeed=={CHECKED_VERSION}"
        )


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
