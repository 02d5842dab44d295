"""The data of a run: named or given as a prefix, found, counted, and held against the model."""

from __future__ import annotations

import functools
import json
import struct
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import ConfigError
from configs.schema import Model, Point
from launch.records.files import ROOT
from launch.records.identity import data_facts

DATASET = [sys.executable, "-m", "dataset"]
"""``find NAME`` prints the prefix of prepared data; ``prepare`` also makes the embedded corpus."""
EMBEDDED, OSCAR = "embedded", "oscar-1gb"
SOURCES = {
    EMBEDDED: "documentation that Python ships",
    OSCAR: "the paper's corpus",
}
PAPER_VOCAB_SIZE = Model.model_fields["vocab_size"].default
"""GPT-2's vocabulary: models that have it are full-size, and oscar-1gb is made of its tokens."""
UNPREPARED = (
    "data: the embedded corpus, about 2.5 MB; full-size results on it are not the paper's: "
    "`make dataset-oscar` prepares oscar-1gb"
)
_HEADER = struct.Struct("<9sQB")  # magic, version, code of the type of a token
_MAGIC = b"MMIDIDX\x00\x00"
_TOKEN_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_TOKENS_AT_ONCE = 1 << 24


class LaunchError(RuntimeError):
    """A step of the harness failed; the message says which and what to look at."""


@dataclass(frozen=True)
class Data:
    """A pair of Megatron's files, and what is known of them."""

    prefix: str
    """Absolute, without ``.bin`` and ``.idx``."""
    name: str
    """``embedded``, ``oscar-1gb``, or the name of the user's own pair."""
    source: str
    """Where the text comes from, in words."""
    tokens: int | None
    """None when the index is not Megatron's; the trainer refuses such data."""
    sha256: str
    """Of ``.bin``."""
    vocab_size: int | None
    """Of the manifest; without one, the largest token and one more."""

    @property
    def words(self) -> str:
        """Name, size and checksum in a line."""
        count = "of no known size" if self.tokens is None else f"{self.tokens:,} tokens"
        return f"{self.name} ({self.source}), {count}, SHA-256 {self.sha256}"

    def record(self) -> dict[str, Any]:
        """What ``run.json`` says of it."""
        about = {key: getattr(self, key) for key in ("name", "source", "tokens", "vocab_size")}
        return {**data_facts(self.prefix), **about}


def with_data(points: Sequence[Point], given: Namespace) -> tuple[list[Point], str]:
    """Points with the data that the command line chooses, and a line that tells which it is.

    Without a choice, full-size models take oscar-1gb where it has been prepared; the line is empty
    when there was nothing to choose.

    Args:
        points: The points; data that they name themselves gives way to ``--data`` alone.
        given: Options of :func:`launch.cli.add_run_options`.

    Raises:
        ConfigError: The data is not there, its vocabulary is not known, or a model has a smaller
            one.
    """
    if given.data is None:
        if given.vocab_size is not None:
            raise ConfigError(f"--vocab-size {given.vocab_size}: goes with --data PREFIX")
        return _by_default(points)
    if given.data_prefix is not None:
        raise ConfigError(f"--data {given.data}: leave out --data-prefix or --data, give one")
    prefix = "" if given.data == EMBEDDED else _located(given.data)
    chosen = [point.model_copy(update={"data_prefix": prefix}) for point in points]
    if not prefix:
        if given.vocab_size is not None:
            raise ConfigError(f"--vocab-size {given.vocab_size}: the embedded corpus has its own")
        return chosen, f"data: {embedded_words()}"
    data = look_at(prefix)
    size = _vocab_size(data, given)
    for point in chosen:
        require_vocabulary(point, data, size)
    return chosen, f"data: {data.words}"


def _by_default(points: Sequence[Point]) -> tuple[list[Point], str]:
    is_open = [not p.data_prefix and p.model.vocab_size >= PAPER_VOCAB_SIZE for p in points]
    if not any(is_open):
        return list(points), ""
    prefix = prepared(OSCAR)
    if prefix is None:
        return list(points), UNPREPARED
    taken = [p.model_copy(update={"data_prefix": prefix}) for p in points]
    chosen = [new if o else old for new, old, o in zip(taken, points, is_open, strict=True)]
    return chosen, f"data: {look_at(prefix).words}"


def _located(name: str) -> str:
    if name == OSCAR:
        prefix = prepared(OSCAR)
        if prefix is None:
            raise ConfigError(
                f"--data {OSCAR}: not prepared yet; `make dataset-oscar` fetches and prepares it"
            )
        return prefix
    name = name.removesuffix(".bin").removesuffix(".idx")
    prefix = _existing(name, f"--data {name!r}: neither {EMBEDDED} nor {OSCAR}, and ")
    if _token_type(prefix) is None:
        raise ConfigError(f"--data {name!r}: {prefix}.idx is not an index of Megatron's")
    return prefix


def _vocab_size(data: Data, given: Namespace) -> int:
    """Entries of the vocabulary: the manifest's, else those that the user gave."""
    told, known = given.vocab_size, _manifest(data.prefix).get("vocab_size")
    size = known or told
    if size is None:
        raise ConfigError(
            f"--data {given.data}: no manifest beside it tells the size of its vocabulary; "
            "give --vocab-size N"
        )
    if told not in (None, size):
        raise ConfigError(f"--vocab-size {told}: the manifest of {data.prefix} says {known}")
    if data.vocab_size is not None and data.vocab_size > size:
        raise ConfigError(
            f"--vocab-size {size}: {data.prefix}.bin holds token {data.vocab_size - 1}; "
            f"give {data.vocab_size} or more"
        )
    return int(size)


def require_vocabulary(point: Point, data: Data, size: int | None = None) -> None:
    """Refuse data with tokens that the model has not, before anything is started.

    Raises:
        ConfigError: The model's vocabulary is smaller than the data's, where that is known.
    """
    model, size = point.model, data.vocab_size if size is None else size
    if size is not None and size > model.vocab_size:
        raise ConfigError(
            f"{data.prefix}: needs a vocabulary of {size}, but model.vocab_size = "
            f"{model.vocab_size} (model {model.name}); take a larger model or give "
            f"--model.vocab-size {size}"
        )


def data_prefix(given: str) -> str:
    """Absolute prefix of Megatron's files: ``given``, or the embedded corpus when it is empty.

    Raises:
        ConfigError: The given files are not there.
        LaunchError: The embedded corpus could not be made.
    """
    if given:
        return _existing(given, f"data_prefix = {given!r}: ")
    code, prefix = _ask_dataset("prepare")
    if code or not prefix:
        reason = f"failed with exit code {code}" if code else "named no data that has an .idx"
        raise LaunchError(f"`python -m dataset prepare` {reason}")
    return prefix


def _existing(name: str, field: str) -> str:
    prefix = str(Path(name).absolute())
    for end in (".bin", ".idx"):
        if not Path(prefix + end).is_file():
            raise ConfigError(f"{field}there is no file {prefix + end!r}")
    return prefix


@functools.cache
def prepared(name: str) -> str | None:
    """Absolute prefix of named data; None when it has not been prepared."""
    code, prefix = _ask_dataset("find", name)
    return None if code else prefix


def _ask_dataset(*words: str) -> tuple[int, str | None]:
    """Exit code of ``python -m dataset``, and the prefix that its output ends with."""
    done = subprocess.run(
        [*DATASET, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    lines = done.stdout.rstrip("\n").split("\n")
    # The prefix is the last line, or lines when a folder's name has a newline.
    for first in range(len(lines) - 1, -1, -1):
        prefix = "\n".join(lines[first:])
        if prefix and Path(prefix + ".idx").is_file():
            return done.returncode, str(Path(prefix).absolute())
    return done.returncode, None


def embedded_words() -> str:
    """The embedded corpus in a line; it need not have been made yet."""
    prefix = prepared(EMBEDDED)
    if prefix is None:
        return f"{EMBEDDED} ({SOURCES[EMBEDDED]}), made when it is first needed"
    return look_at(prefix).words


def look_at(prefix: str) -> Data:
    """Count the tokens of a pair, and find out what its manifest says.

    Raises:
        OSError: A file cannot be read.
    """
    manifest = _manifest(prefix)
    is_embedded = manifest.get("settings", {}).get("source") == "python-docs"
    name = EMBEDDED if is_embedded else Path(prefix).name
    if Path(prefix).name == f"{OSCAR}_text_document":
        name = OSCAR
    facts, kind = data_facts(prefix)[".bin"], _token_type(prefix)
    vocab_size = manifest.get("vocab_size")
    if vocab_size is None and kind is not None:
        vocab_size = _largest_token(prefix, kind, facts["sha256"]) + 1
    return Data(
        prefix=prefix,
        name=name,
        source=SOURCES.get(name, prefix),
        tokens=None if kind is None else facts["bytes"] // kind.itemsize,
        sha256=facts["sha256"],
        vocab_size=vocab_size,
    )


def _manifest(prefix: str) -> dict[str, Any]:
    """What `dataset` wrote about a pair; empty when it did not make it."""
    own, shared = Path(f"{prefix}.manifest.json"), Path(prefix).parent / "manifest.json"
    for path in (own, shared):
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict) and found.get("prefix") == Path(prefix).name:
            return found
    return {}


def _token_type(prefix: str) -> np.dtype[Any] | None:
    """Type of a token in ``.bin``; None when the index is not Megatron's."""
    with Path(f"{prefix}.idx").open("rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    magic, version, code = _HEADER.unpack(header)
    known = magic == _MAGIC and version == 1 and code in _TOKEN_TYPES
    return np.dtype(_TOKEN_TYPES[code]) if known else None


@functools.cache
def _largest_token(prefix: str, kind: np.dtype[Any], _sha256: str) -> int:
    """The largest token, -1 when there is none; read once while the contents stay."""
    largest, at = -1, 0
    while len(tokens := np.fromfile(f"{prefix}.bin", kind, _TOKENS_AT_ONCE, offset=at)):
        largest, at = max(largest, int(tokens.max())), at + tokens.nbytes
    return largest
