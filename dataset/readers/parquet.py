"""Parquet files, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dataset.errors import DatasetError
from dataset.readers.inputs import InputFile
from dataset.readers.places import Piece, Place

ROWS_AT_ONCE = 512


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
                    yield _piece(held, row)
                    held = []
            if held:
                yield _piece(held, row)
    except pa.ArrowException as error:
        raise DatasetError(f"{source.path} is damaged or not Parquet: {error}") from error


def _piece(batches: Sequence[object], end_row: int) -> Piece:
    import pyarrow as pa

    table = pa.Table.from_batches(batches)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    first = end_row - table.num_rows + 1
    return Piece("arrow", sink.getvalue().to_pybytes(), first, Place(end_row, end_row + 1))
