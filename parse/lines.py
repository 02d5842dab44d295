"""Lines of a log, however it is packed. Standard library alone."""

from __future__ import annotations

import hashlib
import io
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from configs.json_values import TooLargeError, values
from parse.prefix import split_prefix
from parse.records import LogError

if TYPE_CHECKING:
    from bz2 import BZ2File
    from gzip import GzipFile
    from lzma import LZMAFile

MAX_LINE_CHARACTERS = 1 << 16
"""A longer line counts as cut off there."""
PACKED_ENDINGS = (".gz", ".xz", ".bz2", ".zst")
STATE_NAME, PROGRESS_NAME = "trainer_state.json", "trainer_log.jsonl"
"""Files that Hugging Face's Trainer and LLaMA-Factory write beside a log."""
_HEAD_BYTES = 1 << 16
_MAX_ENTRY_CHARACTERS = 1 << 20
_HISTORY = re.compile(rb'^(?:\xef\xbb\xbf)?\s*\{.*?"log_history"\s*:\s*\[', re.DOTALL)
"""The beginning of the trainer's state, up to its list of what was logged."""
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


class Line(NamedTuple):
    """One line of a log."""

    number: int
    """Position in the file, from 1."""
    text: str
    """Without its end and its source, and with a space for every colour code."""
    cut: bool
    """True where the file ends inside the line, or it is longer than any."""
    source: str = ""
    """The prefix of the host and the rank that printed it; empty where it has none."""


def plain_name(path: Path) -> str:
    """Return the name of a log without the ending that says how it is packed."""
    ending = path.suffix if path.suffix in PACKED_ENDINGS else ""
    return path.name.removesuffix(ending)


def is_log_name(path: Path) -> bool:
    """Return whether a file is a log by its name, in a folder that is searched for logs."""
    name = plain_name(path)
    return name.endswith(".log") or name in (STATE_NAME, PROGRESS_NAME)


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the lines of a log, never holding more than one.

    Lines end at LF, CR LF or CR (a progress bar's). What is packed is unpacked; where it is damaged
    or cut off it ends. Of a trainer's state, each object of its ``log_history`` is a line.

    Raises:
        LogError: there is no file that can be read, or it is UTF-16.
    """
    number = 0
    try:
        with _opened(path) as file:
            head = file.peek(_HEAD_BYTES)
            if head.startswith(_UTF_16):
                raise LogError(f"{path}: is UTF-16 text; convert it to UTF-8")
            if history := _HISTORY.match(head):
                before = file.read(history.end()).count(b"\n")
                yield from _entries(file, before)
                return
            with io.TextIOWrapper(file, encoding="utf-8", errors="replace") as text_file:
                for number, line in enumerate(text_file, 1):
                    yield _line(number, line)
    except FileNotFoundError:
        raise LogError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise LogError(f"{path}: cannot be read: is a folder; give a log") from None
    except _Damaged as error:
        if not number:
            raise LogError(f"{path}: is damaged: {error}; get it again") from None
        yield Line(number + 1, "", True)
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror}") from None


class Digest:
    """What a log says, in short: of all lines but blank ones at its end, whatever ends them."""

    def __init__(self) -> None:
        self._found, self._blank = hashlib.sha256(), 0

    def add(self, line: Line) -> None:
        """Take the next line."""
        if text := (line.source + line.text).rstrip():
            self._found.update(b"\n" * (self._blank + 1) + text.encode(errors="replace"))
            self._blank = 0
        else:
            self._blank += 1

    def __str__(self) -> str:
        """Return the SHA-256 in hexadecimal."""
        return self._found.hexdigest()


def _line(number: int, line: str) -> Line:
    text = line[:MAX_LINE_CHARACTERS].removesuffix("\n")
    if "\x1b" in text:
        text = _COLOUR.sub(" ", text)
    is_whole = line.endswith("\n") and len(line) <= MAX_LINE_CHARACTERS
    source, text = split_prefix(text)
    return Line(number, text, not is_whole, source)


def _entries(file: io.BufferedReader[Any], before: int) -> Iterator[Line]:
    """The objects of a list, and what is left of a damaged one, up to the list's end."""
    try:
        for number, value in values(file, _MAX_ENTRY_CHARACTERS, _HEAD_BYTES):
            text = " ".join(value.decode(errors="replace").split())
            if not text.startswith("{"):
                return
            yield Line(before + number, text, not text.endswith("}"))
    except TooLargeError as error:
        yield Line(before + int(str(error)), "", True)


class _Damaged(Exception):
    """Packed contents that end early or are not theirs; the message says so."""


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader[Any]]:
    """Open a file; what it begins with tells how it is packed, whatever its name says."""
    with io.BufferedReader(io.FileIO(path), _HEAD_BYTES) as file:
        unpacked = _unpacked(file, path)
        if unpacked is not None:
            with io.BufferedReader(_Checked(unpacked), _HEAD_BYTES) as buffered:
                if path.suffix in PACKED_ENDINGS or _has_contents(buffered):
                    yield buffered
                    return
            file.seek(0)
        yield file


def _unpacked(file: io.BufferedReader[Any], path: Path) -> GzipFile | LZMAFile | BZ2File | None:
    head = file.peek(8)
    if head.startswith(b"\x1f\x8b"):
        import gzip

        return gzip.open(file)
    if head.startswith(b"\xfd7zXZ\x00"):
        import lzma

        return lzma.open(file)
    if head.startswith(b"BZh"):
        import bz2

        return bz2.open(file)
    if path.suffix == ".zst":
        raise LogError(f"{path}: is packed by zstd; unpack it with `zstd -d`")
    return None


def _has_contents(buffered: io.BufferedReader[Any]) -> bool:
    """Tell a packed file from a text that happens to begin like one."""
    try:
        return bool(buffered.peek(1))
    except _Damaged:
        return False


class _Checked(io.RawIOBase):
    """Reads what is packed; every way to say that it is damaged is :class:`_Damaged`."""

    def __init__(self, unpacked: GzipFile | LZMAFile | BZ2File) -> None:
        super().__init__()
        self._unpacked = unpacked

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        import lzma

        try:
            data = self._unpacked.read1(len(buffer))
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            raise _Damaged(str(error)) from None
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._unpacked.close()
        super().close()
