"""`clean`: blocks through workers, duplicates out, the rest written."""

from __future__ import annotations

import gzip
import json
import lzma
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from dataset.clean import steps
from dataset.clean.duplicates import Seen
from dataset.clean.steps import CleanSettings
from dataset.errors import DatasetError
from dataset.files import require_writable, writing
from dataset.pool import ordered
from dataset.progress import Progress
from dataset.readers.blocks import Bad, Reading, blocks

ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst")


def clean(
    reading: Reading, settings: CleanSettings, output: Path, workers: int, stop_at_bad: bool
) -> dict[str, int]:
    """Clean files into one file of JSON lines, in the input's order, with a report beside it.

    Stopped half-way it leaves nothing under the output's name.

    Args:
        reading: What to read.
        settings: Which steps.
        output: File to write, packed by its ending; must not exist.
        workers: Processes.
        stop_at_bad: Whether a record that cannot be used ends it.

    Returns:
        What was done, counted by name.

    Raises:
        DatasetError: A file is in the way or cannot be used, a library is missing, a record is
            bad, or none has text.
    """
    settings.require_usable()
    _require_output(output)
    # Here as well as in every worker: its errors are the user's.
    steps.Cleaner(settings)
    seen = None if settings.near_duplicates is None else Seen(settings.near_duplicates)
    counts: Counter[str] = Counter(dict.fromkeys(settings.counted(), 0))
    bad: list[Bad] = []
    progress = Progress("cleaning", reading.total_bytes)
    work = partial(steps.work, settings)
    with _written(output) as file, closing(ordered(work, blocks(reading), workers)) as results:
        for block in results:
            bad += block.bad
            if bad and stop_at_bad:
                raise DatasetError(
                    f"{reading.words(bad[0])}; --bad-lines skip leaves such lines out"
                )
            counts.update(block.counts)  # += would drop those that are 0
            for line, values in zip(block.lines, block.signatures, strict=True):
                if seen and values is not None and not seen.is_new(values):
                    counts["dropped: near-duplicate"] += 1
                    continue
                file.write(line)
                counts["written"] += 1
            progress.reach(block.consumed_bytes, f"{counts['written']:,} kept")
        progress.close()
        if not counts["read"]:
            first = f" ({reading.words(bad[0])})" if bad else ""
            raise DatasetError(f"the input holds no text under '{settings.key}'{first}")
    counts["bad lines"] = len(bad)
    report = {"counts": dict(counts), "bad_lines": [reading.words(one) for one in bad]}
    with writing(report_path(output)):
        report_path(output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return dict(counts)


def report_path(output: Path) -> Path:
    """Where the counts and the bad lines of a cleaned file are."""
    return output.with_name(f"{output.name}.report.json")


def _require_output(output: Path) -> None:
    if not output.name.endswith(ENDINGS):
        raise DatasetError(f"--output {output}: the name must end in {', '.join(ENDINGS)}")
    for path in (output, report_path(output)):
        if path.exists():
            raise DatasetError(f"--output: {path} is there already; give another name")
    require_writable(output, "--output")


@contextmanager
def _written(output: Path) -> Iterator[Any]:
    draft = output.with_name(f".unfinished-{output.name}")
    try:
        with writing(output), _packed(draft, output.suffix) as file:
            yield file
        draft.replace(output)
    finally:
        draft.unlink(missing_ok=True)


def _packed(path: Path, suffix: str) -> Any:  # noqa: ANN401
    if suffix == ".gz":
        return gzip.open(path, "wb")
    if suffix == ".xz":
        return lzma.open(path, "wb")
    if suffix == ".zst":
        import pyarrow

        return pyarrow.CompressedOutputStream(str(path), "zstd")
    return path.open("wb")
