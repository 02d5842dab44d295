"""A configuration as a file: read as guides print it, and written where none is yet."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from ds_config.lenient import Place, Reader, UnreadableError, short
from ds_config.release import Note

FILE = "(file)"
"""Key of a note that is about the file as a whole."""


@dataclass
class Document:
    """A configuration as it was written."""

    source: str
    """Its path."""
    table: dict[str, Any]
    """What stands for a value is a :class:`~ds_config.lenient.Placeholder`."""
    faults: list[Note] = field(default_factory=list)
    """Choices that are left to the user, and what no loader reads."""
    warnings: list[Note] = field(default_factory=list)
    """Where it is no strict JSON, and what was taken."""
    changes: list[str] = field(default_factory=list)
    """What is another in strict JSON, in the words of ``--fix``."""
    choices: list[str] = field(default_factory=list)
    """The choices among the faults, in the words of ``--fix``."""


def read_config(path: Path) -> Document:
    """Read a configuration, and note each place where it is no JSON or leaves a choice.

    Raises:
        ConfigError: it cannot be read, or is no object of JSON.
    """
    source = str(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: is no text in UTF-8 ({error})") from None
    reader = Reader(text)
    try:
        table = reader.read()
    except UnreadableError as error:
        raise ConfigError(f"{source}: is no JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{source}: is no JSON: too many blocks in each other") from None
    if not isinstance(table, dict):
        reason = f"holds {short(json.dumps(table))} and no object: give DeepSpeed's configuration"
        raise ConfigError(f"{source}: {reason}")
    document = Document(source, table)
    _note_syntax(document, text, reader)
    for place in reader.places:
        if place.is_choice or place.is_twice:
            note = Note(place.key or FILE, f"line {place.line}: {place.text}", place.remedy)
            document.faults.append(note)
            words = f"{note.key}: {note.text}"
            if place.is_choice:
                document.choices.append(f"{words}; {note.remedy}")
            else:
                document.changes.append(words)
    return document


def _note_syntax(document: Document, text: str, reader: Reader) -> None:
    """Note where a text is no strict JSON, and what was taken."""
    try:
        json.loads(text)
        return
    except ValueError as error:  # a number of thousands of digits, which json refuses, too
        strict = str(error).partition(";")[0]
    if not document.table:
        raise ConfigError(f"{document.source}: is no JSON: {strict}")
    is_read = _deepspeed_reads(text, document.table)
    does = "DeepSpeed reads it" if is_read else "DeepSpeed does not read it so"
    others = f"{does}, and Hugging Face's and other loaders do not read it"
    note = Note(FILE, f"is no strict JSON ({strict}): {others}", "--fix writes it as JSON")
    (document.warnings if is_read else document.faults).append(note)
    taken = [*_by_text(reader.places)]
    if reader.comments:
        taken.append(Note(_lines(reader.comments), "a comment is read over"))
    document.warnings += taken
    document.changes += [*(f"{one.key}: {one.text}" for one in taken), "written as strict JSON"]


def _deepspeed_reads(text: str, table: dict[str, Any]) -> bool:
    """Return whether the reader that DeepSpeed takes finds the same in a text."""
    try:
        import hjson  # comes with DeepSpeed

        return bool(hjson.loads(text) == table)
    except (ImportError, ValueError, RecursionError):
        return False


def _by_text(places: Iterable[Place]) -> Iterator[Note]:
    """Return a note for each kind of place that leaves no choice, with all its lines."""
    lines: dict[str, list[int]] = {}
    for place in places:
        if not place.is_choice and not place.is_twice:
            lines.setdefault(place.text, []).append(place.line)
    return (Note(_lines(found), text) for text, found in lines.items())


def _lines(lines: Iterable[int]) -> str:
    each = sorted(set(lines))
    return f"line{'s' if len(each) > 1 else ''} {', '.join(map(str, each))}"


def write_new(path: Path, text: str, option: str) -> None:
    """Write a file where none is yet.

    Raises:
        ConfigError: there is one, or it cannot be written.
    """
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{option} {path}: is already there; give another name") from None
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written: {error.strerror}") from None
