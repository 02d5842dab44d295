"""Refuse a DeepSpeed whose internals differ from those this package was checked against.

A version number says little: a patch release may rewrite a method we override. So the source of
every such method is hashed, and a DeepSpeed in which one differs is refused by the names of the
methods. Hashes are data: those of the newest release in ``deepspeed_methods.toml``, by the stages
that rely on a class, and what older releases have otherwise in ``deepspeed_releases.toml``.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import platform
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

from deep_optimizer_states.errors import ConfigError, UnsupportedDeepSpeedError


def _table(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="ascii"))


NEWEST = "0.19.8"
"""The newest DeepSpeed release that this package was checked against."""

FINGERPRINTS: dict[str, dict[str, str]] = {
    path: methods
    for classes in _table("deepspeed_methods.toml").values()
    for path, methods in classes.items()
}
"""Class -> method -> first 12 hex digits of the sha256 of its source in ``NEWEST``."""

OLDER: dict[str, dict[str, dict[str, str]]] = _table("deepspeed_releases.toml")
"""The same of what older releases have otherwise, by release, the oldest first."""

CHECKED_VERSIONS = (*OLDER, NEWEST)
"""Every release that this package was checked against, the oldest first."""

ALLOW_UNVERIFIED = "DEEP_OPTIMIZER_STATES_ALLOW_UNVERIFIED"
"""Environment variable that allows a release of which nothing is known, where it is 1."""

_NAMES = {"Darwin": "macOS"}
_INSTALL = f"install one of deepspeed=={', '.join(CHECKED_VERSIONS)}"
_WAY_OUT = (
    f"{_INSTALL}, or give up the promise of equal bits with install(allow_unverified=True) or "
    f"{ALLOW_UNVERIFIED}=1"
)
_SAYS = {
    "known": "differs from what was released as {}",
    "older": "was never checked; {} is the nearest release that was",
    "newer": "is newer than {}, the newest release that was checked",
}


def loses_gradients(version: str) -> bool:
    """Return whether stages 1 and 2 of this release lose gradients with the optimizer on the CPU.

    From 0.15.2 to 0.18.9 they drop those of all micro-batches of a window but one (DeepSpeed's pull
    requests 7967 and 7981), so that equal bits would be wrong.
    """
    from packaging.version import Version

    public = Version(Version(version).public)
    return Version("0.15.2") <= public <= Version("0.18.9")


def check_deepspeed(allow_unverified: bool = False) -> None:
    """Refuse a DeepSpeed of which equal bits cannot be promised.

    A release that was checked must be as it was released, and a newer one must have the methods of
    the newest that was checked. An older one is refused.

    Args:
        allow_unverified: Warn instead of refusing.

    Raises:
        UnsupportedDeepSpeedError: This is not Linux, or DeepSpeed is missing or is not such a
            release; names the methods that differ.
        ConfigError: ``DEEP_OPTIMIZER_STATES_ALLOW_UNVERIFIED`` is neither 0 nor 1.
    """
    if (system := platform.system()) != "Linux":
        raise UnsupportedDeepSpeedError(
            f"deep_optimizer_states needs Linux, and this is {_NAMES.get(system, system)}: train "
            "without install() here, which is stock DeepSpeed"
        )
    allow_unverified = _is_allowed_by_environment() or allow_unverified
    installed = installed_version()
    checked, how = _nearest(installed)
    changed = changed_methods(checked)
    if not changed and how != "older":
        if how == "newer":
            say(f"DeepSpeed {installed} has the methods of {checked}, the newest that was checked")
        return
    says = f"DeepSpeed {installed} {_SAYS[how].format(checked)}"
    code = f"other code in {', '.join(changed)}" if changed else "no method differs from it"
    if not allow_unverified:
        raise UnsupportedDeepSpeedError(f"{says}: {code}; {_WAY_OUT}")
    say(f"{says}: {code}. With allow_unverified it is used all the same: BITS MAY NOT BE STOCK'S")


def installed_version() -> str:
    """Return the installed DeepSpeed's version.

    Raises:
        UnsupportedDeepSpeedError: There is none that can be imported.
    """
    try:
        return str(importlib.import_module("deepspeed").__version__)
    except ImportError as error:
        raise UnsupportedDeepSpeedError(
            f"DeepSpeed cannot be imported ({error}); {_INSTALL}"
        ) from error


def _is_allowed_by_environment() -> bool:
    said = os.environ.get(ALLOW_UNVERIFIED, "") or "0"
    if said not in ("0", "1"):
        raise ConfigError(f"{ALLOW_UNVERIFIED} = '{said}': set it to 1, or to 0 or nothing")
    return said == "1"


def _nearest(installed: str) -> tuple[str, str]:
    """Return the checked release to compare a version with, and a key of ``_SAYS``."""
    from packaging.version import InvalidVersion, Version  # DeepSpeed needs it, so it is there

    try:
        public = Version(Version(installed).public)  # a build's own label says nothing
    except InvalidVersion as error:
        raise UnsupportedDeepSpeedError(
            f"DeepSpeed's version is '{installed}', which is no release's; {_WAY_OUT}"
        ) from error
    for checked in CHECKED_VERSIONS:
        if public <= Version(checked):
            return checked, "known" if public == Version(checked) else "older"
    return NEWEST, "newer"


def say(text: str) -> None:
    """Say something once on each machine, by DeepSpeed's logger."""
    from deepspeed.utils import logger

    if os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning(f"deep_optimizer_states: {text}")


def changed_methods(version: str) -> list[str]:
    """Return methods of the installed DeepSpeed that are not those of a checked release."""
    return [
        f"{path.partition(':')[2]}.{method}"
        for path, methods in fingerprints_of(version).items()
        for method, expected in methods.items()
        if fingerprint(path, method) != expected
    ]


def fingerprints_of(version: str) -> dict[str, dict[str, str]]:
    """Return the hashes of a checked release: class -> method -> hash, empty for no such method."""
    own = OLDER.get(version, {})
    return {path: {**methods, **own.get(path, {})} for path, methods in FINGERPRINTS.items()}


def fingerprint(path: str, method: str) -> str:
    """Hash the source of a method of ``module:class``; empty if it is gone."""
    module, _, name = path.partition(":")
    try:
        function = getattr(getattr(importlib.import_module(module), name), method)
    except (ImportError, AttributeError):
        return ""
    source = textwrap.dedent(inspect.getsource(_innermost(function)))
    lines = "\n".join(line.rstrip() for line in source.splitlines())
    return hashlib.sha256(lines.encode()).hexdigest()[:12]


def _innermost(function: Any) -> Any:
    """Return the method inside DeepSpeed's decorators, which do not say what they wrap."""
    function = inspect.unwrap(function)
    while function.__name__ == "wrapped_fn" and function.__closure__:
        names = function.__code__.co_freevars
        function = function.__closure__[names.index("func")].cell_contents
    return function


def table_of_installed() -> str:
    """Return the installed DeepSpeed's part of the table of older releases.

    It is the first thing that a release which is to be supported needs; its equality the second.
    """
    lines: list[str] = []
    for path, newest in FINGERPRINTS.items():
        found = {method: fingerprint(path, method) for method in newest}
        changed = [f'{key} = "{own}"' for key, own in found.items() if own != newest[key]]
        if changed:
            lines += [f'["{installed_version()}"."{path}"]', *changed, ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table_of_installed())
