"""Which tokenizer the user asks for, its one file in a work folder, and how that is opened."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataset.errors import DatasetError
from dataset.files import writing
from dataset.tokenizer.bpe import ByteLevelBpe
from dataset.tokenizer.sentence_piece import SentencePiece, learn

Tokenizer = ByteLevelBpe | SentencePiece

# Megatron's names mean the same.
MEGATRON_NAMES = {
    "GPT2BPETokenizer": "gpt2-bpe",
    "GPTSentencePieceTokenizer": "sentencepiece",
}
NAMES = ("gpt2-bpe", "sentencepiece", "train-bpe", "train-sentencepiece")
DEFAULT_VOCAB_SIZE = 32_000
DEFAULT_TRAIN_BYTES = 256 << 20


@dataclass(frozen=True)
class Choice:
    """A tokenizer as the command line names it."""

    name: str
    vocab_file: Path | None = None
    merge_file: Path | None = None
    model: Path | None = None
    vocab_size: int | None = None
    """Of a vocabulary that is learnt."""
    train_bytes: int = DEFAULT_TRAIN_BYTES
    """Text to learn it from, from the beginning of the input."""

    @property
    def learns(self) -> bool:
        """Whether the vocabulary comes from the input itself."""
        return self.name.startswith("train-")

    @property
    def file_name(self) -> str:
        """Name of the one file that holds it."""
        return "tokenizer.model" if self.name.endswith("sentencepiece") else "tokenizer.json"

    def require_files(self) -> None:
        """Check that the options belong together.

        Raises:
            DatasetError: One is missing, or is of another tokenizer.
        """
        if self.name not in NAMES:
            wrong = f"{self.name}: not" if self.name else "NAME: give"
            raise DatasetError(f"--tokenizer {wrong} one of {', '.join(NAMES)}")
        needed = {
            "gpt2-bpe": {"--vocab-file": self.vocab_file, "--merge-file": self.merge_file},
            "sentencepiece": {"--tokenizer-model": self.model},
        }.get(self.name, {})
        for flag, path in needed.items():
            if path is None:
                raise DatasetError(f"--tokenizer {self.name}: give {flag} FILE")
            if not path.is_file():
                raise DatasetError(f"{flag} {path}: no such file")
        if not self.learns and self.vocab_size is not None:
            raise DatasetError(
                f"--vocab-size {self.vocab_size}: only for a vocabulary that is learnt; "
                f"--tokenizer {self.name} brings its own"
            )

    def identity(self) -> dict[str, Any]:
        """What decides its ids, as plain JSON; files by their contents."""
        if self.learns:
            return {
                "name": self.name,
                "vocab_size": self.vocab_size or DEFAULT_VOCAB_SIZE,
                "train_bytes": self.train_bytes,
            }
        files = [path for path in (self.vocab_file, self.merge_file, self.model) if path]
        return {
            "name": self.name,
            "files": [hashlib.sha256(path.read_bytes()).hexdigest() for path in files],
        }

    def make(self, folder: Path, texts: Callable[[], Iterator[str]]) -> Path:
        """Put its file into ``folder``, unless an earlier run did.

        Args:
            folder: Where to.
            texts: What to learn from, where it learns.

        Raises:
            DatasetError: Its files cannot be used, or the texts do not suffice.
        """
        path = folder / self.file_name
        if path.exists():
            return path
        unfinished = path.with_name(f"unfinished-{path.name}")
        vocab_size = self.vocab_size or DEFAULT_VOCAB_SIZE
        with writing(path):
            if self.name == "gpt2-bpe":
                assert self.vocab_file is not None
                assert self.merge_file is not None
                ByteLevelBpe.from_gpt2_files(self.vocab_file, self.merge_file).save(unfinished)
            elif self.name == "train-bpe":
                ByteLevelBpe.learn(texts(), vocab_size).save(unfinished)
            elif self.name == "sentencepiece":
                assert self.model is not None
                SentencePiece(self.model)  # its errors name the user's file
                unfinished.write_bytes(self.model.read_bytes())
            else:
                unfinished.write_bytes(learn(texts(), vocab_size))
        load(unfinished)
        return unfinished.replace(path)


def load(path: Path) -> Tokenizer:
    """Open a tokenizer's file: ``.json`` is byte-level BPE, ``.model`` SentencePiece.

    Raises:
        DatasetError: There is none, or it cannot be read.
    """
    if not path.is_file():
        raise DatasetError(f"no tokenizer at {path}")
    if path.suffix == ".model":
        return SentencePiece(path)
    return ByteLevelBpe.load(path)
