"""Compressed files as plain ones."""

from __future__ import annotations

import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from dataset.errors import DatasetError
from dataset.readers.inputs import InputFile

BUFFER_BYTES = 1 << 20
# What the decompressors raise on a file that ends early or is not theirs.
DAMAGE = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile)


@dataclass(frozen=True)
class Stream:
    """An open file."""

    content: io.BufferedReader
    """Its text, decompressed; a read returns all it was asked for but at the end."""
    _file: BinaryIO

    def consumed_bytes(self) -> int:
        """How much of the file on disk was read so far."""
        return self._file.tell()


@contextmanager
def opened(source: InputFile) -> Iterator[Stream]:
    """Open a file for reading.

    Raises:
        DatasetError: While it is open: the file is cut off, damaged or otherwise compressed.
    """
    with ExitStack() as stack:
        file = stack.enter_context(source.path.open("rb"))
        try:
            content = stack.enter_context(_decompress(file, source))
            yield Stream(content, file)
        except DAMAGE as error:
            raise DatasetError(
                f"{source.path} is cut off or damaged ({error}): get it again"
            ) from error


def _decompress(file: io.BufferedReader, source: InputFile) -> io.BufferedReader:
    if source.compression == ".xz":
        return io.BufferedReader(cast("io.RawIOBase", lzma.open(file)), BUFFER_BYTES)
    if source.compression == ".gz":
        return io.BufferedReader(cast("io.RawIOBase", gzip.open(file)), BUFFER_BYTES)
    if source.compression == ".zst":
        return io.BufferedReader(_Zstandard(file), BUFFER_BYTES)
    return file


class _Zstandard(io.RawIOBase):
    """pyarrow's decompressor; the standard library has none before Python 3.14."""

    def __init__(self, file: BinaryIO) -> None:
        import pyarrow

        # It closes what it reads from, and reading ahead would blur how far it is.
        self._stream: Any = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - any writable buffer
        try:
            data = self._stream.read(len(buffer))
        except OSError as error:  # pyarrow's name for damage of any kind
            raise EOFError(str(error)) from error
        buffer[: len(data)] = data
        return len(data)
