"""What every command shares: parser, kinds of values, results to stdout, all else to stderr."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dataset.files import visible
from dataset.outputs import report_path

MOST_MEGABYTES = 1 << 20
DAY_S = 86_400


def say(line: str) -> None:
    """Write a result."""
    sys.stdout.write(line + "\n")


def tell(line: str) -> None:
    """Write what is worth knowing and no result."""
    sys.stderr.write(visible(line, kept="\n") + "\n")
    sys.stderr.flush()


def tell_counts(counts: Mapping[str, int], output: Path) -> None:
    """Write what was counted, and where it is written, too."""
    for name, count in sorted(counts.items()):
        tell(f"{name:28} {count:>12,}")
    tell(f"counts and bad lines: {report_path(output)}")


class FlagParser(argparse.ArgumentParser):
    """Refuses unknown flags first: argparse would complain of the value behind one instead."""

    def parse_known_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: Any = None,  # noqa: ANN401
    ) -> tuple[Any, list[str]]:
        """Parse, as argparse does."""
        known = [name for name in self._option_string_actions if name.startswith("--")]
        for word in args or ():
            flag = word.partition("=")[0]
            if word == "--":
                break
            if flag.startswith("--") and flag not in known:
                begun = [name for name in known if name.startswith(flag)]
                near = begun or get_close_matches(flag, known, 1)
                meant = f"; did you mean {near[0]}?" if near else ""
                self.error(f"unrecognized arguments: {word}{meant}")
        return super().parse_known_args(args, namespace)


def positive(text: str, most: int = 1 << 22) -> int:
    """A whole number from 1, and not so large that memory could not hold what it counts."""
    number = int(text)
    if not 1 <= number <= most:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1 and at most {most}")
    return number


def count(text: str) -> int:
    """A whole number from 0."""
    return 0 if text == "0" else positive(text)


def seconds(text: str) -> float:
    """A time, from 0 to a day."""
    number = float(text)
    if not 0 <= number <= DAY_S:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 0 and at most {DAY_S}")
    return number


def processes(text: str) -> int:
    """A number of processes; each holds two blocks of text in memory."""
    return positive(text, 1024)


def megabytes(text: str) -> int:
    """Mebibytes, as bytes."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < MOST_MEGABYTES:  # not a number is neither
        raise argparse.ArgumentTypeError(
            f"{text}: give a number of MiB from above 0 to below {MOST_MEGABYTES}"
        )
    return max(1, int(number * (1 << 20)))


def share(text: str) -> float:
    """A number over 0, up to 1."""
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(f"{text}: must be over 0 and at most 1")
    return number


def prefix(text: str) -> Path:
    """A pair's path without ``.bin`` and ``.idx``, absolute."""
    if not Path(text).name:
        raise argparse.ArgumentTypeError(f"{text!r}: give a pair's path without .bin and .idx")
    return Path(text.removesuffix(".bin").removesuffix(".idx")).absolute()


def output_prefix(text: str) -> Path:
    """A path that ends in a name, absolute: `Path` would take the folder's own for one."""
    if not text.strip("./") or text.endswith(("/", "/.", "/..")):
        folder = text.rstrip("/") or "."
        raise argparse.ArgumentTypeError(
            f"{text!r}: end it with a name for the files, such as {folder}/mine"
        )
    return Path(text).absolute()


def merged_prefix(text: str) -> Path:
    """The path of a pair to write."""
    return prefix(str(output_prefix(text)))


def add_input(group: Any) -> None:  # noqa: ANN401
    """Add the options that say how files of text are read."""
    add = group.add_argument
    add("--input-format", choices=["jsonl", "text", "parquet"], help="whatever the names end in")
    add("--sample-by", choices=["document", "paragraph", "line"],
        help="what of a .txt file is one document (document: the whole file)")  # fmt: skip
    add("--bad-lines", choices=["skip", "fail"], default="skip",
        help="leave out lines that cannot be used and list them, or stop at the first (skip)",
    )  # fmt: skip
    add("--part-mb", type=megabytes, default=4 << 20, metavar="MIB",
        help="text that a worker takes at once, in `prepare` never to be redone (4)")  # fmt: skip
    add("--workers", type=processes, help="processes (one a core)")
