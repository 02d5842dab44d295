"""Stretches of one file that can be parsed by themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from dataset.errors import DatasetError
from dataset.readers.inputs import InputFile
from dataset.readers.json_array import cut_array
from dataset.readers.parse import MAX_DOCUMENT_BYTES, Format, Piece, Place
from dataset.readers.streams import Stream

SampleBy = Literal["document", "paragraph", "line"]

SKIP_BYTES = 1 << 20
ROWS_AT_ONCE = 512
_BLANK = re.compile(rb"[ \t\r]*\n")


def cut(
    source: InputFile, stream: Stream, start: Place, size: int, sample_by: SampleBy
) -> Iterator[Piece]:
    """Cut JSON or text into pieces of about ``size`` bytes, beginning at ``start``.

    Where a piece ends depends only on where it starts, so that a later run cuts alike.

    Raises:
        DatasetError: One document is too large, or a JSON array is not one.
    """
    if source.kind == "jsonl":
        if stream.content.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            return cut_array(source.path, stream.content, start, size)
        return _cut_lines(source, stream, start, size, "json-lines")
    if sample_by == "line":
        return _cut_lines(source, stream, start, size, "text-lines")
    if sample_by == "paragraph":
        return _cut_lines(source, stream, start, size, "paragraphs")
    return _whole(source, stream, start)


def _cut_lines(
    source: InputFile, stream: Stream, start: Place, size: int, form: Format
) -> Iterator[Piece]:
    _skip(stream, start.offset)
    read_rest: Callable[[InputFile, Stream], bytes] = (
        _rest_of_paragraph if form == "paragraphs" else _rest_of_line
    )
    place = start
    while data := stream.content.read(size):
        data += read_rest(source, stream)
        end = Place(place.offset + len(data), place.line + data.count(b"\n"))
        yield Piece(form, data, place.line, end)
        place = end


def _skip(stream: Stream, num_bytes: int) -> None:
    if num_bytes and stream.content.seekable():
        stream.content.seek(num_bytes)  # compressed files read and drop
        return
    while num_bytes:
        dropped = len(stream.content.read(min(num_bytes, SKIP_BYTES)))
        num_bytes = num_bytes - dropped if dropped else 0


def _rest_of_line(source: InputFile, stream: Stream) -> bytes:
    rest = stream.content.readline(MAX_DOCUMENT_BYTES)
    if len(rest) == MAX_DOCUMENT_BYTES:
        raise DatasetError(f"{source.path}: a line of over {MAX_DOCUMENT_BYTES >> 20} MiB")
    return rest


def _rest_of_paragraph(source: InputFile, stream: Stream) -> bytes:
    lines = [_rest_of_line(source, stream)]
    num_bytes = len(lines[0])
    while (line := _rest_of_line(source, stream)) and num_bytes < MAX_DOCUMENT_BYTES:
        lines.append(line)
        num_bytes += len(line)
        if _BLANK.fullmatch(line):
            break
    return b"".join(lines)


def _whole(source: InputFile, stream: Stream, start: Place) -> Iterator[Piece]:
    if start.offset:
        return
    data = stream.content.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise DatasetError(
            f"{source.path}: over {MAX_DOCUMENT_BYTES >> 20} MiB as one document: "
            "give --sample-by paragraph or line"
        )
    if data:
        yield Piece("text", data, 1, Place(len(data), 1 + data.count(b"\n")))


def cut_rows(source: InputFile, start: Place, size: int, keys: Sequence[str]) -> Iterator[Piece]:
    """Cut a file into pieces of rows, about ``size`` bytes each, as Arrow's IPC stream.

    Raises:
        DatasetError: It is not Parquet, or lacks a column.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(source.path) as file:
            missing = [key for key in keys if key not in file.schema_arrow.names]
            if missing:
                raise DatasetError(
                    f"{source.path}: no column '{missing[0]}'; it has "
                    f"{', '.join(file.schema_arrow.names)}: give --json-keys"
                )
            held: list[pa.RecordBatch] = []
            row = 0
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=list(keys), use_threads=False):
                row += len(batch)
                if row <= start.offset:
                    continue
                held.append(batch)
                if sum(one.nbytes for one in held) >= size:
                    yield _rows_piece(held, row)
                    held = []
            if held:
                yield _rows_piece(held, row)
    except pa.ArrowException as error:
        raise DatasetError(f"{source.path} is damaged or not Parquet: {error}") from error


def _rows_piece(batches: Sequence[object], end_row: int) -> Piece:
    import pyarrow as pa

    table = pa.Table.from_batches(batches)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    first = end_row - table.num_rows + 1
    return Piece("arrow", sink.getvalue().to_pybytes(), first, Place(end_row, end_row + 1))
