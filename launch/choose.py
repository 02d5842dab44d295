"""Which points of a plan ``--only`` and ``--index`` mean."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

from configs.errors import ConfigError, explain
from configs.naming import Namer, flat
from configs.schema import Point


def choose_points(
    points: Sequence[Point], only: Sequence[str], index: int | None = None
) -> list[str]:
    """Return the names of the points that ``--only`` or ``--index`` asks for, in the plan's order.

    ``only`` has what tells points, see :func:`_meant`; ``index`` counts from 1.

    Raises:
        ConfigError: nothing is meant by one of them; the points are named.
    """
    names = [point.name for point in points]
    if index is not None:
        if index > len(names):
            raise ConfigError(f"--index {index}: the plan has points 1 to {len(names)}")
        return [names[index - 1]]
    chosen: set[str] = set()
    for word in only:
        found = _meant(word, points)
        if not found or not word.strip():  # which is a part of every name
            raise ConfigError(explain.unknown("point", word, names))
        chosen.update(found)
    return [name for name in names if name in chosen] if only else names


def _meant(given: str, points: Sequence[Point]) -> list[str]:
    """Return the names of the points that some words mean, as narrowly as they can be taken.

    A name or a pattern with ``*``; else words of the name, of which a number stands beside its
    word, before it or after it; else a part of the name; else a setting that the name does not
    tell, such as ``layers 8``. Large letters are as small ones, and an engine may have any of its
    names.
    """
    words = given.lower().replace(",", " ").split()
    engines = [str(points[0].study.engine_name(word)) for word in words]
    # "hybrid stride 2" was the name of "stride 2".
    renamed = [
        word for word, before in zip(engines, ["", *engines], strict=False) if word != before
    ]
    return _matching(words, points) or _matching(renamed, points)


def _matching(words: Sequence[str], points: Sequence[Point]) -> list[str]:
    text, pairs = " ".join(words), _with_their_numbers(words)
    names = {point.name: point.name.lower() for point in points}

    def is_setting(point: Point) -> bool:
        namer, fields = Namer(point.study), flat(point)
        settings = (namer.setting(name, value) for name, value in fields.items())
        return sorted(words) in (sorted(setting.lower().split()) for setting in settings)

    for found in (
        [name for name, own in names.items() if own == text],
        [name for name, own in names.items() if fnmatch.fnmatchcase(own, text)],
        [name for name, own in names.items() if all(_stands_in(own.split(), p) for p in pairs)],
        [name for name, own in names.items() if text in own],
        [point.name for point in points if is_setting(point)],
    ):
        if found:
            return found
    return []


def _with_their_numbers(words: Sequence[str]) -> list[list[str]]:
    """Pair each number with the word before it, or else after it: ``[[tiny], [dp, 4]]``."""
    pairs: list[list[str]] = []
    for word in words:
        is_number = re.fullmatch(r"[\d.]+", word) is not None
        last = pairs[-1] if pairs else []
        if len(last) == 1 and is_number != (re.fullmatch(r"[\d.]+", last[0]) is not None):
            last.append(word)
        else:
            pairs.append([word])
    return pairs


def _stands_in(words: Sequence[str], some: Sequence[str]) -> bool:
    places = range(len(words) - len(some) + 1)
    return any(sorted(words[at : at + len(some)]) == sorted(some) for at in places)
