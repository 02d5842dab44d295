"""An input file as raw records, however it is packed."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from dataset.errors import DatasetError
from dataset.readers.inputs import InputFile

SampleBy = Literal["document", "paragraph", "line"]
Form = Literal["json", "text", "object"]

# A document and its ids must fit in memory several times over.
MAX_DOCUMENT_BYTES = 256 << 20
READ_BYTES = 1 << 20
ROWS_AT_ONCE = 512
# What the decompressors raise on a file that ends early or is not theirs; pyarrow's are OSError.
DAMAGE = (EOFError, lzma.LZMAError, zlib.error, OSError)
# How files begin that are no UTF-8, and what to do with them.
NO_TEXT = {
    b"\x1f\x8b": "is packed, but its name does not say so: rename it to end in .gz",
    b"\xfd7zXZ": "is packed, but its name does not say so: rename it to end in .xz",
    b"\x28\xb5\x2f\xfd": "is packed, but its name does not say so: rename it to end in .zst",
    b"\xff\xfe": "is UTF-16, not UTF-8: convert it with `iconv -f UTF-16 -t UTF-8`",
    b"\xfe\xff": "is UTF-16, not UTF-8: convert it with `iconv -f UTF-16 -t UTF-8`",
}
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


class Raw(NamedTuple):
    """One record that nobody has looked into yet."""

    line: int
    """Its first line; the element or row, from 1, where there are no lines."""
    form: Form
    content: Any
    """Bytes; of an ``object``, the value that stands for the array's element or the row."""
    size_bytes: int
    """About how much text it is."""


@contextmanager
def opened(source: InputFile) -> Iterator[tuple[io.BufferedReader, BinaryIO]]:
    """Open a file: its contents, decompressed, and the file on disk.

    Raises:
        DatasetError: While it is open: the file is cut off, damaged or otherwise compressed.
    """
    with source.path.open("rb") as file:
        if source.kind != "parquet" and not source.compression:
            _require_text(source.path, file.peek(8))
        try:
            yield _decompressed(file, source.compression), file
        except DAMAGE as error:
            raise DatasetError(
                f"{source.path} is cut off or damaged ({error}): get it again"
            ) from error


def _require_text(path: Path, start: bytes) -> None:
    """Refuse what no line of can be used: it would be left out as one bad line."""
    for mark, advice in NO_TEXT.items():
        if start.startswith(mark):
            raise DatasetError(f"{path}: {advice}")


def _decompressed(file: io.BufferedReader, compression: str) -> io.BufferedReader:
    raw: Any
    if compression == ".xz":
        raw = lzma.open(file)  # noqa: SIM115 - closed with the file below it
    elif compression == ".gz":
        raw = gzip.open(file)  # noqa: SIM115
    elif compression == ".zst":  # the standard library has it from Python 3.14 on
        import pyarrow

        raw = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")
    else:
        return file
    return io.BufferedReader(raw, READ_BYTES)


def records(
    source: InputFile, stream: io.BufferedReader, keys: tuple[str, ...], sample_by: SampleBy
) -> Iterator[Raw]:
    """Yield the records of an open file; blank lines are none.

    Raises:
        DatasetError: A document is too large, or the file is not what its name says.
    """
    if source.kind == "parquet":
        return _rows(source, stream, keys)
    if source.kind == "jsonl":
        if stream.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            return _elements(source, stream)
        return _lines(source, stream, "json", b"")
    if sample_by == "line":
        return _lines(source, stream, "text", b"\r")
    return _paragraphs(source, stream) if sample_by == "paragraph" else _whole(source, stream)


def _all_lines(source: InputFile, stream: io.BufferedReader) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := stream.readline(MAX_DOCUMENT_BYTES + 1):
        number += 1
        if len(line) > MAX_DOCUMENT_BYTES:
            raise _too_large(source, str(number), "a line of ", ": take it out")
        yield number, line.removesuffix(b"\n")


def _lines(source: InputFile, stream: io.BufferedReader, form: Form, end: bytes) -> Iterator[Raw]:
    for number, line in _all_lines(source, stream):
        if line and not line.isspace():
            yield Raw(number, form, line.removesuffix(end), len(line))


def _paragraphs(source: InputFile, stream: io.BufferedReader) -> Iterator[Raw]:
    held: list[bytes] = []
    first = size = 0
    for number, line in _all_lines(source, stream):
        if line and not line.isspace():
            first = first if held else number
            held.append(line)
            size += len(line)
            if size > MAX_DOCUMENT_BYTES:
                raise _too_large(source, str(first), "a paragraph of ", ": take it out")
        elif held:
            yield Raw(first, "text", b"\n".join(held), size)
            held, size = [], 0
    if held:
        yield Raw(first, "text", b"\n".join(held), size)


def _whole(source: InputFile, stream: io.BufferedReader) -> Iterator[Raw]:
    data = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise _too_large(source, "", "as one document ", ": give --sample-by paragraph or line")
    if data and not data.isspace():
        yield Raw(1, "text", data, len(data))


def _too_large(source: InputFile, where: str, what: str, advice: str = "") -> DatasetError:
    place = f"{source.path}:{where}" if where else str(source.path)
    return DatasetError(f"{place}: {what}over {MAX_DOCUMENT_BYTES >> 20} MiB{advice}")


def _rows(source: InputFile, stream: io.BufferedReader, keys: tuple[str, ...]) -> Iterator[Raw]:
    import pyarrow as pa
    from pyarrow import parquet

    row = 0
    try:
        with parquet.ParquetFile(stream) as file:
            missing = [key for key in keys if key not in file.schema_arrow.names]
            if missing:
                raise DatasetError(
                    f"{source.path}: no column '{missing[0]}'; it has "
                    f"{', '.join(file.schema_arrow.names)}: give --json-keys"
                )
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=list(keys), use_threads=False):
                for fields in batch.to_pylist():
                    row += 1
                    yield Raw(row, "object", fields, batch.nbytes // len(batch))
    except pa.ArrowException as error:
        raise DatasetError(f"{source.path} is damaged or not Parquet: {error}") from error


def _elements(source: InputFile, content: BinaryIO) -> Iterator[Raw]:
    """Yield the elements of a JSON array, numbered from 1.

    Raises:
        DatasetError: It is not JSON, or not closed. Nothing after such a place can be trusted, so
            there is no skipping it.
    """
    window, count = _Window(content), 0
    try:
        if window.next_mark() != "[":
            raise ValueError("it does not begin with [")
        mark = window.next_mark(skip=1)
        while mark != "]":
            value, size = window.next_value()
            count += 1
            yield Raw(count, "object", value, size)
            mark = window.next_mark()
            if mark == ",":
                window.next_mark(skip=1)
            elif mark != "]":
                raise ValueError("neither , nor ] follows it" if mark else "the file ends")
        if window.next_mark(skip=1):
            raise ValueError("something follows the closing ]")
    except (ValueError, RecursionError) as error:  # of JSON or of UTF-8
        raise DatasetError(
            f"{source.path}: not a JSON array after element {count}: {error}; mend it or write one "
            "object a line"
        ) from error


class _Window:
    """The part of the file that is being looked at, decoded."""

    def __init__(self, content: BinaryIO) -> None:
        self._content = content
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._text = ""
        self._at = 0

    def _more(self) -> bool:
        """Drop what was used and read on; False at the end of the file."""
        data = self._content.read(READ_BYTES)
        self._text = self._text[self._at :] + self._decoder.decode(data, final=not data)
        self._at = 0
        return bool(data)

    def next_mark(self, skip: int = 0) -> str:
        """Leave out ``skip`` characters and white space; the character then, empty at the end."""
        self._at += skip
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def next_value(self) -> tuple[Any, int]:
        """The value that begins here, and its length in characters."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError:
                # Cut off here, or wrong: only more of the file can tell.
                if len(self._text) - self._at > MAX_DOCUMENT_BYTES or not self._more():
                    raise
                continue
            if end == len(self._text) and self._more():
                continue  # a number could go on
            size, self._at = end - self._at, end
            return value, size
