"""Refuse a DeepSpeed whose internals differ from those this package was checked against.

A version number says little: a patch release may rewrite a method we override. So the source of
every such method is hashed, and a difference is named. Of a release that is newer than all that are
known, a trial decides.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deep_optimizer_states.errors import ConfigError, UnsupportedDeepSpeedError


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


ALLOW_UNVERIFIED = "DEEP_OPTIMIZER_STATES_ALLOW_UNVERIFIED"
"""Environment variable that allows a release of which nothing is known, where it is 1."""

_INSTALL = f"install one of deepspeed=={', '.join(CHECKED_VERSIONS)}"
_WAY_OUT = (
    f"{_INSTALL}, or give up the promise of equal bits with install(allow_unverified=True) or "
    f"{ALLOW_UNVERIFIED}=1"
)
_SAYS = {
    "known": "differs from what was released as {} in",
    "older": "was never checked; from {} it differs in",
    "newer": "is newer than {}, the newest release that was checked, and differs from it in",
}


@dataclass(frozen=True)
class LostGradients:
    """Releases whose own ZeRO-1 and ZeRO-2 offload loses gradients, so that equal bits are wrong.

    Attributes:
        first, last: Releases from and up to which it does.
        why: What is lost, and where DeepSpeed says so.
    """

    first: str
    last: str
    why: str

    def concerns(self, version: str) -> bool:
        """Whether a release loses gradients.

        Args:
            version: A release as PEP 440 writes it; a build's own label says nothing.
        """
        from packaging.version import Version

        release = Version(Version(version).public)
        return Version(self.first) <= release <= Version(self.last)


LOST_GRADIENTS = LostGradients(
    "0.15.2",
    "0.18.9",
    "with the optimizer on the CPU, its stages 1 and 2 drop gradients of all micro-batches of a "
    "window but one (DeepSpeed's pull requests 7967 and 7981)",
)
"""What stages 1 and 2 are refused for; stage 3 is not concerned."""


def check_deepspeed(allow_unverified: bool = False) -> None:
    """See that the installed DeepSpeed is one of which equal bits can be promised.

    A release that was checked must be as it was released. A newer one must have the methods of the
    newest that was checked, or pass a trial, see :func:`release_check.check_release`. An older one
    is refused.

    Args:
        allow_unverified: Warn instead of refusing, and make no trial.

    Raises:
        UnsupportedDeepSpeedError: DeepSpeed is missing, or equal bits cannot be promised; names the
            methods that differ.
        ConfigError: ``DEEP_OPTIMIZER_STATES_ALLOW_UNVERIFIED`` is neither 0 nor 1.
    """
    allow_unverified = _is_allowed_by_environment() or allow_unverified
    installed = installed_version()
    checked, how = _nearest(installed)
    changed = changed_methods(checked)
    if not changed and how != "older":
        if how == "newer":
            _say(f"DeepSpeed {installed} has the methods of {checked}, the newest that was checked")
        return
    problem = f"DeepSpeed {installed} {_SAYS[how].format(checked)} {', '.join(changed)}"
    if allow_unverified:
        _say(f"{problem}. allow_unverified is set, so it is used: BITS MAY NOT BE STOCK'S")
    elif how == "newer":
        from deep_optimizer_states.release_check import check_release

        check_release(installed, problem, _WAY_OUT)
    else:
        raise UnsupportedDeepSpeedError(
            f"{problem}, which this package overrides or relies on; {_WAY_OUT}"
        )


def installed_version() -> str:
    """The installed DeepSpeed's version.

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
    """The checked release to compare a version with, and how they lie: a key of ``_SAYS``."""
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


def _say(text: str) -> None:
    from deepspeed.utils import logger

    if os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning(f"deep_optimizer_states: {text}")


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


def fingerprints_of_installed() -> dict[str, dict[str, str]]:
    """Hashes of the installed release: class -> method -> hash, empty for no such method."""
    return {
        path: {method: fingerprint(path, method) for method in methods}
        for path, methods in FINGERPRINTS.items()
    }


def table_of_installed() -> str:
    """What the installed DeepSpeed has otherwise than the newest, as the table of releases has it.

    It is the first thing that a release which is to be supported needs; its equality the second.
    """
    lines: list[str] = []
    for path, found in fingerprints_of_installed().items():
        changed = {key: own for key, own in found.items() if own != FINGERPRINTS[path][key]}
        if changed:
            lines += [f'["{installed_version()}"."{path}"]']
            lines += [*(f'{key} = "{own}"' for key, own in changed.items()), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table_of_installed())
