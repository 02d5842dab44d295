"""Reads a configuration as guides print it, and notes each place where it is no JSON.

Comments, Python's words, bare words, missing and spare commas, placeholders such as ``[0|1|2|3]``
and ``<N>``, dots for what was left out, blocks by indentation.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import math
import re
from dataclasses import dataclass
from typing import Any

_QUOTES = {'"': '"', "'": "'", "“": "”", "”": "”", "„": "“"}
_BLANK = re.compile(r"\s+")
_COMMENT = re.compile(
    r"//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)|```[^\n]*|(?<![^\n])---[ \t]*(?=\n)", re.DOTALL
)
_DOTS = re.compile(r"\.{3,}|…")
_KEY = re.compile(r"[A-Za-z_$][\w.$-]*(?=\s*[:=])|[A-Za-z_$][\w.$-]*")
_BEFORE_COLON = re.compile(r"""(?:"[^"\n]*"|'[^'\n]*'|[A-Za-z_$][\w.$-]*)[ \t]*:""")
_CALL = re.compile(r"dict\s*\(")
_ASSIGNED = re.compile(r"[A-Za-z_][\w.]*\s*=\s*(?=\{|dict\s*\()")
_MARK = re.compile(r"""(?:<[^<>\n]*>|\[[^\[\]\n]*\]|\([^()\n]*\)|[-*+•>]+)\s*(?=["'“A-Za-z_])""")
"""What guides put before a key: ``<optional>``, a dash."""
_NEXT_KEY = re.compile(r"""(?:"[^"\n]*"|'[^'\n]*')\s*:""")
_WORDS = re.compile(r"""[^,;)\]}\n"'#]*?(?=\s*(?:[,;)\]}\n"'#]|//|/\*|\Z)|\s+[A-Za-z_]\w*\s*:\s)""")
_ONE = r"""\s*(?:"[^"\n]*"|'[^'\n]*'|[^\[\](){}<>\n,:|"']*)\s*"""
_BRACKETED = re.compile(
    rf"[\[({{<]{_ONE}(?:\|{_ONE})+[\])}}>]|<[^<>\n]+>|\{{\{{[^{{}}\n]*\}}\}}|\$\{{[^{{}}\n]*\}}|\$\w+"
    r"|[A-Za-z_][\w.]*(?:\([^()\n]*\)|\[[^\[\]\n]*\])"
)
"""A choice in brackets of any kind, a name in angle ones, a template's, a call."""
_PLACEHOLDER = re.compile(
    r"[\[{<].*\|.*[\]}>]|<.+>|\$\{.+\}|\{\{.+\}\}|\{\w+\}|\w[\w.]*(?:\|\w[\w.]*)+|\.{3}|…|\?+"
)
"""A text in quotes that stands for a value."""
_SLASHED = re.compile(
    r"(?i)(?:true|false|none|cpu|nvme|\d+)(?:\s*/\s*(?:true|false|none|cpu|nvme|\d+))+"
)
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}


class Placeholder(str):
    """A text that stands for a value which is still to be chosen."""

    __slots__ = ()

    @property
    def remedy(self) -> str:
        """What is to be done about it."""
        inner = self.strip("[](){}<> ")
        between = "/" if _SLASHED.fullmatch(inner) else r"\||\bor\b"
        choices = [one.strip(" \"'") for one in re.split(between, inner)]
        if len(choices) < 2 or not all(choices):
            return "write the value"
        return f"choose {', '.join(choices[:-1])} or {choices[-1]}"


@dataclass(frozen=True)
class Place:
    """A place where a file is no JSON, or leaves a choice."""

    line: int
    key: str
    """With its blocks; empty where it is about no key."""
    text: str
    """What stands there, and what was taken."""
    remedy: str = ""
    is_choice: bool = False
    """The user must choose."""
    is_twice: bool = False
    """The key stood there before."""


class UnreadableError(ValueError):
    """The text cannot be read; the message names line and reason."""


class Reader:
    """Reads one text.

    Args:
        text: The file's.

    Attributes:
        places: What was found on the way, in the file's order.
        comments: Lines with comments.
    """

    def __init__(self, text: str) -> None:
        self.places: list[Place] = []
        self.comments: list[int] = []
        self._text, self._at = text, 0
        self._starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self._path: list[str] = []
        self._is_one_line = "\n" not in text.strip()
        self._is_bare = False
        """Blocks have no braces: their indentation tells them."""

    def read(self) -> Any:
        """Return what the text says.

        Raises:
            UnreadableError: it cannot be guessed.
            RecursionError: there are too many blocks in each other.
        """
        self._skip()
        if assigned := _ASSIGNED.match(self._text, self._at):
            self._note(f"{assigned[0].strip()} is read over")
            self._at = assigned.end()
        elif self._peek() not in ("{", "["):
            return self._without_braces()
        value = self._value()
        self._skip()
        rest = self._text[self._at :].strip()
        if rest not in ("", ";"):
            self._note(f"{short(rest)} after the end is read over")
        return value

    def _without_braces(self) -> Any:
        if _BEFORE_COLON.match(self._text, self._at):
            self._is_bare = True
            self._note("has no { } around it, and was taken as if it had")
            return self._members("", self._column())
        if (start := self._text.find("{", self._at)) < 0:
            with contextlib.suppress(ValueError):
                return json.loads(self._text)
            raise self._error("a configuration begins with {")
        self._note(f"{short(self._text[self._at : start].strip())} is read over")
        self._at = start
        return self.read()

    def _value(self) -> Any:
        first = self._peek()
        if call := _CALL.match(self._text, self._at):
            self._note("dict( ) was taken as { }")
            self._at = call.end()
            return self._members(")", -1)
        if match := _BRACKETED.match(self._text, self._at):
            self._at = match.end()
            return self._open(match[0])
        if first == "{":
            self._at += 1
            return self._members("}", -1)
        if first in ("[", "("):
            self._at += 1
            return self._elements("]" if first == "[" else ")")
        value = self._string() if first in _QUOTES else self._word()
        return self._with_rest(value)

    def _members(self, closer: str, column: int) -> dict[str, Any]:
        """Read ``key: value`` up to the closer, or up to a line that stands further left."""
        table: dict[str, Any] = {}
        lines: dict[str, int] = {}
        while not self._is_end(closer, "object") and (closer or self._column() >= column):
            if self._passes_over(has_keys=True):
                continue
            line, left = self._line(), self._column()
            name = self._key()
            self._path.append(name)
            value = self._value_of_key(left)
            if name in table:
                text = (
                    f"is given twice, on lines {lines[name]} and {line}: DeepSpeed refuses the "
                    f"file, others take the last; {short(json.dumps(table[name]))} was left out"
                )
                place = Place(line, ".".join(self._path), text, "leave one out", is_twice=True)
                self.places.append(place)
            table[name], lines[name] = value, line
            self._path.pop()
            self._comma(closer)
        return table

    def _value_of_key(self, left: int) -> Any:
        line = self._line()
        self._skip()
        if self._peek() in (":", "="):
            if self._peek() == "=":
                self._note("= was taken as :")
            self._at += 1
        else:
            self._note(f"no : after {self._path[-1]}, and was taken as there")
        self._skip()
        if self._is_bare and self._line() > line:
            if self._column() <= left:
                return None
            if self._text.startswith("- ", self._at):
                return self._dashes(self._column())
            if _BEFORE_COLON.match(self._text, self._at):
                return self._members("", self._column())
        return self._value()

    def _dashes(self, column: int) -> list[Any]:
        found = []
        while self._text.startswith("- ", self._at) and self._column() == column:
            self._at += 2
            self._skip()
            found.append(self._value())
            self._skip()
        return found

    def _elements(self, closer: str) -> list[Any]:
        found: list[Any] = []
        if closer == ")":
            self._note("( ) was taken as [ ]")
        while not self._is_end(closer, "list"):
            if self._passes_over():
                continue
            found.append(self._value())
            self._comma(closer)
        return found

    def _is_end(self, closer: str, what: str) -> bool:
        self._skip()
        first = self._peek()
        if first == "" and closer:
            self._note(f"{closer} is missing at the end, and was taken as there")
        if first == closer and closer:
            self._at += 1
        elif first in ("}", "]", ")") and not closer:
            self._note(f"{first} is read over")
            self._at += 1
            return self._is_end(closer, what)
        elif first in ("}", "]", ")"):
            raise self._error(f"{first} where no {what} began that it closes")
        return first in (closer, "")

    def _passes_over(self, has_keys: bool = False) -> bool:
        if self._peek() in (",", ";"):
            self._note(f"a spare {self._peek()} is read over")
            self._at += 1
            return True
        if has_keys and (mark := _MARK.match(self._text, self._at)):
            self._note(f"{mark[0].strip()} before a key is read over")
            self._at = mark.end()
            return True
        if dots := _DOTS.match(self._text, self._at):
            self._at = dots.end()
            self._note(f"{dots[0]} stands for more, which was left out", "add it", is_choice=True)
            if self._peek() == ",":
                self._at += 1
            return True
        return False

    def _comma(self, closer: str) -> None:
        end = self._at
        self._skip()
        if self._peek() in (",", ";"):
            if self._peek() == ";":
                self._note("; was taken as a comma")
            comma, self._at = self._at, self._at + 1
            self._skip()
            if self._peek() == closer and closer:
                after, self._at = self._at, comma
                self._note(f"a comma before {closer} is read over")
                self._at = after
        elif (
            self._peek() not in ("}", "]", ")", "")
            and closer
            and not _DOTS.match(self._text, self._at)
        ):
            after, self._at = self._at, end
            self._note("a comma is missing behind the value, and was taken as there")
            self._at = after

    def _key(self) -> str:
        if self._peek() in _QUOTES:
            return self._string()
        if match := _KEY.match(self._text, self._at):
            self._at = match.end()
            if not self._is_bare:
                self._note("a key without quotes was taken as if it had them")
            return match[0]
        line = self._text[self._at :].partition("\n")[0]
        raise self._error(f"{short(line)} where a key is due")

    def _string(self) -> str:
        quote = self._peek()
        end = re.compile(rf"((?:[^{_QUOTES[quote]}\\\n]|\\.)*){_QUOTES[quote]}")
        match = end.match(self._text, self._at + 1)
        if not match:
            raise self._error(f"{quote} has no second one on its line")
        if quote != '"':
            self._note(f"{quote} was taken as a quote of JSON")
        self._at = match.end()
        inner = match[1] if quote == '"' else match[1].replace("\\'", "'").replace('"', '\\"')
        try:
            return str(json.loads(f'"{inner}"', strict=False))
        except json.JSONDecodeError:
            return match[1]

    def _word(self) -> Any:
        """Read a value without quotes: a number, true, false, null, or what is none in JSON."""
        match = _WORDS.match(self._text, self._at)
        text = match[0].strip() if match else ""
        text = text.partition("(")[0].strip() or text
        if re.fullmatch(r"[\d.eE+-]+(\s+[\d.eE+-]+)+", text):  # numbers without commas
            text = text.split()[0]
        start, self._at = self._at, self._at + len(text)
        try:
            strict = json.loads(text)
        except ValueError:  # no JSON, or more digits than Python reads
            pass
        else:
            is_finite = not isinstance(strict, float) or math.isfinite(strict)
            return strict if is_finite else self._open(text, start)  # as 1e400 and NaN
        if text.lower() in _CONSTANTS:
            value: Any = _CONSTANTS[text.lower()]
        elif (number := number_of(text)) is not None:
            value = number
        elif self._is_text(text):
            value = text
        else:
            return self._open(text, start)
        self._note(f"{text} was taken as {json.dumps(value)}")
        return value

    def _is_text(self, text: str) -> bool:
        """Return whether a bare word is a text, and no name that stands for a value."""
        is_name = not self._is_bare and re.fullmatch("[A-Z_]+", text)
        is_word = re.fullmatch(r"[A-Za-z_./][\w./-]*", text) and text.strip(".")
        return bool(is_word) and not is_name and not _SLASHED.fullmatch(text)

    def _with_rest(self, value: Any) -> Any:
        """Return a value, or a placeholder where another one follows it on its line."""
        start = self._at
        rest = re.compile(r"""[ \t]*((?:\||or\b|/[^/*])[^,\]}\n#]*)""").match(self._text, start)
        if rest:
            self._at = rest.end()
            return self._open(f"{value if isinstance(value, str) else json.dumps(value)} {rest[1]}")
        is_pattern = any("pattern" in name for name in self._path)
        if isinstance(value, str) and _PLACEHOLDER.fullmatch(value) and not is_pattern:
            return value if isinstance(value, Placeholder) else self._open(value, start - 1)
        self._remark()
        return value

    def _remark(self) -> None:
        if match := re.compile(r"[ \t]*(\([^()\n]*\))").match(self._text, self._at):
            self._at = match.end()
            self._note(f"{match[1]} is read over")

    def _open(self, text: str, start: int | None = None) -> Placeholder:
        found = Placeholder(text if _PLACEHOLDER.fullmatch(text) else f"<{text or 'value'}>")
        stands = f"{text} stands for a value" if text else "a value is missing"
        line = self._line(start)
        place = Place(line, ".".join(self._path), stands, found.remedy, is_choice=True)
        self.places.append(place)
        self._remark()
        return found

    def _skip(self) -> None:
        while True:
            if match := _BLANK.match(self._text, self._at):
                self._at = match.end()
            elif match := _COMMENT.match(self._text, self._at):
                self.comments.append(self._line())
                self._at = self._end_of_comment(match)
            else:
                return

    def _end_of_comment(self, match: re.Match[str]) -> int:
        """Return where a comment ends; that of a text whose line ends are lost, at the next key."""
        if not self._is_one_line or not match[0].startswith(("//", "#")):
            return match.end()
        following = _NEXT_KEY.search(match[0])
        closers = re.search(r"[\]})\s]*\Z", match[0])
        end = following.start() if following else closers.start() if closers else match.end()
        rest = match[0][end:].strip()
        if rest:
            comment, sign = match[0][:end].strip(), match[0][: 1 + match[0].startswith("//")]
            self._note(f"{short(comment)} was taken to end before {short(rest)}, since no line "
                       f"ends behind {sign}")  # fmt: skip
        return match.start() + end

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _line(self, at: int | None = None) -> int:
        return bisect.bisect_right(self._starts, self._at if at is None else at)

    def _column(self) -> int:
        return self._at - self._starts[self._line() - 1]

    def _note(self, text: str, remedy: str = "", is_choice: bool = False) -> None:
        key = ".".join(self._path) if is_choice else ""
        self.places.append(Place(self._line(), key, text, remedy, is_choice))

    def _error(self, text: str) -> UnreadableError:
        return UnreadableError(f"line {self._line()}: {text}")


def number_of(text: str) -> int | float | None:
    """Return the finite number that a text spells; None where it spells none."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return None
    if number - number != 0:  # not finite
        return None
    return int(number) if number.is_integer() else number


def short(text: str) -> str:
    """Return a text as one line, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}..."
