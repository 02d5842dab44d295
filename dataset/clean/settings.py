"""What to clean, and the libraries that do it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from dataset.errors import DatasetError

# Not needed for anything else, so not among the packages that every run needs.
LIBRARIES = {"ftfy": "6.3.1", "py3langid": "0.4.0", "datasketch": "2.0.0"}


@dataclass(frozen=True)
class CleanSettings:
    """Each step by choice; the defaults change nothing."""

    fix_text: bool = False
    """Mend text that was decoded wrongly on its way, HTML entities, odd quotes."""
    languages: tuple[str, ...] = ()
    """Codes of the languages to keep; all when empty."""
    language_confidence: float = 0.5
    """Least probability of the language, over 0, up to 1."""
    min_words: int = 0
    max_words: int | None = None
    near_duplicates: float | None = None
    """Share of equal five-word stretches (Jaccard) from which a text is a duplicate."""
    decontaminate: tuple[Path, ...] = ()
    """Files with evaluation texts."""

    def counted(self) -> list[str]:
        """Names of what is counted, whether it happens or not."""
        names = {
            "fixed": self.fix_text,
            "dropped: empty": True,
            "dropped: language": bool(self.languages),
            "contaminated": bool(self.decontaminate),
            "dropped: contaminated": bool(self.decontaminate),
            "dropped: too short": self.min_words > 0,
            "dropped: too long": self.max_words is not None,
            "dropped: near-duplicate": self.near_duplicates is not None,
        }
        return ["read", "written", *(name for name, is_chosen in names.items() if is_chosen)]

    def require_libraries(self) -> None:
        """Check that the libraries of the chosen steps are there.

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
