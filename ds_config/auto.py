"""Who puts a value in the place of ``auto``, and what becomes of one that nobody fills in."""

from __future__ import annotations

import functools
import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ds_config.installed import Key
from ds_config.release import Answer, Mend, Note

NONE = "none"
"""No framework: the configuration goes straight to ``deepspeed.initialize``."""
FRAMEWORKS = ("transformers", "accelerate", NONE)
PLUGIN = "deep_optimizer_states"
_OWN = "is a word of its own here"
_ALONE = "deepspeed.initialize alone"
_HANDS_ON = (("optimizer", "params"), ("scheduler", "params"))


@dataclass(frozen=True)
class AutoCase:
    """What becomes of each ``auto`` under one framework that hands the configuration over."""

    framework: str
    title: str
    fills: dict[str, str] = field(default_factory=dict)
    """What is put in its place, by key."""
    defaults: dict[str, str] = field(default_factory=dict)
    """What DeepSpeed takes, having dropped the word."""
    fails: dict[str, str] = field(default_factory=dict)
    """How it ends with an error, or is taken for something else."""


@functools.cache
def tables() -> dict[str, dict[str, str]]:
    """Return what each framework fills in, by key; the Trainer builds on accelerate."""
    fills = {name: _file()[name]["fills"] for name in FRAMEWORKS if name != NONE}
    return {**fills, "transformers": {**fills["accelerate"], **fills["transformers"]}}


@functools.cache
def _file() -> dict[str, dict[str, dict[str, str]]]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def title(framework: str) -> str:
    """Return a framework's name in a sentence."""
    return _ALONE if framework == NONE else str(_file()[framework]["title"])


def cases_of(keys: Iterable[Key], answer: Answer, framework: str = "") -> list[AutoCase]:
    """Return what becomes of every ``auto``.

    Args:
        keys: Keys whose value is ``auto``.
        answer: What the installed DeepSpeed says.
        framework: The one that hands the configuration over; without it every case is told.
    """
    names = [framework] if framework else FRAMEWORKS
    cases = [AutoCase(name, title(name)) for name in names]
    for key in keys:
        name = ".".join(key)
        for case in cases:
            if case.framework == NONE:
                what, is_taken = _alone(key, answer)
                (case.defaults if is_taken else case.fails)[name] = what
            elif name in tables()[case.framework]:
                case.fills[name] = tables()[case.framework][name]
            else:
                case.fails[name] = "is not filled in and ends with an error"
    return cases


def _alone(key: Key, answer: Answer) -> tuple[str, bool]:
    """Return what DeepSpeed does with an ``auto`` that is handed to it, and whether it runs."""
    fact = answer.keys.get(key)
    if key[0] == PLUGIN:
        return _OWN, True
    if fact is None and key[:2] in _HANDS_ON:
        text = (
            "is handed to the {} as a text, which ends with an error, at once or at the first step"
        )
        return text.format(key[0]), False
    if fact is None:
        return "stays the text 'auto', which may be read by nobody", True
    outcome, words = answer.auto.get(key, ("default" if fact.is_model else "text", ""))
    if fact.default == "auto":
        return _OWN, True
    if outcome == "default":
        value = "nothing" if fact.default is None else json.dumps(fact.default)
        return f"is dropped for the default, {value}", True
    if outcome == "refused":
        return f"ends with an error ({words})", False
    if fact.kind == "boolean":
        return "counts as true", False
    if fact.kind == "number":
        return "stays a text and ends with an error where the number is needed", False
    return "stays the text 'auto'", False


def words_of(name: str, cases: Iterable[AutoCase]) -> str:
    """Return in a sentence what becomes of one ``auto``."""
    told: dict[str, list[str]] = {}
    for case in cases:
        told.setdefault(does(case, name), []).append(case.title)
    return "; ".join(f"{what} ({', '.join(who)})" for what, who in told.items())


def judge(
    keys: Iterable[Key], cases: list[AutoCase], answer: Answer
) -> tuple[list[Note], list[Note]]:
    """Return faults and warnings of every ``auto``.

    A fault is what ends with an error under the framework that takes most of the configuration.
    """
    best = min(cases, key=lambda case: len(case.fails))
    faults, warnings = [], []
    for key in keys:
        name = ".".join(key)
        text, remedy = f"= auto {words_of(name, cases)}", "write the value"
        is_taken = key in answer.keys and _alone(key, answer)[1]
        if name in best.fails:
            remedy = "leave it out, or write the value" if is_taken else remedy
            faults.append(Note(name, text, remedy, Mend("drop", key) if is_taken else None))
        elif not any(name in case.fills or does(case, name) == _OWN for case in cases):
            warnings.append(Note(name, text, remedy))
    return faults, warnings


def does(case: AutoCase, name: str) -> str:
    """Return what becomes of one ``auto`` in a case."""
    return case.fills.get(name) or case.defaults.get(name) or case.fails[name]
