"""The data of a run: named or given as a prefix, found, checked, and compared with the model."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from configs.cli import complain
from configs.errors import ConfigError
from configs.schema import Model, Point
from dataset import embedded, indexed, manifest
from dataset.embedded import EMBEDDED, OSCAR, Corpus, cache_folder
from launch.identity import data_facts

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


@dataclass(frozen=True)
class Data:
    """What is known of a pair of Megatron's files."""

    name: str
    """``embedded``, ``oscar-1gb``, or the name of the user's own pair."""
    source: str
    """Where the text comes from, in words."""
    tokens: int | None
    """None when the index is not Megatron's; the trainer refuses such data."""
    vocab_size: int | None
    """Of the manifest; None without one."""
    checked: str
    """What the files were compared with: ``manifest``, ``sizes``, or nothing when the index is not
    Megatron's."""


def with_data(points: Sequence[Point]) -> tuple[list[Point], str]:
    """Return the points with data for those that name none, and a line that tells which.

    Full-size models take oscar-1gb where it has been prepared; the line is empty where there was
    nothing to choose.

    Raises:
        ConfigError: the prepared corpus is damaged.
    """
    is_open = [not p.data_prefix and p.model.vocab_size >= PAPER_VOCAB_SIZE for p in points]
    if not any(is_open):
        return list(points), ""
    if prepared(OSCAR) is None:
        return list(points), UNPREPARED
    taken = [p.model_copy(update={"data_prefix": OSCAR}) for p in points]
    chosen = [new if o else old for new, old, o in zip(taken, points, is_open, strict=True)]
    return chosen, f"data: {data_words(OSCAR)}"


def require_vocabulary(point: Point, prefix: str) -> None:
    """Refuse data with tokens that the model has not, before anything is started.

    Data without a manifest are let through: the trainer refuses the first token that is too large.

    Raises:
        ConfigError: the model's vocabulary is smaller than the one of the data's manifest.
    """
    model, size = point.model, look_at(prefix).vocab_size
    if size and size > model.vocab_size:
        raise ConfigError(
            f"{prefix}: needs a vocabulary of {size}, but model.vocab_size = "
            f"{model.vocab_size} (model {model.name}); take a larger model or give "
            f"--model.vocab-size {size}"
        )


def is_embedded(given: str) -> bool:
    """Return whether a point's ``data_prefix`` means the embedded corpus."""
    return given in ("", EMBEDDED)


def data_prefix(given: str) -> str:
    """Return the absolute prefix of Megatron's files, of a prefix, ``embedded`` or ``oscar-1gb``.

    Raises:
        ConfigError: the files are not there, or the embedded corpus cannot be made.
    """
    if is_embedded(given):
        corpus = Corpus(cache_folder())
        corpus.prepare(complain)
        return str(corpus.prefix)
    if given == OSCAR:
        prefix = prepared(OSCAR)
        if prefix is None:
            raise ConfigError(
                f"data_prefix = '{OSCAR}': not prepared yet; `make dataset-oscar` fetches and "
                "prepares it"
            )
        return prefix
    prefix = str(Path(given.removesuffix(".bin").removesuffix(".idx")).absolute())
    for end in (".bin", ".idx"):
        if not Path(prefix + end).is_file():
            raise ConfigError(
                f"data_prefix = {given!r}: neither {EMBEDDED} nor {OSCAR}, and there is no file "
                f"{prefix + end!r}"
            )
    return prefix


@functools.cache
def prepared(name: str) -> str | None:
    """Return the absolute prefix of named data; None when it has not been prepared."""
    prefix = embedded.prepared(name)
    return None if prefix is None else str(prefix)


def data_words(given: str) -> str:
    """Say in a line what data a point has; the embedded corpus need not have been made yet."""
    prefix = prepared(EMBEDDED) if is_embedded(given) else data_prefix(given)
    if prefix is None:
        return f"{EMBEDDED} ({SOURCES[EMBEDDED]}), made when it is first needed"
    data, sha256 = look_at(prefix), data_facts(prefix)[".bin"]["sha256"]
    count = "of no known size" if data.tokens is None else f"{data.tokens:,} tokens"
    unsure = "; no manifest: its sizes alone were checked" if data.checked == "sizes" else ""
    return f"{data.name} ({data.source}), {count}, SHA-256 {sha256}{unsure}"


def data_record(prefix: str) -> dict[str, Any]:
    """Return what ``run.json`` says of a pair."""
    return {**data_facts(prefix), **asdict(look_at(prefix))}


def look_at(prefix: str) -> Data:
    """Count the tokens of a pair, and check that it is whole.

    Raises:
        ConfigError: it is damaged: it would train without a word, on other tokens or in other
            documents.
        OSError: a file cannot be read.
    """
    told, facts = manifest.raw(Path(prefix)), data_facts(prefix)
    is_embedded = told.get("settings", {}).get("source") == embedded.SOURCE
    name = EMBEDDED if is_embedded else Path(prefix).name
    if Path(prefix).name == f"{OSCAR}_text_document":
        name = OSCAR
    checked = "manifest" if _is_in_manifest(prefix, facts, told.get("files") or {}) else ""
    tokens = None
    if indexed.token_header(Path(prefix)) is not None:
        index = indexed.read(Path(prefix))
        tokens, num_indexed = len(index.ids), index.num_indexed
        # Megatron-DeepSpeed's script does not count the token that ends each document.
        if not checked and not num_indexed <= tokens <= num_indexed + index.num_documents:
            raise ConfigError(
                f"{prefix}.bin holds {tokens:,} tokens, {prefix}.idx counts {num_indexed:,}: one "
                "of them is cut off, or they are of different pairs; get both again"
            )
        checked = checked or "sizes"
    return Data(name, SOURCES.get(name, prefix), tokens, told.get("vocab_size"), checked)


def _is_in_manifest(
    prefix: str, facts: Mapping[str, Mapping[str, Any]], known: Mapping[str, Mapping[str, Any]]
) -> bool:
    """Tell whether both files stand in the manifest; refuse one that differs from it."""
    name = Path(prefix).name
    if not all(f"{name}{end}" in known for end in facts):
        return False
    for end, found in facts.items():
        told = known[f"{name}{end}"]
        if found != told:
            raise ConfigError(
                f"{prefix}{end} is damaged: it has {found['bytes']:,} bytes and SHA-256 "
                f"{found['sha256']}, its manifest says {told['bytes']:,} and {told['sha256']}; "
                "get it again, or move the pair away and prepare it again"
            )
    return True
