"""`clean`: blocks through workers, duplicates out, the rest written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dataset.clean import fingerprints, groups, steps
from dataset.clean.duplicates import Seen
from dataset.clean.steps import Cleaned, CleanSettings
from dataset.errors import DatasetError
from dataset.outputs import JSON_LINES, report_path, require_new, write_report, written
from dataset.pool import ordered
from dataset.progress import Progress
from dataset.readers.blocks import Bad, Reading, blocks


@dataclass(frozen=True)
class Memory:
    """Files about near-duplicates, beyond the output."""

    load: tuple[Path, ...] = ()
    """Fingerprints of earlier runs: what is like theirs goes."""
    save: Path | None = None
    """Where the fingerprints of what this run keeps go."""
    groups: Path | None = None
    """Where it goes which text went because of which."""

    @property
    def written(self) -> dict[str, Path]:
        """The files to write, by their options."""
        paths = {"--save-fingerprints": self.save, "--groups": self.groups}
        return {flag: path for flag, path in paths.items() if path}


def clean(
    reading: Reading,
    settings: CleanSettings,
    output: Path,
    workers: int,
    stop_at_bad: bool,
    memory: Memory = Memory(),
) -> dict[str, int]:
    """Clean files into one file of JSON lines, in the input's order, with a report beside it.

    Stopped half-way it leaves nothing under the output's name.

    Args:
        reading: What to read.
        settings: Which steps.
        output: File to write, packed by its ending; must not exist.
        workers: Processes.
        stop_at_bad: Whether a record that cannot be used ends it.
        memory: Files about near-duplicates.

    Returns:
        What was done, counted by name.

    Raises:
        DatasetError: A file is in the way or cannot be used, a library is missing, a record is
            bad, or none has text.
    """
    settings.require_usable()
    require_new(output, JSON_LINES)
    for flag, path in {"--output": report_path(output), **memory.written}.items():
        require_new(path, flag=flag)
    # Here as well as in every worker: its errors are the user's.
    steps.Cleaner(settings)
    kept = None if settings.near_duplicates is None else _Kept(settings, memory)
    settings = _without_common(reading, settings, workers)
    counts: Counter[str] = Counter(dict.fromkeys(settings.counted(), 0))
    bad: list[Bad] = []
    with written(output, report_path(output), *memory.written.values()) as file:
        for block in _blocks(reading, settings, workers, counts):
            bad += block.bad
            if bad and stop_at_bad:
                raise DatasetError(
                    f"{reading.words(bad[0])}; --bad-lines skip leaves such lines out"
                )
            counts.update(block.counts)  # += would drop those that are 0
            for line, values, name in zip(block.lines, block.signatures, block.names, strict=True):
                if kept and values is not None and not kept.keeps(values, name):
                    counts["dropped: near-duplicate"] += 1
                    continue
                file.write(line)
                counts["written"] += 1
        if not counts["read"]:
            first = f" ({reading.words(bad[0])})" if bad else ""
            raise DatasetError(f"the input holds no text under '{settings.key}'{first}")
        counts["bad lines"] = len(bad)
        if kept:
            kept.write()
        write_report(output, counts, map(reading.words, bad))
    return dict(counts)


def _blocks(
    reading: Reading, settings: CleanSettings, workers: int, counts: Counter[str]
) -> Iterator[Cleaned]:
    progress = Progress("cleaning", reading.total_bytes)
    work = partial(steps.work, settings)
    with closing(ordered(work, blocks(reading), workers)) as results:
        for block in results:
            yield block
            progress.reach(block.consumed_bytes, f"{counts['written']:,} kept")
    progress.close()


def _without_common(reading: Reading, settings: CleanSettings, workers: int) -> CleanSettings:
    """The settings, with what the input holds often enough to be a common phrase."""
    most = settings.ngrams.max_matches
    if most is None or not settings.decontaminate:
        return settings
    found: Counter[str] = Counter()
    progress = Progress("counting phrases", reading.total_bytes)
    work = partial(steps.count_matches, settings)
    with closing(ordered(work, blocks(reading), workers)) as results:
        for consumed_bytes, counted in results:
            found.update(counted)
            progress.reach(consumed_bytes, f"{len(found):,} found")
    progress.close()
    common = frozenset(sequence for sequence, count in found.items() if count >= most)
    return replace(settings, common=common)


class _Kept:
    """What was kept, here and in earlier runs, and what went because of it."""

    def __init__(self, settings: CleanSettings, memory: Memory) -> None:
        assert settings.near_duplicates is not None
        self._memory, self._sketch = memory, settings.sketch
        self._seen = Seen(settings.near_duplicates, settings.sketch)
        self._names: list[str] = []
        self._groups: dict[int, list[tuple[str, float]]] = {}
        for path in memory.load:
            for values, name in fingerprints.load(path, settings.sketch):
                self._seen.add(values)
                self._names.append(name)
        self._num_before = len(self._names)

    def keeps(self, values: NDArray[np.uint32], name: str) -> bool:
        """Whether nothing alike was kept; then this text is."""
        alike = self._seen.alike(values)
        if alike is None:
            self._names.append(name if self._memory.written else "")
        elif self._memory.groups:
            self._groups.setdefault(alike.number, []).append((name, alike.similarity))
        return alike is None

    def write(self) -> None:
        """Write the files that were asked for."""
        new = slice(self._num_before, None)
        if self._memory.save:
            fingerprints.save(
                self._memory.save, self._sketch, self._seen.kept[new], self._names[new]
            )
        if self._memory.groups:
            groups.write(
                self._memory.groups,
                [(self._names[kept], gone) for kept, gone in sorted(self._groups.items())],
            )
