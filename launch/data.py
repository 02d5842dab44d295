"""The data of a run: named or given as a prefix, found, counted, and held against the model."""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from configs.errors import ConfigError
from configs.schema import Model, Point
from dataset import embedded, indexed, manifest
from dataset.embedded import EMBEDDED, OSCAR, Corpus, cache_folder
from launch.records.identity import data_facts

BY_MANIFEST, BY_SIZES = "manifest", "sizes"
TOKENS_AT_ONCE = 1 << 24
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
    """What the files were held against, as :func:`require_whole` says."""

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
    if indexed.token_header(Path(prefix)) is None:
        raise ConfigError(f"--data {name!r}: {prefix}.idx is not an index of Megatron's")
    return prefix


def _vocab_size(data: Data, given: Namespace) -> int:
    """Entries of the vocabulary: the manifest's, else those that the user gave."""
    told, known = given.vocab_size, manifest.raw(Path(data.prefix)).get("vocab_size")
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
        ConfigError: The given files are not there, or the embedded corpus cannot be made.
    """
    if given:
        return _existing(given, f"data_prefix = {given!r}: ")
    corpus = Corpus(cache_folder())
    corpus.prepare(_tell)
    return str(corpus.prefix)


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def _existing(name: str, field: str) -> str:
    prefix = str(Path(name).absolute())
    for end in (".bin", ".idx"):
        if not Path(prefix + end).is_file():
            raise ConfigError(f"{field}there is no file {prefix + end!r}")
    return prefix


@functools.cache
def prepared(name: str) -> str | None:
    """Absolute prefix of named data; None when it has not been prepared."""
    prefix = embedded.prepared(name)
    return None if prefix is None else str(prefix)


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
    told = manifest.raw(Path(prefix))
    is_embedded = told.get("settings", {}).get("source") == embedded.SOURCE
    name = EMBEDDED if is_embedded else Path(prefix).name
    if Path(prefix).name == f"{OSCAR}_text_document":
        name = OSCAR
    facts, header = data_facts(prefix), indexed.token_header(Path(prefix))
    checked = require_whole(prefix, facts, told)
    sha256, size = facts[".bin"]["sha256"], facts[".bin"]["bytes"]
    vocab_size, kind = told.get("vocab_size"), indexed.DTYPES[header[0]] if header else None
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


@functools.cache
def largest_token(prefix: str, kind: np.dtype[Any], _sha256: str) -> int:
    """Return the largest token, -1 when there is none; read once while the contents stay."""
    largest, at = -1, 0
    while len(tokens := np.fromfile(f"{prefix}.bin", kind, TOKENS_AT_ONCE, offset=at)):
        largest, at = max(largest, int(tokens.max())), at + tokens.nbytes
    return largest


def require_whole(
    prefix: str, facts: Mapping[str, Mapping[str, Any]], told: Mapping[str, Any]
) -> str:
    """Refuse damaged data: it would train without a word, on other tokens or in other documents.

    Args:
        prefix: Of the pair.
        facts: As :func:`launch.records.identity.data_facts` gives them.
        told: As :func:`dataset.manifest.raw` gives it.

    Returns:
        What the files were held against: `BY_MANIFEST` (size and SHA-256), `BY_SIZES` (where there
        is none: tokens against index), or nothing when the index is not Megatron's.

    Raises:
        ConfigError: A file is not what it should be.
    """
    known = told.get("files") or {}
    name = Path(prefix).name
    if all(f"{name}{end}" in known for end in facts):
        for end, found in facts.items():
            if found != known[f"{name}{end}"]:
                raise ConfigError(
                    f"{prefix}{end} is damaged: {_difference(found, known[f'{name}{end}'])}; get "
                    "it again, or move the pair away and prepare it again"
                )
        return BY_MANIFEST
    if indexed.token_header(Path(prefix)) is None:
        return ""
    index = indexed.read(Path(prefix))
    num_indexed, num_there = index.num_indexed, len(index.ids)
    # Megatron-DeepSpeed's script does not count the token that ends each document.
    if not num_indexed <= num_there <= num_indexed + index.num_documents:
        raise ConfigError(
            f"{prefix}.bin holds {num_there:,} tokens, {prefix}.idx counts {num_indexed:,}: one of "
            "them is cut off, or they are of different pairs; get both again"
        )
    return BY_SIZES


def _difference(found: Mapping[str, Any], told: Mapping[str, Any]) -> str:
    if found["bytes"] != told["bytes"]:
        return f"it has {found['bytes']:,} bytes, its manifest says {told['bytes']:,}"
    return f"its SHA-256 is {found['sha256']}, its manifest says {told['sha256']}"
