"""Tokenizers: byte-level BPE, learnt or read from GPT-2's files, and SentencePiece models.

`tokenizers` learns and stores BPE vocabularies; `tiktoken`, which needs a table of bytes and ids
and nothing from a hub, encodes several times as fast. Its ids are the same: it merges the pair
whose product has the lowest id, `tokenizers` the pair that comes first in the merges. Once ids
follow the merges' order, and every token's own text encodes as that token, no text can tell the two
apart; `ByteLevelBpe` checks both and otherwise leaves the work to `tokenizers`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dataset.files import DatasetError, writing

if TYPE_CHECKING:
    import tiktoken
    from tokenizers import Tokenizer as TokenizersTokenizer

END_OF_DOCUMENT = "<|endoftext|>"
# The 256 bytes and the end-of-document token: below this nothing can be learnt.
SMALLEST_VOCABULARY = 257

# GPT-2's: contractions, words, numbers, other marks, each with the blank before it, and white
# space, whose last blank goes to the word that follows. Possessive where backing off cannot help.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
DEFAULT_VOCAB_SIZE = 32_000
TRAIN_BYTES = 256 << 20
"""Text to learn a vocabulary from, from the beginning of the input."""
NAMES = ("gpt2-bpe", "sentencepiece", "train-bpe")
# Megatron's names mean the same.
MEGATRON_NAMES = {
    "GPT2BPETokenizer": "gpt2-bpe",
    "GPTSentencePieceTokenizer": "sentencepiece",
}


class ByteLevelBpe:
    """A byte-level BPE tokenizer in the file format of `tokenizers`."""

    def __init__(self, text: str) -> None:
        """Take the contents of a ``tokenizer.json``; they must be byte-level BPE."""
        self._json = text
        model = json.loads(text)["model"]
        self._vocabulary: dict[str, int] = model["vocab"]
        self._merges = [
            tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair)
            for pair in model["merges"]
        ]

    @classmethod
    def load(cls, path: Path) -> ByteLevelBpe:
        """Read a ``tokenizer.json``.

        Raises:
            DatasetError: The file is not such a tokenizer.
        """
        try:
            return cls(path.read_text(encoding="utf-8"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DatasetError(
                f"{path} is not a tokenizer: {type(error).__name__}: {error}"
            ) from error

    @classmethod
    def from_gpt2_files(cls, vocab_file: Path, merge_file: Path) -> ByteLevelBpe:
        """Read ``vocab.json`` and ``merges.txt``.

        Raises:
            DatasetError: A file is missing, or they are no vocabulary and its merges.
        """
        from tokenizers import Tokenizer, models

        try:
            model = models.BPE.from_file(str(vocab_file), str(merge_file))
        except Exception as error:
            raise DatasetError(
                f"{vocab_file} and {merge_file} are no vocabulary with its merges: {error}"
            ) from error
        return cls(_byte_level(Tokenizer(model)).to_str())

    @classmethod
    def learn(cls, texts: Iterable[str], vocab_size: int) -> ByteLevelBpe:
        """Learn a vocabulary; the same texts give the same vocabulary.

        Every byte is in it, so that every text can be encoded and comes back unchanged.

        Args:
            texts: What to learn from.
            vocab_size: Entries wanted, end-of-document (id 0) and the 256 bytes included. Fewer
                come out when the texts are too small to hold that many pairs.

        Raises:
            DatasetError: ``vocab_size`` is below 257.
        """
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        if vocab_size < SMALLEST_VOCABULARY:
            raise DatasetError(
                f"vocab_size = {vocab_size}: at least {SMALLEST_VOCABULARY} are needed, "
                "for the 256 bytes and the end-of-document token"
            )
        tokenizer = _byte_level(Tokenizer(models.BPE()))
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer=trainer)
        return cls(tokenizer.to_str())

    def save(self, path: Path) -> None:
        """Write the ``tokenizer.json``; the same vocabulary gives the same bytes."""
        path.write_text(self._json, encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        """Return one more than the highest id."""
        return max(self._vocabulary.values()) + 1

    @property
    def eod(self) -> int | None:
        """Return the id of ``<|endoftext|>``."""
        return self._vocabulary.get(END_OF_DOCUMENT)

    @cached_property
    def is_fast(self) -> bool:
        """Return whether `tiktoken` gives the same ids for every text (see the module)."""
        ids = [self._vocabulary.get("".join(pair), -1) for pair in self._merges]
        in_order = all(a < b for a, b in pairwise(ids))
        letters = {letter for letter in self._vocabulary if len(letter) == 1}
        known = len(ids) + len(letters) + (self.eod is not None)
        if not in_order or known != len(self._vocabulary) or letters != set(BYTES):
            return False
        model: Any = self._slow.model
        return all(
            token == END_OF_DOCUMENT or [part.id for part in model.tokenize(token)] == [number]
            for token, number in self._vocabulary.items()
        )

    def encode(self, text: str) -> NDArray[Any]:
        """Return the ids of a text; ``<|endoftext|>`` in it gets the ids of those characters."""
        if self.is_fast:
            return self._fast.encode_to_numpy(text, disallowed_special=())
        found = self._slow.encode_batch_fast([text], add_special_tokens=False)[0]
        return np.asarray(found.ids, np.uint32)

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids; bytes that are no UTF-8 by themselves become a mark."""
        return self._slow.decode(ids, skip_special_tokens=False)

    @cached_property
    def _fast(self) -> tiktoken.Encoding:
        import tiktoken

        special = {} if self.eod is None else {END_OF_DOCUMENT: self.eod}
        ranks = {
            bytes(BYTES[letter] for letter in token): number
            for token, number in self._vocabulary.items()
            if token not in special
        }
        return tiktoken.Encoding(
            "local", pat_str=WORDS, mergeable_ranks=ranks, special_tokens=special
        )

    @cached_property
    def _slow(self) -> TokenizersTokenizer:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_str(self._json)
        tokenizer.encode_special_tokens = True
        return tokenizer


def _byte_level(tokenizer: TokenizersTokenizer) -> TokenizersTokenizer:
    from tokenizers import decoders, pre_tokenizers

    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


_PRINTING = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTING]
BYTES = {chr(byte): byte for byte in _PRINTING} | {
    chr(256 + number): byte for number, byte in enumerate(_OTHERS)
}
"""The byte that each letter stands for: itself if it prints, else one from 256 on."""


class SentencePiece:
    """A SentencePiece model; its end-of-sentence id ends a document, as in Megatron."""

    def __init__(self, path: Path) -> None:
        """Read a model.

        Raises:
            DatasetError: It is missing or is no model.
        """
        from sentencepiece import SentencePieceProcessor

        if not path.is_file():
            raise DatasetError(f"no tokenizer model {path}")
        try:
            self._model: Any = SentencePieceProcessor(model_proto=path.read_bytes())
        except (RuntimeError, OSError) as error:
            raise DatasetError(f"{path} is not a SentencePiece model") from error

    @property
    def vocab_size(self) -> int:
        """Return one more than the highest id."""
        return int(self._model.vocab_size())

    @property
    def eod(self) -> int | None:
        """Return the end-of-sentence id."""
        found = int(self._model.eos_id())
        return found if found >= 0 else None

    def encode(self, text: str) -> NDArray[Any]:
        """Return the ids of a text; the model's own normalization (white space) applies."""
        return np.asarray(self._model.encode(text, out_type=int), np.uint32)

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids."""
        return str(self._model.decode(ids))


Tokenizer = ByteLevelBpe | SentencePiece


@dataclass(frozen=True)
class Choice:
    """A tokenizer as the command line names it."""

    name: str
    vocab_file: Path | None = None
    merge_file: Path | None = None
    model: Path | None = None
    vocab_size: int | None = None
    """Entries of a vocabulary that is learnt."""

    @property
    def learns(self) -> bool:
        """Return whether the vocabulary comes from the input itself."""
        return self.name == "train-bpe"

    @property
    def file_name(self) -> str:
        """Return the name of the one file that holds it."""
        return "tokenizer.model" if self.name == "sentencepiece" else "tokenizer.json"

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
        """Return what decides its ids, as plain JSON; files by their contents."""
        if self.learns:
            return {
                "name": self.name,
                "vocab_size": self.vocab_size or DEFAULT_VOCAB_SIZE,
                "train_bytes": TRAIN_BYTES,
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
        with writing(path):
            if self.name == "gpt2-bpe":
                assert self.vocab_file is not None
                assert self.merge_file is not None
                ByteLevelBpe.from_gpt2_files(self.vocab_file, self.merge_file).save(unfinished)
            elif self.name == "sentencepiece":
                assert self.model is not None
                SentencePiece(self.model)  # its errors name the user's file
                unfinished.write_bytes(self.model.read_bytes())
            else:
                vocab_size = self.vocab_size or DEFAULT_VOCAB_SIZE
                ByteLevelBpe.learn(texts(), vocab_size).save(unfinished)
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


def required_eod(tokenizer: Tokenizer) -> int:
    """Return the id that ends a document.

    Raises:
        DatasetError: The vocabulary has none.
    """
    if tokenizer.eod is None:
        raise DatasetError(
            "--append-eod: the vocabulary has no token that ends a document "
            "(<|endoftext|>, or SentencePiece's end of sentence)"
        )
    return tokenizer.eod
