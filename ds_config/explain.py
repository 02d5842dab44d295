"""Says of every key of a configuration what it means, costs and does in one release."""

from __future__ import annotations

import difflib
import functools
import itertools
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_config.expressions import Key, KeyFact
from ds_config.releases import history, keys_of, versions
from ds_config.rules import Setting, conflicts, cost_bytes, ignored, wrong_plain_values
from ds_config.values import wrong_values

AUTO = "auto"
_SAMPLING = ("data_efficiency", "data_sampling")
FREE = {
    *(("optimizer", "params"), ("scheduler", "params"), ("compile", "kwargs")),
    *((*_SAMPLING, "curriculum_learning"), (*_SAMPLING, "dynamic_batching")),
    ("data_efficiency", "data_routing"),
}
"""Blocks whose keys DeepSpeed hands on, or reads where this package does not follow."""
PLUGIN = "deep_optimizer_states"


@dataclass(frozen=True)
class Note:
    """Something to be said of a key."""

    key: str
    """With its blocks: ``zero_optimization.stage``; empty for the whole."""
    text: str
    remedy: str = ""
    mend: tuple[str, str] = ("", "")
    """How a copy can be mended: ``move`` to a block, ``rename`` to a name, ``drop``, ``number``."""


@dataclass(frozen=True)
class KeyLine:
    """A key of the configuration."""

    key: str
    value: Any
    """None for a block."""
    is_block: bool
    meaning: str
    default: Any
    auto: str = ""
    """What ``auto`` becomes."""
    cost_bytes: int | None = None
    """Memory of the device that it takes, where that follows from it alone."""


@dataclass
class Explanation:
    """What there is to say of a configuration."""

    version: str
    keys: list[KeyLine] = field(default_factory=list)
    unknown: list[Note] = field(default_factory=list)
    """Keys that this release does not have, and reads over."""
    faults: list[Note] = field(default_factory=list)
    """Why it would not take the configuration."""
    warnings: list[Note] = field(default_factory=list)
    """What it takes, and what is probably not meant."""

    @property
    def is_accepted(self) -> bool:
        """Whether the release takes it and every key does something."""
        return not self.unknown and not self.faults


@functools.cache
def words() -> dict[Key, str]:
    """Meaning of every key, of all releases."""
    return dict(_flat(_words_file()["keys"], ()))


@functools.cache
def _words_file() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))


def _flat(table: Mapping[str, Any], at: Key) -> Iterator[tuple[Key, str]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, (*at, name))
        else:
            yield at if name == "_" else (*at, name), value


def explain(table: Mapping[str, Any], setting: Setting) -> Explanation:
    """Explain a configuration.

    Args:
        table: As read.
        setting: The release, and what is known of model and ranks.

    Raises:
        LookupError: the release is not on file.
    """
    known = keys_of(setting.version)
    found = Explanation(setting.version)
    for key, value in walk(table, ()):
        _explain_key(found, key, value, known, setting, table)
    values = dict(walk(table, ()))
    wrong = [*wrong_plain_values(table), *wrong_values(values, known)]
    found.faults += [
        Note(*words, mend=("number", "") if "is text" in words[1] else ("", "")) for words in wrong
    ]
    for one in conflicts(table, setting):
        group = found.faults if one.is_fault else found.warnings
        group.append(Note(one.key, one.text, one.remedy))
    found.warnings += [Note(*words) for words in ignored(table, set(known))]
    given = set(values)
    for key in known:
        # Where the key is given its default does not matter, nor where its block is not there.
        is_left_out = key not in given and (not key[:-1] or key[:-1] in given)
        if is_left_out and (moved := _moved_default(key, setting.version)):
            found.warnings.append(Note(".".join(key), f"is not given, and {moved}"))
    return found


def walk(table: Mapping[str, Any], at: Key) -> Iterator[tuple[Key, Any]]:
    """Every key of a configuration with its value, block by block."""
    for name, value in table.items():
        key = (*at, str(name))
        yield key, value
        if isinstance(value, Mapping) and key not in FREE and key != (PLUGIN,):
            yield from walk(value, key)


def _explain_key(
    found: Explanation,
    key: Key,
    value: Any,  # noqa: ANN401 - any value
    known: Mapping[Key, KeyFact],
    setting: Setting,
    table: Mapping[str, Any],
) -> None:
    name = ".".join(key)
    if key == (PLUGIN,):
        found.keys.append(
            KeyLine(name, value, False, "Our plugin's settings (docs/plugin.md).", None)
        )
        return
    fact = known.get(key)
    if fact is None:
        if not _is_free(key, known):
            _explain_unknown(found, key, known, setting.version)
        return
    if fact.removed:
        found.faults.append(
            Note(
                name,
                f"is removed, and DeepSpeed {setting.version} refuses it ({_gone(key)})",
                "leave it out",
                ("drop", ""),
            )
        )
    elif fact.deprecated:
        remedy = f"write {newer_name(key, known)}" if fact.replaced_by else ""
        found.warnings.append(Note(name, "is an older name", remedy))
    is_block = isinstance(value, Mapping)
    found.keys.append(
        KeyLine(
            name,
            None if is_block and key not in FREE else value,
            is_block,
            words().get(key, "") or f"Removed: {_gone(key)}.",
            fact.default,
            setting.auto(key) if value == AUTO else "",
            cost_bytes(key, table, setting),
        )
    )


def newer_name(key: Key, known: Mapping[Key, KeyFact]) -> str:
    """Return the documented name of what took a key's place.

    A release may name the field of its model, where the key that people write is an alias of it.
    """
    name = known[key].replaced_by
    alias = f"stage3_{name}"
    return alias if (*key[:-1], alias) in known else name


def _is_free(key: Key, known: Mapping[Key, KeyFact]) -> bool:
    """Whether the keys of the block around it are not DeepSpeed's to know."""
    around = key[:-1]
    if not around:
        return False
    if any(key[: len(free)] == free for free in FREE) or key[0] in _words_file()["gone"]:
        return True
    # Of a block without keys on file nothing is known; a block that is unknown was named already.
    return around not in known or not any(k[:-1] == around for k in known)


def _explain_unknown(
    found: Explanation, key: Key, known: Mapping[Key, KeyFact], version: str
) -> None:
    """Say of an unknown key whether it is refused, read over, or a comment."""
    is_refused = _is_strict(key[:-1], known)
    if is_refused:
        found.faults.append(_unknown(key, known, version, "raises an error"))
    elif _is_comment(key):
        found.warnings.append(Note(".".join(key), "is a comment, which DeepSpeed reads over"))
    else:
        found.unknown.append(_unknown(key, known, version, "is read by nobody"))


def _is_comment(key: Key) -> bool:
    """Whether a key is named as people name their comments in JSON."""
    return key[-1].startswith(("_", "$", "/", "#")) or key[-1].lower() in ("comment", "comments")


def _unknown(key: Key, known: Mapping[Key, KeyFact], version: str, does: str) -> Note:
    name, around = key[-1], key[:-1]
    before = [since for since, fact in history(key) if fact is not None and not fact.removed]
    if before:
        gone = [since for since, fact in history(key) if fact is None]
        when = f"came with {before[0]}" + (f" and went with {gone[-1]}" if gone else "")
        text = f"no key of DeepSpeed {version}: it {when}; here it {does}"
        return Note(".".join(key), text, "leave it out", ("drop", ""))
    elsewhere = [k for k in known if k[-1] == name]
    if len({k[:-1] for k in elsewhere}) == 1:
        place = ".".join(elsewhere[0][:-1])
        text = f"stands in the wrong place, where it {does}"
        remedy = f"move it to {place or 'the top level'}"
        return Note(".".join(key), text, remedy, ("move", place))
    siblings = [] if _is_comment(key) else [k[-1] for k in known if k[:-1] == around]
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    text = f"no key of DeepSpeed {version}: it {does}"
    if not near:
        return Note(".".join(key), text, "leave it out", ("drop", ""))
    return Note(".".join(key), text, f"did you mean {near[0]}?", ("rename", near[0]))


def _is_strict(block: Key, known: Mapping[Key, KeyFact]) -> bool:
    return any(fact.is_model for key, fact in known.items() if key[:-1] == block)


def _gone(key: Key) -> str:
    gone: dict[str, str] = _words_file()["gone"]
    return gone.get(key[0]) or words().get(key, key[-1]).partition(":")[0]


def _moved_default(key: Key, version: str) -> str:
    """What to say of a key whose default was another one in an earlier release."""
    at = versions().index(version)
    facts = [(since, fact) for since, fact in history(key) if versions().index(since) <= at]
    values = [(since, fact.default) for since, fact in facts if fact and not fact.removed]
    steps = itertools.pairwise(values)
    moved = [(since, old, new) for (_, old), (since, new) in steps if old != new]
    if not moved or isinstance(moved[-1][2], dict | list) or moved[-1][2] is None:
        return ""
    since, old, new = moved[-1]
    return f"its default is {_text(new)} since {since} ({_text(old)} before)"


def _text(value: Any) -> str:  # noqa: ANN401
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
