"""Which language a text is in."""

from __future__ import annotations

from typing import Any

from dataset.errors import DatasetError

# The beginning tells; the whole of a long text would take longer than everything else.
READ_CHARACTERS = 4000


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
