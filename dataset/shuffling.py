"""Lines in an order that a seed decides, however many: they need not fit into memory."""

from __future__ import annotations

import gzip
import random
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dataset.files import DatasetError, locked, require_writable, writing
from dataset.readers import InputFile, opened, records

PILE_BYTES = 32 << 20
MOST_PILES = 256
"""Open files, of which a process may often have 1024; memory holds one pile."""
UTF8_MARK = b"\xef\xbb\xbf"


def shuffle(files: Sequence[InputFile], output: Path, seed: int) -> int:
    """Write the lines of files in a random order: the same for the same input and seed.

    Every line is dealt to one of at most 256 piles on disk; then each pile is shuffled in memory,
    which gives every order the same chance.

    Args:
        files: JSON lines, or text files with a record a line; blank lines are none.
        output: File to write, packed when it ends in ``.gz``; must not exist.
        seed: Decides the order.

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
    folder, rng = output.with_name(f".unfinished-{output.name}.piles"), random.Random(seed)
    num_piles = min(MOST_PILES, 1 + sum(file.size_bytes for file in files) // PILE_BYTES)
    with locked(folder, drop_empty=True):
        try:
            num_lines = _deal(files, folder, num_piles, rng)
            draft = folder / "sorted.pile"
            with writing(output), ExitStack() as stack:
                file: Any = stack.enter_context(draft.open("wb"))
                if output.suffix == ".gz":
                    # Neither a time nor the draft's name: equal contents are to give equal files.
                    file = stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0))
                for pile in range(num_piles):
                    with (folder / f"{pile}.pile").open("rb") as written:
                        lines = list(written)
                    rng.shuffle(lines)
                    file.writelines(lines)
            draft.replace(output)
        finally:
            for path in folder.glob("*.pile"):
                path.unlink()
    return num_lines


def _deal(files: Sequence[InputFile], folder: Path, num_piles: int, rng: random.Random) -> int:
    num_lines = 0
    with writing(folder), ExitStack() as stack:
        piles = [stack.enter_context((folder / f"{n}.pile").open("wb")) for n in range(num_piles)]
        for source in files:
            with opened(source) as (stream, _):
                for raw in records(source, stream, (), "line"):
                    # A mark of UTF-8 begins files, not lines in the middle of one.
                    line = raw.content.removeprefix(UTF8_MARK if raw.line == 1 else b"")
                    rng.choice(piles).write(line.removesuffix(b"\r") + b"\n")
                    num_lines += 1
    return num_lines
