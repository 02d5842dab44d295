"""Says of every key of a configuration what it means, costs and does in the installed release."""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ds_config.installed import LOADER, Key
from ds_config.release import Answer, KeyFact, Note
from ds_config.rules import AUTO, ZERO, buckets, faults, warnings, words_of_auto

_SAMPLING = ("data_efficiency", "data_sampling")
FREE = {
    *(("optimizer", "params"), ("scheduler", "params"), ("compile", "kwargs")),
    *((*_SAMPLING, "curriculum_learning"), (*_SAMPLING, "dynamic_batching")),
    ("data_efficiency", "data_routing"),
}
"""Blocks whose keys DeepSpeed hands on, or reads where its loader does not look."""
PLUGIN = "deep_optimizer_states"


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
    """The value that ``auto`` becomes."""
    cost_bytes: int | None = None
    """Memory of the device that it takes, where that follows from it alone."""


@dataclass
class Explanation:
    """Everything that is said of a configuration."""

    version: str
    keys: list[KeyLine] = field(default_factory=list)
    unknown: list[Note] = field(default_factory=list)
    """Keys that the release does not have, and reads over."""
    faults: list[Note] = field(default_factory=list)
    """Why it would not take the configuration."""
    warnings: list[Note] = field(default_factory=list)
    """Settings that it takes, and that are probably not meant."""

    @property
    def is_accepted(self) -> bool:
        """True where the release takes it and every key does something."""
        return not self.unknown and not self.faults


@functools.cache
def words() -> dict[Key, str]:
    """Return the meaning of every key."""
    return dict(_flat(words_file()["keys"], ()))


@functools.cache
def words_file() -> dict[str, Any]:
    """Return the tables of ``words.toml``."""
    return tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))


def _flat(table: Mapping[str, Any], at: Key) -> Iterator[tuple[Key, str]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, (*at, name))
        else:
            yield at if name == "_" else (*at, name), value


def explain(
    table: Mapping[str, Any],
    answer: Answer,
    num_ranks: int | None = None,
) -> Explanation:
    """Explain a configuration.

    Args:
        table: As read.
        answer: What the installed DeepSpeed says of its keys and of this configuration.
        num_ranks: Data-parallel ranks, to check batches, if they are known.
    """
    found = Explanation(answer.version)
    known = answer.keys
    for key, value in walk(table, ()):
        if key == (PLUGIN,):
            meaning = "Our plugin's settings (docs/plugin.md)."
            found.keys.append(KeyLine(PLUGIN, value, False, meaning, None))
        elif key in known:
            found.keys.append(_line(key, value, table, known[key]))
            _judge_known(found, key, value, known)
        elif not _is_free(key, known):
            _judge_unknown(found, key, known)
    found.faults += faults(table, num_ranks)
    found.warnings += warnings(table, known)
    named = {note.key for note in (*found.unknown, *found.faults)}
    found.faults += [
        note
        for note in answer.refusals
        if note.key not in named and not (found.faults and note.key == LOADER)
    ]
    return found


def walk(table: Mapping[str, Any], at: Key) -> Iterator[tuple[Key, Any]]:
    """Return every key of a configuration with its value, block by block."""
    for name, value in table.items():
        key = (*at, str(name))
        yield key, value
        if isinstance(value, Mapping) and key not in FREE and key != (PLUGIN,):
            yield from walk(value, key)


def _line(
    key: Key,
    value: Any,
    table: Mapping[str, Any],
    fact: KeyFact,
) -> KeyLine:
    is_block = isinstance(value, Mapping)
    shown = None if is_block and key not in FREE else value
    meaning = words().get(key, "") or f"Removed: {_gone(key)}."
    line = KeyLine(".".join(key), shown, is_block, meaning, fact.default)
    if value == AUTO:
        line = replace(line, auto=words_of_auto(key))
    bucket = buckets(table) if key == (ZERO, "reduce_bucket_size") else None
    return replace(line, cost_bytes=bucket.num_bytes) if bucket and bucket.count else line


def _judge_known(
    found: Explanation,
    key: Key,
    value: Any,
    known: Mapping[Key, KeyFact],
) -> None:
    name, fact = ".".join(key), known[key]
    if fact.removed:
        text = f"is removed, and DeepSpeed {found.version} refuses it ({_gone(key)})"
        found.faults.append(Note(name, text, "leave it out", ("drop", "")))
        return
    if fact.deprecated:
        newer = newer_name(key, known)
        mend = ("rename", newer) if (*key[:-1], newer) in known else ("", "")
        remedy = f"write {newer}" if newer else ""
        found.warnings.append(Note(name, "is an older name", remedy, mend))
    is_block = any(inner[: len(key)] == key and inner != key for inner in known)
    is_switch = key == (ZERO,) and isinstance(value, bool)
    if is_block and not isinstance(value, Mapping | None) and not is_switch and value != AUTO:
        found.faults.append(Note(name, f"= {value!r} is no block", "give an object: {...}"))
    # No model checks such a switch, and the loader takes the text "false" for true.
    is_unchecked = not fact.is_model and isinstance(fact.default, bool) and value != AUTO
    if is_unchecked and not isinstance(value, bool | int):
        found.faults.append(Note(name, f"= {value!r}", "give true or false"))


def newer_name(key: Key, known: Mapping[Key, KeyFact]) -> str:
    """Return the documented name of what took a key's place.

    A release may name the field of its model, where the key that people write is an alias of it.
    """
    name = known[key].replaced_by
    alias = f"stage3_{name}"
    return alias if (*key[:-1], alias) in known else name


def _is_free(key: Key, known: Mapping[Key, KeyFact]) -> bool:
    """Return whether a key that the release does not look up may still do something."""
    around = key[:-1]
    if any(key[: len(free)] == free for free in FREE) or key[0] in words_file()["gone"]:
        return True
    # Of a block without known keys nothing is known; a block that is unknown was named already.
    return bool(around) and (around not in known or not any(k[:-1] == around for k in known))


def _judge_unknown(found: Explanation, key: Key, known: Mapping[Key, KeyFact]) -> None:
    place, name, around = ".".join(key), key[-1], key[:-1]
    is_comment = name.startswith(("_", "$", "/", "#")) or name in ("comment", "comments")
    is_of_model = any(fact.is_model for inner, fact in known.items() if inner[:-1] == around)
    if is_comment and not is_of_model:
        found.warnings.append(Note(place, "is a comment, which DeepSpeed reads over"))
        return
    does = "raises an error" if is_of_model else "is read by nobody"
    text = f"no key of DeepSpeed {found.version}: it {does}"
    note = Note(place, text, "leave it out", ("drop", ""))
    elsewhere = {k[:-1] for k in known if k[-1] == name}
    siblings = [] if is_comment else [k[-1] for k in known if k[:-1] == around]
    if key in words():
        text = f"a key of other releases than DeepSpeed {found.version}: here it {does}"
        note = replace(note, text=text)
    elif len(elsewhere) == 1:
        target = ".".join(elsewhere.pop())
        text, remedy = f"stands in the wrong place, where it {does}", target or "the top level"
        note = Note(place, text, f"move it to {remedy}", ("move", target))
    elif near := difflib.get_close_matches(name, siblings, n=1, cutoff=0.6):
        note = Note(place, text, f"did you mean {near[0]}?", ("rename", near[0]))
    (found.faults if is_of_model else found.unknown).append(note)


def _gone(key: Key) -> str:
    gone: dict[str, str] = words_file()["gone"]
    return gone.get(key[0]) or words().get(key, key[-1]).partition(":")[0]


def text_of(value: Any) -> str:
    """Return a default as a sentence or a table has it: 5e+08 where that is the whole number."""
    if isinstance(value, bool):
        return str(value).lower()
    is_round = isinstance(value, int | float) and float(f"{value:g}") == value
    return "none" if value is None else f"{value:g}" if is_round else str(value)


def fixed(table: Mapping[str, Any], found: Explanation) -> tuple[dict[str, Any], list[str]]:
    """Return a corrected copy, and what was changed.

    An unknown key that has no better place is left out. Values of the user's own are changed only
    where DeepSpeed refuses their type.
    """
    result = copy.deepcopy(dict(table))
    changes = []
    for note in (*found.unknown, *found.faults, *found.warnings):
        *blocks, name = note.key.split(".")
        block: Any = result
        for around in blocks:
            block = block.get(around) if isinstance(block, dict) else None
        if note.mend[0] and isinstance(block, dict) and name in block:
            changes.append(f"{note.key}: {_mended(result, block, name, note)}")
    return result, changes


def _mended(result: dict[str, Any], block: dict[str, Any], name: str, note: Note) -> str:
    """Mend one key, and return what was done."""
    kind, target = note.mend
    value = block.pop(name)
    if kind == "number":
        with contextlib.suppress(ValueError):
            number = float(value)
            block[name] = int(number) if number.is_integer() else number
            return f"{value!r} as a number"
    if kind == "rename" and target not in block:
        if target.startswith("offload_") and isinstance(value, bool):
            value = {"device": "cpu" if value else "none"}
        block[target] = value
        return f"now {target}"
    place: Any = result
    for around in filter(None, target.split(".")):
        place = place.setdefault(around, {}) if isinstance(place, dict) else None
    if kind == "move" and isinstance(place, dict) and name not in place:
        place[name] = value
        return f"moved to {target or 'the top level'}"
    return "left out"


def as_json(source: str, found: Explanation) -> str:
    """Return the fields of an explanation, the release that was asked among them."""
    return json.dumps({"source": source, **asdict(found)}, indent=2, default=str)


def as_text(source: str, found: Explanation) -> str:
    """Return what is wrong first, then key by key."""
    verdict = "keys of this configuration do nothing."
    if found.is_accepted or found.faults:
        verdict = f"it would {'refuse' if found.faults else 'take'} this configuration."
    lines = [f"{source}, read as DeepSpeed {found.version}: {verdict}", ""]
    groups = {"Unknown keys": found.unknown, "Faults": found.faults, "Warnings": found.warnings}
    for title, notes in groups.items():
        if notes:
            texts = (f"  {n.key}: {n.text}" + (f"; {n.remedy}" if n.remedy else "") for n in notes)
            lines += [title, *texts, ""]
    for line in found.keys:
        depth = "  " * line.key.count(".")
        name = line.key.rpartition(".")[2]
        lines.append(f"{depth}{name}" + ("" if line.is_block else f" = {_value_text(line.value)}"))
        about = [line.meaning, f"auto: {line.auto}." if line.auto else ""]
        if line.cost_bytes:
            about.append(f"A buffer of it takes {_bytes_text(line.cost_bytes)} of the device.")
        if line.default is not None and not line.is_block:
            about.append(f"Default: {_value_text(line.default)}.")
        lines.append(f"{depth}    {' '.join(filter(None, about))}")
    return "\n".join(lines)


def _value_text(value: Any) -> str:
    """Return a value as one writes it: sizes of 1e9 elements are whole numbers."""
    whole = isinstance(value, float) and value.is_integer() and abs(value) >= 1e3
    return f"{value:.15g}" if whole else json.dumps(value, default=str)


def _bytes_text(num_bytes: int) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} bytes"
