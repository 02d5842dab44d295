"""Refuse a DeepSpeed whose internals differ from those this package was checked against.

A version number says little: a patch release may rewrite a method we override. So the source of
every such method is hashed. A ZeRO stage is refused when code that it relies on differs, and the
methods are named; a stage whose code is known is taken. Hashes are data: those of the newest
release in ``deepspeed_methods.toml``, by the stages that rely on a class, and what older releases
have otherwise in ``deepspeed_releases.toml``.
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


_ADAPTERS = {"stages 1 and 2": (1, 2), "stage 3": (3,)}
"""One adapter serves these stages, which are taken or refused together."""

NEWEST = "0.19.8"
"""The newest DeepSpeed release that this package was checked against."""

_WATCHED: dict[str, dict[str, dict[str, str]]] = _table("deepspeed_methods.toml")

STAGES: dict[str, tuple[int, ...]] = {
    path: _ADAPTERS.get(part, (1, 2, 3)) for part, classes in _WATCHED.items() for path in classes
}
"""Class -> the ZeRO stages at which this package relies on it."""

FINGERPRINTS: dict[str, dict[str, str]] = {
    path: methods for classes in _WATCHED.values() for path, methods in classes.items()
}
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
    "known": "differs from what was released as {}",
    "older": "was never checked; {} is the nearest release that was",
    "newer": "is newer than {}, the newest release that was checked",
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
        """Return whether a release loses gradients."""
        from packaging.version import Version

        release = Version(Version(version).public)
        return Version(self.first) <= release <= Version(self.last)


LOST_GRADIENTS = LostGradients(
    "0.15.2",
    "0.18.9",
    "with the optimizer on the CPU, its stages 1 and 2 drop gradients of all micro-batches of a "
    "window but one (DeepSpeed's pull requests 7967 and 7981)",
)
"""Stages 1 and 2 are refused for it; stage 3 is not concerned."""


def check_deepspeed(allow_unverified: bool = False) -> dict[int, str]:
    """See at which ZeRO stages the installed DeepSpeed is one of which equal bits can be promised.

    A release that was checked must be as it was released, and a newer one must have the methods of
    the newest that was checked. An older one is refused.

    Args:
        allow_unverified: Warn instead of refusing.

    Returns:
        Why a stage is refused, and what to do, by stage; a stage that is not in it is taken.

    Raises:
        UnsupportedDeepSpeedError: DeepSpeed is missing, or equal bits can be promised at no stage;
            names the methods that differ, by stage.
        ConfigError: ``DEEP_OPTIMIZER_STATES_ALLOW_UNVERIFIED`` is neither 0 nor 1.
    """
    allow_unverified = _is_allowed_by_environment() or allow_unverified
    installed = installed_version()
    checked, how = _nearest(installed)
    changed = changed_methods(checked)
    if not changed and how != "older":
        if how == "newer":
            _say(f"DeepSpeed {installed} has the methods of {checked}, the newest that was checked")
        return {}
    says = f"DeepSpeed {installed} {_SAYS[how].format(checked)}"
    differing = {
        part: [name for name, path in changed.items() if set(stages) <= set(STAGES[path])]
        for part, stages in _ADAPTERS.items()
    }
    refused = {part: names for part, names in differing.items() if names or how == "older"}
    verb = "used all the same, BITS MAY NOT BE STOCK'S" if allow_unverified else "refused"
    lines = [says + (", and allow_unverified is set:" if allow_unverified else ":")]
    for part, names in differing.items():
        what = f"{'is' if part == 'stage 3' else 'are'} {verb if part in refused else 'taken'}"
        code = f"other code in {', '.join(names)}" if names else f"nothing differs from {checked}"
        lines.append(f"  ZeRO {part} {what}: {code}")
    if not allow_unverified and len(refused) == len(_ADAPTERS):
        raise UnsupportedDeepSpeedError("\n".join([*lines, _WAY_OUT]))
    _say("\n".join(lines))
    if allow_unverified:
        return {}
    left = [
        str(stage) for part, stages in _ADAPTERS.items() if part not in refused for stage in stages
    ]
    return {
        stage: f"DeepSpeed {installed} at zero_optimization.stage = {stage}: it "
        f"{_SAYS[how].format(checked)}, with other code in {', '.join(names)}; set the stage to "
        f"{' or '.join(left)}, {_WAY_OUT}"
        for part, names in refused.items()
        for stage in _ADAPTERS[part]
    }


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


def _say(text: str) -> None:
    from deepspeed.utils import logger

    if os.environ.get("LOCAL_RANK", "0") == "0":
        logger.warning(f"deep_optimizer_states: {text}")


def changed_methods(version: str) -> dict[str, str]:
    """Return methods of the installed DeepSpeed that are not those of a checked release.

    They are given as ``class.method`` -> the class's path.
    """
    return {
        f"{path.partition(':')[2]}.{method}": path
        for path, methods in fingerprints_of(version).items()
        for method, expected in methods.items()
        if fingerprint(path, method) != expected
    }


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
