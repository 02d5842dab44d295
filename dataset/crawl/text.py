"""A page's bytes to its text."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser

from dataset.errors import DatasetError

# The second is what the first needs of lxml, which older versions of pip leave out.
LIBRARIES = "trafilatura==2.3.1 lxml_html_clean==0.4.6"
# Not what a reader reads, or not of this page alone.
LEFT_OUT = frozenset(
    ("head", "script", "style", "noscript", "template", "svg", "iframe", "object", "nav", "footer",
     "aside", "form", "button", "select", "textarea")
)  # fmt: skip
IN_A_LINE = frozenset(
    ("a", "abbr", "b", "bdi", "bdo", "cite", "code", "data", "dfn", "em", "font", "i", "ins", "kbd",
     "label", "mark", "q", "s", "samp", "small", "span", "strong", "sub", "sup", "time", "tt", "u",
     "var", "wbr", "del", "big", "img")
)  # fmt: skip
_HEADER_CHARSET = re.compile(r"charset\s*=\s*[\"']?([\w.:-]+)", re.IGNORECASE)
_META_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset\s*=\s*[\"']?([\w.:-]+)", re.IGNORECASE)
_META_BYTES = 4096

Extract = Callable[[str], str]


def extractor(name: str) -> Extract:
    """What makes a page's text: ``article`` leaves menus and adverts out, ``visible`` little.

    Raises:
        DatasetError: Its library is missing.
    """
    if name == "visible":
        return visible_text
    try:
        import trafilatura  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        reason = str(error).partition("\n")[0]
        raise DatasetError(
            f"--extract article needs the package trafilatura ({reason}): pip install {LIBRARIES}; "
            "--extract visible needs none, and leaves more of menus and adverts in"
        ) from error
    return lambda page: trafilatura.extract(page, include_comments=False) or ""


def decoded(body: bytes, content_type: str) -> str:
    """A page as text, by the charset that the server tells, else the page, else a guess."""
    found = _HEADER_CHARSET.search(content_type)
    meta = _META_CHARSET.search(body[:_META_BYTES])
    named = [found[1]] if found else []
    named += [meta[1].decode("ascii", "replace")] if meta else []
    for charset in ("utf-8-sig", *named) if body.startswith(b"\xef\xbb\xbf") else (*named, "utf-8"):
        try:
            return body.decode(charset)
        except (LookupError, ValueError):  # no such charset, or not that
            continue
    from charset_normalizer import from_bytes

    guess = from_bytes(body).best()
    return str(guess) if guess else body.decode("utf-8", "replace")


def visible_text(page: str) -> str:
    """The text of a page without its head, scripts, forms and what is marked as navigation."""
    reader = _Visible()
    reader.feed(page)
    reader.close()
    lines = (" ".join(line.split()) for line in "".join(reader.pieces).split("\n"))
    return "\n".join(line for line in lines if line)


class _Visible(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self._left_out: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "body":
            self._left_out.clear()  # a head that was not closed
        elif tag in LEFT_OUT:
            self._left_out.append(tag)
        self._break_before(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._left_out:
            # What was not closed inside ends with it.
            del self._left_out[self._left_out.index(tag) :]
        self._break_before(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self._break_before(tag)

    def handle_data(self, data: str) -> None:
        if not self._left_out:
            self.pieces.append(data.replace("\n", " "))

    def _break_before(self, tag: str) -> None:
        if tag not in IN_A_LINE:
            self.pieces.append("\n")
