"""Lines in an order that a seed decides, however many: they need not fit into memory."""

from __future__ import annotations

import gzip
import random
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dataset.files import DatasetError, Progress, locked, require_writable, writing
from dataset.readers import InputFile, opened, records

# Text packs to a third or a quarter; what it unpacks to is not known before.
UNPACKED_RATIO = 5
# Lists and objects beside the text of a pile, and piles that come out larger than others.
HEADROOM = 2
MOST_PILES = 512  # of open files, a process often may have 1024
KEY_BITS = 64
UTF8_MARK = b"\xef\xbb\xbf"
_HEAD = struct.Struct("<QI")


def shuffle(files: Sequence[InputFile], output: Path, seed: int, memory_bytes: int) -> int:
    """Write the lines of files in a random order: the same for the same input and seed.

    Every line draws a key, and lines are sorted by their keys: first into piles on disk, each of
    the next keys, then each pile in memory. So memory decides the number of piles and not the
    order.

    Args:
        files: JSON lines, or text files with a record a line; blank lines are none.
        output: File to write, packed when it ends in ``.gz``; must not exist.
        seed: Decides the order.
        memory_bytes: About what may be held at once; more only when the input is over 512 times
            as large.

    Returns:
        Lines written.

    Raises:
        DatasetError: A file is in the way, damaged, or not of lines.
    """
    kinds = {file.kind for file in files}
    if kinds - {"jsonl", "text"} or len(kinds) > 1:
        raise DatasetError(
            "--input: shuffle takes JSON lines alone or text files with a record a line alone"
        )
    if output.exists():
        raise DatasetError(f"--output: {output} is there already; give another name")
    require_writable(output, "--output")
    expected = sum(f.size_bytes * (UNPACKED_RATIO if f.compression else 1) for f in files)
    num_piles = min(MOST_PILES, 1 + HEADROOM * expected // memory_bytes)
    folder = output.with_name(f".unfinished-{output.name}.piles")
    with locked(folder, drop_empty=True):
        try:
            num_lines = _pile_up(files, folder, num_piles, random.Random(seed))
            draft = folder / "sorted.pile"
            with writing(output), ExitStack() as stack:
                file: Any = stack.enter_context(draft.open("wb"))
                if output.suffix == ".gz":
                    # Neither a time nor the draft's name: equal contents are to give equal files.
                    file = stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0))
                for pile in range(num_piles):
                    for _, line in sorted(_read(folder / f"{pile}.pile"), key=lambda one: one[0]):
                        file.write(line + b"\n")
            draft.replace(output)
        finally:
            for path in folder.glob("*.pile"):
                path.unlink()
    return num_lines


def _pile_up(files: Sequence[InputFile], folder: Path, num_piles: int, rng: random.Random) -> int:
    progress = Progress("shuffling", sum(file.size_bytes for file in files))
    num_lines = before = 0
    with writing(folder), ExitStack() as stack:
        piles = [stack.enter_context((folder / f"{n}.pile").open("wb")) for n in range(num_piles)]
        for source in files:
            with opened(source) as (stream, on_disk):
                for raw in records(source, stream, (), "line"):
                    if raw.form == "object":
                        raise DatasetError(f"--input {source.path}: a JSON array, not lines")
                    key = rng.getrandbits(KEY_BITS)
                    pile = piles[key * num_piles >> KEY_BITS]
                    # A mark of UTF-8 begins files, not lines in the middle of one.
                    line = raw.content.removeprefix(UTF8_MARK if raw.line == 1 else b"")
                    pile.write(_HEAD.pack(key, len(line)) + line)
                    num_lines += 1
                    if num_lines % 1000 == 0:
                        done = before + min(on_disk.tell(), source.size_bytes)
                        progress.reach(done, f"{num_lines:,} lines")
            before += source.size_bytes
    progress.close()
    return num_lines


def _read(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        while head := file.read(_HEAD.size):
            key, length = _HEAD.unpack(head)
            yield key, file.read(length)
