"""Which files a command reads: globs, kinds and compressions."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from dataset.errors import DatasetError

KIND_BY_ENDING = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".parquet": "parquet",
}
COMPRESSIONS = (".xz", ".gz", ".zst")


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
