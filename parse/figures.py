"""One reading of the figures that programs print, also of those that are not a number.

Python, C, JavaScript and JSON spell NaN each in a way of its own; a reader that knows fewer of them
than another would leave out a step that the other one calls lost. Standard library alone.
"""

from __future__ import annotations

import math
import re

NOT_FINITE = r"[-+]?(?:1\.#(?:INF|IND|QNAN|SNAN)\d*|(?i:nan|inf(?:inity)?)(?:\.0|\(\w*\))?(?!\w))"
"""What is not a number, also ``-nan(ind)``, ``nan.0`` and ``1.#INF``."""
NO_NUMBER = r"(?:None|null)(?!\w)"
"""In the place of a loss: JSON has no NaN, and its writers put this there."""
NUMBER = rf"(?:{NOT_FINITE}|[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
"""Python's, C's and JSON's."""
WRAPPER = r"(?:(?:\w+\.)?\w+\()?"
"""``tensor(...)``, ``np.float64(...)``."""
_WRAPPED = re.compile(rf"(?!(?i:[-+]?nan)\(){WRAPPER}({NUMBER})")


def any_spelling(number: str) -> str:
    """Return the pattern of numbers of a pattern, and of what is not finite, wrapped or not."""
    wrapped = rf"(?:\w+\.)?\w+\((?:{number}|{NOT_FINITE})(?:, [^()|]{{0,60}})?\)"
    return rf"(?:{number}|{NOT_FINITE}|{wrapped})"


def figure(text: str) -> float:
    """Return the number that a text says, such as a loss; NaN where it says none."""
    found = _WRAPPED.match(text.strip())
    said = found[1].lower() if found else "nan"
    if "nan" in said or "#ind" in said:
        return math.nan
    if "inf" in said:
        return -math.inf if said.startswith("-") else math.inf
    return float(said)
