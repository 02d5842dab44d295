"""What to clean, and what a worker does with a block: the steps that look at one text alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataset.clean import groups
from dataset.clean.contamination import Contamination, Ngrams
from dataset.clean.duplicates import Sketch
from dataset.errors import DatasetError
from dataset.readers import inputs
from dataset.readers.blocks import Bad, Block, Reading, Record, blocks

# Not needed for anything else, so not among the packages that every run needs.
LIBRARIES = {"ftfy": "6.3.1", "py3langid": "0.4.0", "datasketch": "2.0.0"}
# The beginning tells; the whole of a long text would take longer than everything else.
READ_CHARACTERS = 4000


@dataclass(frozen=True)
class CleanSettings:
    """Each step by choice; the defaults change nothing."""

    key: str = "text"
    """Field that holds the text."""
    id_key: str = "id"
    """Field that names the text."""
    remove_groups: tuple[Path, ...] = ()
    """Files with groups of texts, of which all but the first go."""
    fix_text: bool = False
    """Mend text that was decoded wrongly on its way, HTML entities, odd quotes."""
    languages: tuple[str, ...] = ()
    """Codes of the languages to keep; all when empty."""
    language_confidence: float = 0.5
    """Least probability of the language, over 0, up to 1."""
    min_words: int = 0
    max_words: int | None = None
    min_characters: int = 0
    near_duplicates: float | None = None
    """Share of equal stretches of words (Jaccard) from which a text is a duplicate."""
    sketch: Sketch = field(default_factory=Sketch)
    needs_names: bool = False
    """Whether the names of texts are asked for, so that each must have one."""
    decontaminate: tuple[Path, ...] = ()
    """Files with evaluation texts."""
    decontaminate_keys: tuple[str, ...] = ()
    """Fields with the evaluation texts, each by itself; that of the text when empty."""
    ngrams: Ngrams = field(default_factory=Ngrams)
    common: frozenset[str] = frozenset()
    """Sequences of evaluation texts that stay, see `Ngrams.max_matches`."""

    def counted(self) -> list[str]:
        """Names of what is counted, whether it happens or not."""
        names = {
            "dropped: in a group": bool(self.remove_groups),
            "fixed": self.fix_text,
            "dropped: empty": True,
            "dropped: language": bool(self.languages),
            "contaminated": bool(self.decontaminate),
            "dropped: contaminated": bool(self.decontaminate),
            "dropped: too short": self.min_words > 0 or self.min_characters > 0,
            "dropped: too long": self.max_words is not None,
            "dropped: near-duplicate": self.near_duplicates is not None,
        }
        return ["read", "written", *(name for name, is_chosen in names.items() if is_chosen)]

    def require_usable(self) -> None:
        """Check that the libraries of the chosen steps are there, and that no step is in vain.

        Raises:
            DatasetError: One is not.
        """
        needed = {
            "--fix-text": ("ftfy", self.fix_text),
            "--language": ("py3langid", bool(self.languages)),
            "--near-duplicates": ("datasketch", self.near_duplicates is not None),
        }
        for flag, (name, is_needed) in needed.items():
            if is_needed and find_spec(name) is None:
                raise DatasetError(
                    f"{flag} needs the package {name}: pip install {name}=={LIBRARIES[name]}"
                )
        if self.max_words is not None and self.max_words < self.min_words:
            raise DatasetError(
                f"--max-words {self.max_words}: less than --min-words {self.min_words}"
            )


@dataclass
class Cleaned:
    """What is left of a block."""

    consumed_bytes: int
    lines: list[bytes] = field(default_factory=list)
    signatures: list[NDArray[np.uint32] | None] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """Of the texts; empty where a record has none and none is needed."""
    counts: Counter[str] = field(default_factory=Counter)
    bad: list[Bad] = field(default_factory=list)


class Cleaner:
    """The chosen steps, in the order: groups, fix, language, decontamination, length."""

    def __init__(self, settings: CleanSettings) -> None:
        """Load what the steps need.

        Raises:
            DatasetError: A language is not known, or the evaluation texts or the groups cannot be
                used.
        """
        self._settings = settings
        self._gone = groups.to_remove(settings.remove_groups)
        self._languages = _language_model(settings.languages) if settings.languages else None
        self._contamination = contamination(settings) if settings.decontaminate else None

    def of_block(self, block: Block) -> Cleaned:
        """Clean a block.

        Raises:
            DatasetError: A text has no name and needs one.
        """
        key, done = self._settings.key, Cleaned(block.consumed_bytes)
        for record in block.records((key,), done.bad):
            done.counts["read"] += 1
            text = "\n".join(record.texts[key])
            name = self._name(record, text)
            if name in self._gone:
                done.counts["dropped: in a group"] += 1
                continue
            left = self.clean(text, done.counts)
            for number, piece in enumerate(left):
                fields = {**record.fields, key: piece}
                if name and len(left) > 1:
                    fields[self._settings.id_key] = f"{name}-{number}"
                line = json.dumps(fields, ensure_ascii=False, default=str)
                done.lines.append(line.encode() + b"\n")
                wanted = self._settings.near_duplicates is not None
                done.signatures.append(self._settings.sketch.of(piece) if wanted else None)
                done.names.append(f"{name}-{number}" if len(left) > 1 else name)
        return done

    def _name(self, record: Record, text: str) -> str:
        value = record.fields.get(self._settings.id_key)
        if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
            return str(value)
        if self._settings.needs_names or self._gone:
            raise DatasetError(
                f"line {record.line}, {text[:40]!r}: no name under '{self._settings.id_key}', "
                "which groups need: choose the field that names a text with --id-key"
            )
        return ""

    def clean(self, text: str, counts: Counter[str]) -> list[str]:
        """What is left of a text: one text as a rule, none, or pieces of it.

        Args:
            text: One document.
            counts: Gets what was done.
        """
        if self._settings.fix_text:
            import ftfy

            fixed = ftfy.fix_text(text)
            counts["fixed"] += fixed != text
            text = fixed
        if not text or text.isspace():
            counts["dropped: empty"] += 1
            return []
        if self._languages:
            language, confidence = self._languages.classify(text[:READ_CHARACTERS])
            least = self._settings.language_confidence
            if language not in self._settings.languages or confidence < least:
                counts["dropped: language"] += 1
                return []
        pieces = [text]
        if self._contamination:
            pieces = self._contamination.clean(text)
            counts["contaminated"] += pieces != [text]
            counts["dropped: contaminated"] += not pieces
        return [piece for piece in pieces if self._has_right_length(piece, counts)]

    def _has_right_length(self, text: str, counts: Counter[str]) -> bool:
        fewest, most = self._settings.min_words, self._settings.max_words
        if len(text) < self._settings.min_characters:
            counts["dropped: too short"] += 1
            return False
        if not fewest and most is None:
            return True
        num_words = len(text.split())
        if num_words < fewest:
            counts["dropped: too short"] += 1
            return False
        if most is not None and num_words > most:
            counts["dropped: too long"] += 1
            return False
        return True


def _language_model(languages: tuple[str, ...]) -> Any:  # noqa: ANN401
    """The model that comes with the package; checks that it knows the languages."""
    from py3langid import langid  # type: ignore[import-untyped]

    path = langid.MODEL_DIR / langid.MODEL_FILE
    model = langid.LanguageIdentifier.from_modelpath(path, norm_probs=True)
    for language in languages:
        if language not in model.nb_classes:
            known = ", ".join(sorted(model.nb_classes))
            raise DatasetError(f"--language {language}: not one of {known}")
    return model


def contamination(settings: CleanSettings) -> Contamination:
    """The evaluation texts of settings.

    Raises:
        DatasetError: They cannot be used.
    """
    names = [str(path) for path in settings.decontaminate]
    files = inputs.find(names, flag="--decontaminate")
    # A text file of evaluation texts has one a line.
    reading = Reading(files, settings.decontaminate_keys or (settings.key,), "line")

    def texts() -> Iterator[str]:
        bad: list[Bad] = []
        for block in blocks(reading):
            for record in block.records(reading.keys, bad):
                for some in record.texts.values():
                    yield from some
        if bad:
            raise DatasetError(
                f"--decontaminate {reading.words(bad[0])}; --decontaminate-keys says where its "
                "texts are"
            )

    found = Contamination(texts(), settings.ngrams, settings.common)
    # All may be common.
    if not len(found) and not settings.common:
        raise DatasetError(
            f"--decontaminate {' '.join(names)}: holds no evaluation text of "
            f"{settings.ngrams.fewest_words} words or more"
        )
    return found


@cache
def _cleaner(settings: CleanSettings) -> Cleaner:
    return Cleaner(settings)


def work(settings: CleanSettings, block: Block) -> Cleaned:
    """Clean one block in this process."""
    return _cleaner(settings).of_block(block)


@cache
def _known(settings: CleanSettings) -> Contamination:
    return contamination(settings)


def count_matches(settings: CleanSettings, block: Block) -> tuple[int, Counter[str]]:
    """Count in this process how often a block holds each sequence of the evaluation texts.

    Returns:
        How far in the input the block ends, in bytes, and the counts.
    """
    found: Counter[str] = Counter()
    for record in block.records((settings.key,), []):
        found.update(_known(settings).count("\n".join(record.texts[settings.key])))
    return block.consumed_bytes, found
