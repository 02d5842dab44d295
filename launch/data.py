"""The data of a run: named or given as a prefix, found, counted, and held against the model."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.files import ROOT
from configs.schema import Model, Point
from launch.pair import BY_SIZES, largest_token, manifest_of, require_whole, token_type
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
    checked: str
    """What the files were held against, as :func:`launch.pair.require_whole` says."""

    @property
    def words(self) -> str:
        """Name, size and checksum in a line."""
        count = "of no known size" if self.tokens is None else f"{self.tokens:,} tokens"
        unsure = "; no manifest: its sizes alone were checked" if self.checked == BY_SIZES else ""
        return f"{self.name} ({self.source}), {count}, SHA-256 {self.sha256}{unsure}"

    def record(self) -> dict[str, Any]:
        """What ``run.json`` says of it."""
        names = ("name", "source", "tokens", "vocab_size", "checked")
        return {**data_facts(self.prefix), **{name: getattr(self, name) for name in names}}


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
    if token_type(prefix) is None:
        raise ConfigError(f"--data {name!r}: {prefix}.idx is not an index of Megatron's")
    return prefix


def _vocab_size(data: Data, given: Namespace) -> int:
    """Entries of the vocabulary: the manifest's, else those that the user gave."""
    told, known = given.vocab_size, manifest_of(data.prefix).get("vocab_size")
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
    done = subprocess.run([*DATASET, *words], cwd=ROOT, stdout=subprocess.PIPE, check=False)
    lines = os.fsdecode(done.stdout).rstrip("\n").split("\n")
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
    """Count the tokens of a pair, and check that it is whole.

    Raises:
        ConfigError: It is damaged.
        OSError: A file cannot be read.
    """
    manifest = manifest_of(prefix)
    is_embedded = manifest.get("settings", {}).get("source") == "python-docs"
    name = EMBEDDED if is_embedded else Path(prefix).name
    if Path(prefix).name == f"{OSCAR}_text_document":
        name = OSCAR
    facts, kind = data_facts(prefix), token_type(prefix)
    checked = require_whole(prefix, facts, manifest)
    sha256, size = facts[".bin"]["sha256"], facts[".bin"]["bytes"]
    vocab_size = manifest.get("vocab_size")
    if vocab_size is None and kind is not None:
        vocab_size = largest_token(prefix, kind, sha256) + 1
    return Data(
        prefix=prefix,
        name=name,
        source=SOURCES.get(name, prefix),
        tokens=None if kind is None else size // kind.itemsize,
        sha256=sha256,
        vocab_size=vocab_size,
        checked=checked,
    )
