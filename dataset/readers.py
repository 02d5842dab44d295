"""Files of the user's own text: found, unpacked, and cut into blocks for worker processes."""

from __future__ import annotations

import glob
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any, Literal, NamedTuple

from configs.files import printable
from configs.json_values import TooLargeError, begins_values, values
from dataset.files import DatasetError

SampleBy = Literal["document", "paragraph", "line"]
Form = Literal["json", "text", "row"]
Bad = tuple[int, int, str]
"""Number of the file, line, reason."""

KIND_BY_ENDING = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".parquet": "parquet",
}
COMPRESSIONS = (".xz", ".gz", ".zst")
# A document and its ids must fit in memory several times over.
MAX_DOCUMENT_BYTES = 256 << 20
READ_BYTES = 1 << 20
ROWS_AT_ONCE = 512
SHOWN_KEYS, SHOWN_KEY, SHOWN_VALUE = 12, 40, 60
INSTEAD = "; it has "
NESTED = ", whose text is inside: bring it to the top of the object"
# What the decompressors raise on a file that ends early or is not theirs; pyarrow's are OSError.
DAMAGE = (EOFError, lzma.LZMAError, zlib.error, OSError)

FEW_BAD = 5
"""Records of a file that may be no documents without a word of alarm, or their share if more."""
FEW_BAD_SHARE = 1e-3
# How packed and UTF-16 files begin, of which every line would be left out as a bad one.
NO_TEXT = (b"\x1f\x8b", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class InputFile:
    """One file to read."""

    path: Path  # absolute
    kind: str
    """``jsonl``, ``text`` or ``parquet``."""
    compression: str
    """Ending that says how it is packed, or nothing."""
    size_bytes: int
    modified_ns: int

    def damage(self, num_records: int, num_bad: int) -> str:
        """Say that more than a few of its records were no documents; else nothing."""
        if num_bad <= max(FEW_BAD, FEW_BAD_SHARE * num_records):
            return ""
        counts = f"{num_bad:,} of {num_records:,}"
        return f"{printable(str(self.path))}: {counts} records were no documents"


def find(
    patterns: Sequence[str], kind: str | None = None, flag: str = "--input"
) -> tuple[InputFile, ...]:
    """Resolve file names and globs, in the order given, each glob's files by name.

    Args:
        patterns: Names or globs; ``**`` crosses folders.
        kind: What the files are; by default their names tell.
        flag: Which option gave the names.

    Raises:
        DatasetError: Nothing matches, a file comes twice, is a folder, may not be read, or is of no
            known kind.
    """
    found: dict[Path, InputFile] = {}
    for pattern in patterns:
        for path in _matches(pattern, flag):
            file, real = _describe(path, kind, flag), path.resolve()
            if real in found:
                same = "" if found[real].path == path else f" as {found[real].path}"
                raise DatasetError(f"{flag} {pattern}: {path} was given before{same}: name it once")
            found[real] = file
    return tuple(found.values())


def _matches(pattern: str, flag: str) -> list[Path]:
    # A name with brackets in it is a name if there is such a file.
    names = [pattern]
    if not Path(pattern).exists():
        # Not Path.glob: it takes no absolute patterns.
        names = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
    if not names:
        raise DatasetError(f"{flag} {pattern}: no such file")
    paths = [Path(name).absolute() for name in names]
    if len(paths) > 1:
        paths = [path for path in paths if not path.is_dir()]
    if not paths or paths[0].is_dir():
        raise DatasetError(f"{flag} {pattern}: a folder; give its files: '{pattern}/*.jsonl'")
    return paths


def _describe(path: Path, kind: str | None, flag: str) -> InputFile:
    name = path.name.lower()
    compression = next((end for end in COMPRESSIONS if name.endswith(end)), "")
    ending = Path(name.removesuffix(compression)).suffix
    known = kind or KIND_BY_ENDING.get(ending)
    if known is None:
        raise DatasetError(
            f"{flag} {path}: what is in it? The name ends in none of "
            f"{', '.join(KIND_BY_ENDING)} (then .xz, .gz or .zst)"
            + (": give --input-format" if flag == "--input" else "")
        )
    if known == "parquet" and compression:
        raise DatasetError(f"{flag} {path}: Parquet compresses inside: unpack the {compression}")
    try:
        facts = path.stat()
    except OSError as error:  # of a link, as a rule
        raise DatasetError(f"{flag} {path}: leads to no file: {error.strerror}") from error
    if not S_ISREG(facts.st_mode):
        raise DatasetError(
            f"{flag} {path}: a pipe or device, but input is read more than once: write it to a file"
        )
    if not os.access(path, os.R_OK):
        raise DatasetError(f"{flag} {path}: you may not read it: ask its owner, or `chmod +r` it")
    return InputFile(path, known, compression, facts.st_size, facts.st_mtime_ns)


class Raw(NamedTuple):
    """One record that nobody has looked into yet."""

    line: int
    """Its first line, which values of an array may share; of Parquet the row, from 1."""
    form: Form
    content: Any
    """Bytes; of a ``row``, its fields."""
    size_bytes: int
    """About how much text it is."""


@contextmanager
def opened(source: InputFile) -> Iterator[tuple[io.BufferedReader[Any], io.BufferedReader[Any]]]:
    """Open a file: its contents, decompressed, and the file on disk.

    Raises:
        DatasetError: While it is open: the file is cut off, damaged or otherwise compressed.
    """
    with io.BufferedReader(io.FileIO(source.path), READ_BYTES) as file:
        is_plain = source.kind != "parquet" and not source.compression
        if is_plain and file.peek(8).startswith(NO_TEXT):
            raise DatasetError(
                f"{source.path}: packed or UTF-16, but its name does not say so: end it in .gz, "
                ".xz or .zst, or convert it with `iconv -t UTF-8`"
            )
        try:
            yield _decompressed(file, source.compression), file
        except DAMAGE as error:
            raise DatasetError(
                f"{source.path} is cut off or damaged ({error}): get it again"
            ) from error


def _decompressed(file: io.BufferedReader[Any], compression: str) -> io.BufferedReader[Any]:
    raw: Any
    if compression == ".xz":
        raw = lzma.open(file)  # noqa: SIM115 - closed with the file below it
    elif compression == ".gz":
        raw = gzip.open(file)  # noqa: SIM115 - closed with the file below it
    elif compression == ".zst":  # the standard library has it from Python 3.14 on
        import pyarrow

        raw = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")
    else:
        return file
    return io.BufferedReader(raw, READ_BYTES)


def records(
    source: InputFile, stream: io.BufferedReader[Any], keys: tuple[str, ...], sample_by: SampleBy
) -> Iterator[Raw]:
    """Yield the records of an open file; blank lines are none.

    Raises:
        DatasetError: A document is too large, or the file is not what its name says.
    """
    if source.kind == "parquet":
        return _rows(source, stream, keys)
    if source.kind == "jsonl":
        is_array = begins_values(stream.peek(READ_BYTES))
        return _values(source, stream) if is_array else _json_lines(source, stream)
    if sample_by == "line":
        return _text_lines(source, stream)
    return _paragraphs(source, stream) if sample_by == "paragraph" else _whole(source, stream)


def _all_lines(source: InputFile, stream: io.BufferedReader[Any]) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := stream.readline(MAX_DOCUMENT_BYTES + 1):
        number += 1
        if len(line) > MAX_DOCUMENT_BYTES:
            raise _too_large(source, str(number), "a line of ", ": take it out")
        yield number, line.removesuffix(b"\n")


def _json_lines(source: InputFile, stream: io.BufferedReader[Any]) -> Iterator[Raw]:
    for number, line in _all_lines(source, stream):
        if line and not line.isspace():
            yield Raw(number, "json", line, len(line))


def _values(source: InputFile, stream: io.BufferedReader[Any]) -> Iterator[Raw]:
    try:
        for line, value in values(stream, MAX_DOCUMENT_BYTES, READ_BYTES):
            yield Raw(line, "json", value, len(value))
    except TooLargeError as error:
        raise _too_large(source, str(error), "a value of ", ": take it out") from None


def _all_text_lines(
    source: InputFile, stream: io.BufferedReader[Any]
) -> Iterator[tuple[int, bytes]]:
    """Lines of a text, that end as on any system: at LF, at CR LF or at CR alone."""
    number = 0
    for _, line in _all_lines(source, stream):
        for one in line.rstrip(b"\r").split(b"\r"):
            number += 1
            yield number, one


def _text_lines(source: InputFile, stream: io.BufferedReader[Any]) -> Iterator[Raw]:
    for number, line in _all_text_lines(source, stream):
        if line and not line.isspace():
            yield Raw(number, "text", line, len(line))


def _paragraphs(source: InputFile, stream: io.BufferedReader[Any]) -> Iterator[Raw]:
    held: list[bytes] = []
    first = size = 0
    for number, line in _all_text_lines(source, stream):
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


def _whole(source: InputFile, stream: io.BufferedReader[Any]) -> Iterator[Raw]:
    data = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise _too_large(source, "", "as one document ", ": give --sample-by paragraph or line")
    if data and not data.isspace():
        yield Raw(1, "text", data, len(data))


def _too_large(source: InputFile, where: str, what: str, advice: str = "") -> DatasetError:
    place = f"{source.path}:{where}" if where else str(source.path)
    return DatasetError(f"{place}: {what}over {MAX_DOCUMENT_BYTES >> 20} MiB{advice}")


def _rows(
    source: InputFile, stream: io.BufferedReader[Any], keys: tuple[str, ...]
) -> Iterator[Raw]:
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
                    yield Raw(row, "row", fields, batch.nbytes // len(batch))
    except pa.ArrowException as error:
        raise DatasetError(f"{source.path} is damaged or not Parquet: {error}") from error


@dataclass(frozen=True)
class Record:
    """One record: an object of JSON, a row, a text."""

    line: int
    fields: dict[str, Any]
    texts: dict[str, list[str]]
    """By key: the document's sequences, one unless the file has it split into sentences."""


def parse(line: int, form: Form, content: Any, keys: Sequence[str]) -> Record | str:
    """Return the texts of a raw record, or why it cannot be used.

    A plain text is that of the first key.
    """
    fields = content
    try:
        if form != "row":
            text = content.decode("utf-8-sig" if line == 1 else "utf-8")
            if form == "text":
                keys = keys[:1]
            fields = json.loads(text) if form == "json" else {keys[0]: text}
    except UnicodeDecodeError as error:
        return f"not UTF-8: {error.reason} at byte {error.start}"
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    if not isinstance(fields, dict):
        return f"not an object but {type(fields).__name__}"
    for key in keys:
        if reason := _wrong(key, fields):
            return reason
    values = {key: fields[key] for key in keys}
    return Record(line, fields, {k: v if isinstance(v, list) else [v] for k, v in values.items()})


def _wrong(key: str, fields: dict[str, Any]) -> str:
    """Return why the value under a key is no text; empty when it is one."""
    if key not in fields:
        return f"no key '{key}'{_keys_there(fields)}"
    value = fields[key]
    for sequence in value if isinstance(value, list) else [value]:
        if not isinstance(sequence, str):
            return f"'{key}' is not text but {type(sequence).__name__}"
        try:
            # isascii is free; only other text can hold half of a pair.
            sequence.isascii() or sequence.encode()
        except UnicodeEncodeError:
            return f"'{key}' holds half of a surrogate pair"
    return ""


def _keys_there(fields: dict[str, Any]) -> str:
    """Say which keys an object has instead, and what stands under the likeliest one."""
    if not fields:
        return f"{INSTEAD}nothing"
    keys = ", ".join(_cut(key, SHOWN_KEY) for key in list(fields)[:SHOWN_KEYS])
    more = ", ..." if len(fields) > SHOWN_KEYS else ""
    texts = {k: v if isinstance(v, str) else json.dumps(v, default=str) for k, v in fields.items()}
    # An identifier beside a list of messages is not what is looked for.
    shown = max(texts, key=lambda key: len(texts[key]))
    value = texts[shown]
    nested = NESTED if isinstance(fields[shown], dict | list) else ""
    return f"{INSTEAD}{keys}{more} ({_cut(shown, SHOWN_KEY)}: {_cut(value, SHOWN_VALUE)}){nested}"


def _cut(text: str, most: int) -> str:
    """A text as one line, its end left out."""
    line = printable(" ".join(text[: 2 * most].split()))
    return line if len(text) <= most and len(line) <= most else f"{line[:most]}..."


@dataclass(frozen=True)
class Block:
    """Records that a worker takes at once."""

    number: int
    raw: list[tuple[int, int, Form, bytes | object]]
    """Number of the file, line, form and contents of each record."""
    consumed_bytes: int
    """Bytes of the files on disk, up to the end of this block."""

    def records(self, keys: tuple[str, ...], bad: list[Bad]) -> Iterator[Record]:
        """Yield the records that can be used, and add the others to ``bad``."""
        for file, line, form, content in self.raw:
            found = parse(line, form, content, keys)
            if isinstance(found, str):
                bad.append((file, line, found))
            else:
                yield found


@dataclass(frozen=True)
class Reading:
    """A way to read files; the same reading gives the same blocks."""

    files: tuple[InputFile, ...]
    keys: tuple[str, ...] = ("text",)
    sample_by: SampleBy = "document"
    block_bytes: int = 4 << 20
    """Text from which a block is full."""

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all files on disk."""
        return sum(file.size_bytes for file in self.files)

    def words(self, bad: Bad) -> str:
        """Say which record cannot be used and why, as the user finds it."""
        file, line, reason = bad
        return f"{printable(str(self.files[file].path))}:{line}: {reason}"

    def explained(self, bad: Bad) -> tuple[str, str]:
        """Return :meth:`words` in two: what is wrong, and the keys that are there instead."""
        wrong, instead, keys = self.words(bad).rpartition(INSTEAD)
        return (wrong, instead + keys) if instead else (keys, "")


def blocks(reading: Reading) -> Generator[Block, None, None]:
    """Yield all blocks; small files share one."""
    number = held_bytes = before = 0
    held: list[tuple[int, int, Form, bytes | object]] = []
    for index, file in enumerate(reading.files):
        with opened(file) as (stream, on_disk):
            for line, form, content, size in records(file, stream, reading.keys, reading.sample_by):
                held.append((index, line, form, content))
                held_bytes += size
                if held_bytes >= reading.block_bytes:
                    yield Block(number, held, before + min(on_disk.tell(), file.size_bytes))
                    number, held, held_bytes = number + 1, [], 0
        before += file.size_bytes
    if held:
        yield Block(number, held, before)
