"""`clean`: blocks through workers, duplicates out, the rest written."""

from __future__ import annotations

import gzip
import json
import lzma
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from dataset.clean import steps
from dataset.clean.duplicates import Seen
from dataset.clean.settings import CleanSettings
from dataset.clean.steps import Cleaned
from dataset.errors import DatasetError
from dataset.files import require_writable
from dataset.pool import ordered
from dataset.progress import Progress
from dataset.readers.blocks import Reading, blocks

ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst")


@dataclass(frozen=True)
class Report:
    """What was done."""

    counts: dict[str, int]
    bad: list[tuple[int, int, str]]


def clean(
    reading: Reading, settings: CleanSettings, output: Path, workers: int, stop_at_bad: bool
) -> Report:
    """Clean files into one file of JSON lines, in the input's order.

    Stopped half-way it leaves nothing under the output's name.

    Args:
        reading: What to read; its first key holds the text.
        settings: Which steps.
        output: File to write, packed by its ending; must not exist.
        workers: Processes.
        stop_at_bad: Whether a record that cannot be used ends it.

    Raises:
        DatasetError: A file is in the way or cannot be used, a library is missing, a record is
            bad, or none has text.
    """
    settings.require_libraries()
    _require_output(output)
    # Here as well as in every worker: its errors are the user's.
    steps.Cleaner(settings, reading.keys[0])
    seen = None if settings.near_duplicates is None else Seen(settings.near_duplicates)
    counts: Counter[str] = Counter(dict.fromkeys(settings.counted(), 0))
    bad: list[tuple[int, int, str]] = []
    progress = Progress("cleaning", reading.total_bytes)
    arguments = (settings, reading.keys[0])
    with (
        _written(output) as file,
        closing(ordered(steps.work, blocks(reading), workers, steps.start, arguments)) as results,
    ):
        for block in results:
            if block.bad and stop_at_bad:
                number, line, reason = block.bad[0]
                raise DatasetError(
                    f"{reading.name(number)}:{line}: {reason}; "
                    "--bad-lines skip leaves such lines out"
                )
            bad += block.bad
            counts.update(block.counts)  # += would drop those that are 0
            for line_bytes in _kept(block, seen, counts):
                file.write(line_bytes)
                counts["written"] += 1
            progress.reach(block.consumed_bytes, f"{counts['written']:,} kept")
        progress.close()
        _require_text(reading, counts, bad)
    counts["bad lines"] = len(bad)
    return Report(dict(counts), bad)


def report_path(output: Path) -> Path:
    """Where the counts of a cleaned file are."""
    return output.with_name(f"{output.name}.report.json")


def write_report(reading: Reading, report: Report, output: Path) -> None:
    """Write the counts, and the bad lines, beside the output."""
    contents = {
        "counts": report.counts,
        "bad_lines": [f"{reading.name(file)}:{line}: {why}" for file, line, why in report.bad],
    }
    report_path(output).write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")


def _require_text(reading: Reading, counts: Counter[str], bad: list[tuple[int, int, str]]) -> None:
    if not counts["read"]:
        first = f" ({reading.name(bad[0][0])}:{bad[0][1]}: {bad[0][2]})" if bad else ""
        raise DatasetError(f"the input holds no text under '{reading.keys[0]}'{first}")


def _kept(block: Cleaned, seen: Seen | None, counts: Counter[str]) -> Iterator[bytes]:
    for line, values in zip(block.lines, block.signatures, strict=True):
        if seen and values is not None and not seen.is_new(values):
            counts["dropped: near-duplicate"] += 1
            continue
        yield line


def _require_output(output: Path) -> None:
    if not output.name.endswith(ENDINGS):
        raise DatasetError(f"--output {output}: the name must end in {', '.join(ENDINGS)}")
    for path in (output, report_path(output)):
        if path.exists():
            raise DatasetError(f"--output: {path} is there already; give another name")
    require_writable(output, "--output")


@contextmanager
def _written(output: Path) -> Iterator[IO[bytes]]:
    draft = output.with_name(f".unfinished-{output.name}")
    try:
        with ExitStack() as stack:
            yield stack.enter_context(_packed(draft, output.suffix))
        draft.replace(output)
    finally:
        draft.unlink(missing_ok=True)


def _packed(path: Path, suffix: str) -> IO[bytes]:
    if suffix == ".gz":
        return cast("IO[bytes]", gzip.open(path, "wb"))
    if suffix == ".xz":
        return cast("IO[bytes]", lzma.open(path, "wb"))
    if suffix == ".zst":
        import pyarrow

        packed: Any = pyarrow.CompressedOutputStream(str(path), "zstd")
        return cast("IO[bytes]", packed)
    return path.open("wb")
