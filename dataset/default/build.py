"""From a source to a prepared folder: read, learn the vocabulary, encode, write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from platform import python_version

from dataset import manifest
from dataset.alive import alive
from dataset.default import cache
from dataset.default.embedded import EmbeddedSource
from dataset.errors import DatasetError
from dataset.files import content_key, writing
from dataset.manifest import Manifest

# Raise it when the same text must give other files: the way documents are cut out, the vocabulary
# is trained or the files are laid out has changed. Older caches are then left alone and not used.
FORMAT_VERSION = 2

VOCAB_SIZE = 8192
TOKENIZER_NAME = "tokenizer.json"


@dataclass(frozen=True)
class Prepared:
    """A prepared folder."""

    prefix: Path
    """Absolute; the files are ``PREFIX.bin`` and ``PREFIX.idx``."""
    manifest: Manifest
    is_new: bool
    """False when it came from the cache."""


def prepare(
    source: EmbeddedSource,
    cache_folder: Path,
    say: Callable[[str], None],
    vocab_size: int = VOCAB_SIZE,
) -> Prepared:
    """Find the tokens of ``source`` in the cache, or build them.

    Args:
        source: The corpus.
        cache_folder: Absolute; made when missing.
        say: Gets one line for each thing worth telling.
        vocab_size: Entries of the vocabulary, end-of-document included.

    Raises:
        DatasetError: The corpus cannot be read or is empty, or the cache cannot be written.
    """
    prefix, key = place(source, cache_folder, vocab_size)
    folder = prefix.parent
    found, damage = cache.look_up(folder, key)
    if found:
        return Prepared(prefix, found, is_new=False)
    if damage:
        say(f"the cache {folder} is damaged ({damage}): building it again")

    def fill(work: Path) -> Manifest:
        return _write_files(work / prefix.name, source, vocab_size, key, say)

    with alive("building the default corpus"):
        made = cache.build(folder, key, fill)
    return Prepared(prefix, made, is_new=True)


def place(
    source: EmbeddedSource, cache_folder: Path, vocab_size: int = VOCAB_SIZE
) -> tuple[Path, str]:
    """Prefix that the tokens of ``source`` have in the cache, and the key of their folder."""
    key = content_key(
        {
            "source": source.name,
            "text": source.fingerprint(),
            "settings": {"vocab_size": vocab_size},
            "format": FORMAT_VERSION,
            "tokenizers": version("tokenizers"),
        }
    )
    return cache_folder / f"{source.name}-{key[:16]}" / f"{source.name}_text_document", key


def _write_files(
    prefix: Path, source: EmbeddedSource, vocab_size: int, key: str, say: Callable[[str], None]
) -> Manifest:
    # Here and not above: a call that finds its cache needs none of these.
    from dataset import indexed
    from dataset.tokenizer.bpe import ByteLevelBpe

    documents = list(source.documents())
    if not documents:
        raise DatasetError(f"the source '{source.name}' holds no text")
    say(f"building the default corpus from {len(documents):,} documents (seconds, once)")
    tokenizer = ByteLevelBpe.learn(documents, vocab_size)
    tokenizer_path = prefix.with_name(TOKENIZER_NAME)
    with writing(tokenizer_path):
        tokenizer.save(tokenizer_path)
    eod = tokenizer.eod
    assert eod is not None
    counts = indexed.write(prefix, map(tokenizer.encode, documents), eod, tokenizer.vocab_size)
    files = [indexed.bin_path(prefix), indexed.idx_path(prefix), tokenizer_path]
    return Manifest(
        schema_version=manifest.SCHEMA_VERSION,
        key=key,
        prefix=prefix.name,
        documents=counts.documents,
        tokens=counts.tokens,
        text_bytes=sum(len(text.encode()) for text in documents),
        vocab_size=tokenizer.vocab_size,
        eod=eod,
        tokenizer=TOKENIZER_NAME,
        settings={"source": source.name, "append_eod": True, "vocab_size": vocab_size},
        versions={
            "format": str(FORMAT_VERSION),
            "tokenizers": version("tokenizers"),
            "python": python_version(),
        },
        files={path.name: manifest.file_facts(path) for path in files},
    )
