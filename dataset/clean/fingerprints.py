"""What was kept of a corpus, for a later one to be held against: a file of sketches and names.

A zip file of settings, sketches and names, so that NumPy and any archive tool read it; its
checksums tell damage.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataset.clean.duplicates import SCHEME, Sketch
from dataset.errors import DatasetError
from dataset.outputs import written

FORMAT = 1
SETTINGS, SKETCHES, NAMES = "settings.json", "sketches.u32", "names.jsonl"
# What the reader of zip files raises on damage: a flag may be flipped as well.
DAMAGE = (zipfile.BadZipFile, RuntimeError, ValueError, KeyError, TypeError, OSError, EOFError)


def save(
    path: Path, sketch: Sketch, sketches: Iterable[NDArray[np.uint32]], names: Iterable[str]
) -> None:
    """Write fingerprints.

    Args:
        path: The file; must not exist.
        sketch: How the texts are sketched.
        sketches: Of each text, (permutations,).
        names: Of each text.

    Raises:
        DatasetError: There is no room for it.
    """
    with written(path) as file, zipfile.ZipFile(file, "w") as archive:
        with archive.open(SKETCHES, "w", force_zip64=True) as member:
            for values in sketches:
                member.write(values.astype("<u4").tobytes())
        archive.writestr(NAMES, "".join(json.dumps(name) + "\n" for name in names))
        archive.writestr(SETTINGS, json.dumps(_settings(sketch)))


def load(path: Path, sketch: Sketch) -> Iterator[tuple[NDArray[np.uint32], str]]:
    """Yield sketches, (permutations,), and names of the texts that an earlier run kept.

    Raises:
        DatasetError: The file is damaged, or its texts were sketched otherwise.
    """
    advice = "make it again with --save-fingerprints"
    try:
        with zipfile.ZipFile(path) as archive:
            # All of it first: a text held against half of a file may stay that should go.
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(f"wrong checksum of {damaged}")
            before = json.loads(archive.read(SETTINGS))
            for name, value in _settings(sketch).items():
                if before.get(name) != value:
                    raise DatasetError(
                        f"--load-fingerprints {path}: {name} is {before.get(name)} there and "
                        f"{value} here: give the same, or {advice}"
                    )
            names = [json.loads(line) for line in archive.read(NAMES).splitlines()]
            size_bytes = 4 * sketch.permutations
            if archive.getinfo(SKETCHES).file_size != len(names) * size_bytes:
                raise ValueError(f"{len(names)} names do not fit its sketches")
            with archive.open(SKETCHES) as sketches:
                for name in names:
                    yield np.frombuffer(sketches.read(size_bytes), "<u4"), name
    except DAMAGE as error:
        raise DatasetError(
            f"--load-fingerprints {path}: missing, damaged or no fingerprints ({error}): {advice}"
        ) from error


def _settings(sketch: Sketch) -> dict[str, Any]:
    return {"format": FORMAT, "scheme": SCHEME, **asdict(sketch)}
