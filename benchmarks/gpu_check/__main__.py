"""``python -m benchmarks.gpu_check``: what only a machine with a GPU can show. Standard library."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from benchmarks.gpu_check.driver import Check, FolderError
from benchmarks.gpu_check.pieces import BY_NAME, GROUPS, PIECES, chosen_pieces
from benchmarks.gpu_check.summary import TEXT, write_summary

EXIT_FAILED, EXIT_USAGE, EXIT_SIGNAL = 1, 2, 128


class _Ended(KeyboardInterrupt):
    """A signal asked this process to end."""

    def __init__(self, number: int, frame: FrameType | None) -> None:
        super().__init__(number)
        self.number = number


def main(argv: list[str] | None = None) -> int:
    """Run the pieces; returns 0, or 1 when one failed, 2 for a wrong argument, 128 + signal."""
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        pieces = chosen_pieces([*given.pieces, *given.again], given.memory)
        if given.wheels and not given.wheels.is_dir():
            raise ValueError(
                f"--wheels {given.wheels}: no such folder; requirements/wheelhouse.sh fills one"
            )
        if not given.seconds > 0:
            raise ValueError(f"--seconds {given.seconds}: give a number above 0")
        if given.memory < 0:
            raise ValueError(f"--memory {given.memory}: give a whole number of GiB, 0 for none")
        folder = given.folder.absolute()
        check = Check(folder, given.device, given.wheels, given.seconds, given.memory)
    except (ValueError, FolderError) as error:
        sys.stderr.write(f"gpu-check: {error}\n")
        return EXIT_USAGE
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    status = 0
    try:
        check.run(pieces, given.again, lambda: write_summary(check, given.out))
    except _Ended as ended:
        sys.stderr.write("gpu-check: interrupted; the same command goes on from here\n")
        status = EXIT_SIGNAL + ended.number
    sys.stdout.write(f"\n{(folder / TEXT).read_text(encoding='utf-8')}")
    return status or (EXIT_FAILED if check.failed else 0)


def _end(number: int, frame: FrameType | None) -> None:
    raise _Ended(number, frame)


def _parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {p.group or '-':8} {p.name:10} {p.what}" for p in PIECES)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description="Run what only a machine with a GPU can show, piece by piece.",
        epilog=f"groups and pieces:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    out = os.environ.get("OUT")
    names = ", ".join((*GROUPS, *BY_NAME))
    add("pieces", nargs="*", metavar="PIECE", help="a group or a piece (default: all)")
    add("--again", nargs="+", default=[], metavar="PIECE", choices=[*BY_NAME], help="though done")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="cpu: the small form")
    add("--folder", type=Path, default=Path("gpu-check"), help="logs and results [gpu-check]")
    add("--wheels", type=Path, help="install packages that lack from this folder of wheels")
    add("--seconds", type=float, default=float("inf"), help="for everything [no limit]")
    add("--memory", type=int, default=0, metavar="GIB", help="first touch so much host memory")
    add(
        "--out",
        type=Path,
        default=Path(out) if out else None,
        help="also put summary and logs here [$OUT]",
    )
    parser.usage = f"%(prog)s [options] [PIECE ...]\n\nPIECE: {names}"
    return parser


if __name__ == "__main__":
    sys.exit(main())
