"""Says of every key of a configuration what it means, costs and does in the installed release."""

from __future__ import annotations

import difflib
import functools
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ds_config.auto import PLUGIN, AutoCase, cases_of, judge, words_of
from ds_config.costs import Costs
from ds_config.installed import LOADER, Key, autos
from ds_config.lenient import Placeholder
from ds_config.release import Answer, KeyFact, Mend, Note, without
from ds_config.rules import AUTO, ZERO, as_block, buckets, faults, is_open, of_type, warnings

_ALIKE, _MISSPELLED = 0.6, 0.85
"""How much of two names is the same: enough to ask for, and enough to write the other one."""
_HEAD_LINES = 2
"""Of a configuration that nothing else is said of."""
_SAMPLING = ("data_efficiency", "data_sampling")
FREE = {
    *(("optimizer", "params"), ("scheduler", "params"), ("compile", "kwargs")),
    *((*_SAMPLING, "curriculum_learning"), (*_SAMPLING, "dynamic_batching")),
    ("data_efficiency", "data_routing"),
}
"""Blocks whose keys DeepSpeed hands on, or reads where its loader does not look."""


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
    """What becomes of ``auto``, and by whom."""
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
    auto: list[AutoCase] = field(default_factory=list)
    """What becomes of each ``auto``, by who hands the configuration to DeepSpeed."""
    costs: Costs | None = None
    """Memory and time of a model under it; None where none was named."""

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
    framework: str = "",
) -> Explanation:
    """Explain a configuration.

    Args:
        table: As read.
        answer: What the installed DeepSpeed says of its keys and of this configuration.
        num_ranks: Data-parallel ranks, to check batches, if they are known.
        framework: Who hands it to DeepSpeed and fills ``auto`` in, one of
            :data:`~ds_config.auto.FRAMEWORKS`; without it every case is told.
    """
    found = Explanation(answer.version)
    known = {**answer.keys, (PLUGIN,): KeyFact()}
    filled = [key for key in autos(table) if key in known or _is_free(key, known)]
    found.auto = cases_of(filled, answer, framework) if filled else []
    for key, value in walk(table, ()):
        if key == (PLUGIN,):
            meaning = words_file()["plugin"]
            found.keys.append(KeyLine(PLUGIN, value, False, meaning, None))
        elif key in known:
            found.keys.append(_line(key, value, table, known[key]))
            _judge_known(found, key, value, answer)
        elif not _is_free(key, known):
            _judge_unknown(found, key, known, table)
        found.keys += _handed_on(key, value)
    found.keys = [_with_auto(line, found.auto) for line in found.keys]
    dropped = found.auto[-1].defaults if framework and found.auto else {}
    settled = without(table, lambda name, value: value == AUTO and name in dropped)
    found.faults += faults(settled, num_ranks)
    found.warnings += warnings(settled, known)
    if found.auto:
        of_auto = judge(filled, found.auto, answer)
        found.faults += of_auto[0]
        found.warnings += of_auto[1]
    named = {note.key for note in (*found.unknown, *found.faults)}
    found.faults += [
        note
        for note in answer.refusals
        if note.key not in named and not (found.faults and note.key == LOADER)
    ]
    return found


def _handed_on(key: Key, value: Any) -> list[KeyLine]:
    """Return a line for each ``auto`` in a block whose keys DeepSpeed hands on."""
    if key not in FREE or not isinstance(value, Mapping):
        return []
    meaning = f"Handed on with the other keys of {'.'.join(key)}."
    return [KeyLine(".".join(inner), AUTO, False, meaning, None) for inner in autos(value, key)]


def _with_auto(line: KeyLine, cases: list[AutoCase]) -> KeyLine:
    is_auto = line.value == AUTO and not isinstance(line.value, Placeholder)
    return replace(line, auto=words_of(line.key, cases)) if is_auto and cases else line


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
    bucket = buckets(table) if key == (ZERO, "reduce_bucket_size") else None
    return replace(line, cost_bytes=bucket.num_bytes) if bucket and bucket.count else line


def _judge_known(found: Explanation, key: Key, value: Any, answer: Answer) -> None:
    name, known = ".".join(key), answer.keys
    fact = known[key]
    if fact.removed:
        text = f"is removed, and DeepSpeed {found.version} refuses it ({_gone(key)})"
        found.faults.append(Note(name, text, "leave it out", Mend("drop", key)))
        return
    if fact.deprecated:
        newer = newer_name(key, known)
        place = (*key[:-1], newer)
        mend = Mend("move", key, place) if place in known else None
        found.warnings.append(
            Note(name, "is an older name", f"write {newer}" if newer else "", mend)
        )
    is_block = any(inner[: len(key)] == key and inner != key for inner in known)
    is_switch = key == (ZERO,) and isinstance(value, bool)
    is_none = value is None and len(key) == 1 and any(n.key == LOADER for n in answer.refusals)
    if is_block and is_none:
        mend = Mend("drop", key)
        found.faults.append(Note(name, "= null is no block", "leave it out", mend))
    elif (
        is_block and not isinstance(value, Mapping | None) and not is_switch and not is_open(value)
    ):
        found.faults.append(_no_block(key, value, known))
    elif note := of_type(key, value, fact):
        refused = {one.key: one.remedy for one in answer.refusals}
        if not note.mend and refused.get(name):
            note = replace(note, remedy=refused[name])
        is_refused = not fact.is_model or name in refused
        (found.faults if is_refused else found.warnings).append(note)


def _no_block(key: Key, value: Any, known: Mapping[Key, KeyFact]) -> Note:
    name, text = ".".join(key), f"= {json.dumps(value, default=str)} is no block"
    meant = as_block(key, value, known)
    if meant is None:
        return Note(name, text, "give an object: {...}")
    mend = Mend("replace", key, value=meant)
    return Note(name, text, f"give an object: {json.dumps(meant)}", mend)


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


def _judge_unknown(
    found: Explanation, key: Key, known: Mapping[Key, KeyFact], table: Mapping[str, Any]
) -> None:
    place, name, around = ".".join(key), key[-1], key[:-1]
    is_of_model = any(fact.is_model for inner, fact in known.items() if inner[:-1] == around)
    if not is_of_model and _is_comment(name):
        found.warnings.append(Note(place, "is a comment, which DeepSpeed reads over"))
        return
    does = "raises an error" if is_of_model else "is read by nobody"
    elsewhere = {k[:-1] for k in known if k[-1] == name}
    if newer := words_file()["renamed"].get(place):
        text = f"a name of earlier releases, which here {does}"
        note = Note(place, text, f"write {newer}", Mend("move", key, (*around, newer)))
    elif key in words():
        text = f"a key of other releases than DeepSpeed {found.version}: here it {does}"
        note = Note(place, text, "leave it out", Mend("drop", key))
    elif len(elsewhere) == 1 and (name,) != around:
        note = _misplaced(key, elsewhere.pop(), does, table)
    else:
        note = _misspelled(key, f"no key of DeepSpeed {found.version}: it {does}", known)
    (found.faults if is_of_model else found.unknown).append(note)


def _is_comment(name: str) -> bool:
    return name.startswith(("_", "$", "/", "#")) or name in ("comment", "comments")


def _misplaced(key: Key, block: Key, does: str, table: Mapping[str, Any]) -> Note:
    place, name = ".".join(key), key[-1]
    # `seed` does not say what it is of, and a block of its own would begin to do something.
    if block and block[0] not in table and "_" not in name:
        text, block_name = f"{does} here", ".".join(block)
        remedy = f"leave it out; {block_name} has one of this name, for other things"
        return Note(place, text, remedy, Mend("drop", key))
    text = f"stands in the wrong place, where it {does}"
    mend = Mend("move", key, (*block, name))
    return Note(place, text, f"move it to {'.'.join(block) or 'the top level'}", mend)


def _misspelled(key: Key, text: str, known: Mapping[Key, KeyFact]) -> Note:
    place, name, around = ".".join(key), key[-1], key[:-1]
    siblings = [] if _is_comment(name) else [k[-1] for k in known if k[:-1] == around]
    near = _nearest(name, siblings, _ALIKE)
    if typo := _nearest(name, siblings, _MISSPELLED):
        return Note(place, text, f"did you mean {near}?", Mend("move", key, (*around, typo)))
    remedy = f"did you mean {near}? Else leave it out" if near else "leave it out"
    return Note(place, text, remedy, Mend("drop", key))


def _nearest(name: str, known: list[str], cutoff: float) -> str:
    """Return the name that is most alike, whatever its case; empty where none is."""
    by_form = {one.lower(): one for one in known}
    form = name.lower().replace("-", "_")
    near = difflib.get_close_matches(form, by_form, n=1, cutoff=cutoff)
    return by_form[near[0]] if near else ""


def _gone(key: Key) -> str:
    gone: dict[str, str] = words_file()["gone"]
    return gone.get(key[0]) or words().get(key, key[-1]).partition(":")[0]


def as_json(source: str, found: Explanation) -> str:
    """Return the fields of an explanation, the release that was asked among them."""
    costs = found.costs and found.costs.as_json()
    fields = asdict(replace(found, costs=None))
    return json.dumps({"source": source, **fields, "costs": costs}, indent=2, default=str)


def as_text(source: str, found: Explanation) -> str:
    """Return what is wrong first, then what it costs, then key by key."""
    lines = [f"{source}, read as DeepSpeed {found.version}: {_verdict(found)}", ""]
    groups = {"Faults": found.faults, "Unknown keys": found.unknown, "Warnings": found.warnings}
    for title, notes in groups.items():
        if notes:
            lines += [title, *(f"  {note.sentence}" for note in notes), ""]
    if found.auto:
        lines += ["What becomes of auto, by who hands the configuration to DeepSpeed"]
        lines += [line for case in found.auto for line in _case_lines(case)] + [""]
    if found.costs:
        lines += [*found.costs.lines(), ""]
    lines += ["Key by key"] if len(lines) > _HEAD_LINES else []
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


def _verdict(found: Explanation) -> str:
    if found.faults:
        is_ours = all(note.key == PLUGIN for note in found.faults)
        return f"{'the plugin' if is_ours else 'it'} would refuse this configuration."
    if found.unknown:
        return "keys of this configuration do nothing."
    takes = [case.title for case in found.auto if not case.fails]
    if len(takes) == len(found.auto):
        return "it would take this configuration."
    return f"it would take this configuration from {' or '.join(takes)} alone; see auto below."


def _case_lines(case: AutoCase) -> Iterator[str]:
    yield f"  {case.title}"
    names: dict[str, list[str]] = {}
    for name, what in (*case.fails.items(), *case.defaults.items()):
        names.setdefault(what, []).append(name)
    for what, keys in names.items():
        yield f"    {what}: {', '.join(keys)}"
    if case.fills:
        yield f"    is filled in: {'all others' if names else 'all'}"


def _value_text(value: Any) -> str:
    """Return a value as one writes it: sizes of 1e9 elements are whole numbers."""
    whole = isinstance(value, float) and value.is_integer() and abs(value) >= 1e3
    return f"{value:.15g}" if whole else json.dumps(value, default=str)


def _bytes_text(num_bytes: int) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} bytes"
