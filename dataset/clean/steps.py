"""What a worker does with a block: every step that looks at one text alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataset.clean.contamination import FEWEST_WORDS, Contamination
from dataset.clean.duplicates import signature
from dataset.clean.settings import CleanSettings
from dataset.errors import DatasetError
from dataset.readers import inputs
from dataset.readers.blocks import Block, Reading, blocks
from dataset.readers.parse import BadRecord, Record, parse

# The beginning tells; the whole of a long text would take longer than everything else.
READ_CHARACTERS = 4000


@dataclass
class Cleaned:
    """What is left of a block."""

    lines: list[bytes] = field(default_factory=list)
    signatures: list[NDArray[np.uint32] | None] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    bad: list[tuple[int, int, str]] = field(default_factory=list)
    consumed_bytes: int = 0


class LanguageFilter:
    """Keeps texts of some languages; the model comes with the package."""

    def __init__(self, languages: tuple[str, ...], confidence: float) -> None:
        """Load the model.

        Raises:
            DatasetError: It does not know a language.
        """
        from py3langid import langid  # type: ignore[import-untyped]

        path = langid.MODEL_DIR / langid.MODEL_FILE
        self._model: Any = langid.LanguageIdentifier.from_modelpath(path, norm_probs=True)
        known = set(self._model.nb_classes)
        for language in languages:
            if language not in known:
                raise DatasetError(f"--language {language}: not one of {', '.join(sorted(known))}")
        self._languages = frozenset(languages)
        self._confidence = confidence

    def __call__(self, text: str) -> bool:
        """Whether the text is surely enough in one of the languages."""
        language, confidence = self._model.classify(text[:READ_CHARACTERS])
        return language in self._languages and confidence >= self._confidence


class Cleaner:
    """The chosen steps, in the order: fix, language, length, decontamination.

    Args:
        settings: Which steps.
        key: Which field holds the text.
    """

    def __init__(self, settings: CleanSettings, key: str) -> None:
        self._settings = settings
        self._key = key
        self._language = (
            LanguageFilter(settings.languages, settings.language_confidence)
            if settings.languages
            else None
        )
        self._contamination = _contamination(settings, key) if settings.decontaminate else None

    def __call__(self, block: Block) -> Cleaned:
        """Clean a block."""
        done = Cleaned(consumed_bytes=block.consumed_bytes)
        for file, piece in block.pieces:
            for found in parse(piece, (self._key,)):
                if isinstance(found, BadRecord):
                    done.bad.append((file, found.line, found.reason))
                else:
                    self._add(found, done)
        return done

    def _add(self, record: Record, done: Cleaned) -> None:
        text = "\n".join(record.texts[self._key])
        done.counts["read"] += 1
        for left in self.clean(text, done.counts):
            fields = {**record.fields, self._key: left}
            done.lines.append(json.dumps(fields, ensure_ascii=False, default=str).encode() + b"\n")
            wanted = self._settings.near_duplicates is not None
            done.signatures.append(signature(left) if wanted else None)

    def clean(self, text: str, counts: Counter[str]) -> list[str]:
        """What is left of a text: one text as a rule, none, or pieces of it.

        Args:
            text: One document.
            counts: Gets what was done.
        """
        settings = self._settings
        if settings.fix_text:
            import ftfy

            fixed = ftfy.fix_text(text)
            counts["fixed"] += fixed != text
            text = fixed
        if not text or text.isspace():
            counts["dropped: empty"] += 1
            return []
        if self._language and not self._language(text):
            counts["dropped: language"] += 1
            return []
        if not self._contamination:
            return [text] if self._has_right_length(text, counts) else []
        pieces = self._contamination.clean(text)
        counts["contaminated"] += pieces != [text]
        counts["dropped: contaminated"] += not pieces
        return [piece for piece in pieces if self._has_right_length(piece, counts)]

    def _has_right_length(self, text: str, counts: Counter[str]) -> bool:
        settings = self._settings
        if not settings.min_words and settings.max_words is None:
            return True
        num_words = len(text.split())
        if num_words < settings.min_words:
            counts["dropped: too short"] += 1
            return False
        if settings.max_words is not None and num_words > settings.max_words:
            counts["dropped: too long"] += 1
            return False
        return True


def _contamination(settings: CleanSettings, key: str) -> Contamination:
    found = Contamination(_evaluation_texts(settings, key))
    if not len(found):
        files = " ".join(map(str, settings.decontaminate))
        raise DatasetError(
            f"--decontaminate {files}: holds no evaluation text of {FEWEST_WORDS} words or more"
        )
    return found


def _evaluation_texts(settings: CleanSettings, key: str) -> Iterator[str]:
    found = inputs.find([str(path) for path in settings.decontaminate], flag="--decontaminate")
    # A text file of evaluation texts has one a line.
    for block in blocks(Reading(found, (key,), "line")):
        for file, piece in block.pieces:
            for record in parse(piece, (key,)):
                if isinstance(record, BadRecord):
                    raise DatasetError(
                        f"--decontaminate {found[file].path}:{record.line}: {record.reason}"
                    )
                yield "\n".join(record.texts[key])


_cleaner: Cleaner | None = None


def start(*arguments: Any) -> None:  # noqa: ANN401 - those of Cleaner
    """Make this process a worker."""
    global _cleaner
    _cleaner = Cleaner(*arguments)


def work(block: Block) -> Cleaned:
    """Clean one block in this process."""
    assert _cleaner is not None
    return _cleaner(block)
