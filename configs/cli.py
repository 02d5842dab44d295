"""The parser, common options, words and exit codes of the harness's command lines.

Standard library alone. A program's ``main`` reads ``sys.argv`` with :meth:`Parser.read`, raises
:class:`~configs.errors.ConfigError` for a user's mistake and returns its exit code. It ends in::

    if __name__ == "__main__":
        raise SystemExit(run_command(main))
"""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from configs.errors import ConfigError
from configs.files import ROOT, printable

EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 2, 130, 141
Options = argparse._ActionsContainer  # a parser, or a group of its options
COLUMNS = 100
"""Width of a terminal that every line for the user fits into."""
_KEPT = "\n\t"
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def say(text: str) -> None:
    """Print a line for the user, at once; a terminal gets it folded at blanks.

    A path or a command stays whole, and in a file a line stays a line, so that both can be found.
    """
    text = printable(text, _KEPT)
    if sys.stdout.isatty():
        text = "\n".join(map(_folded, text.split("\n")))
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _folded(line: str) -> str:
    if len(line) <= COLUMNS:
        return line
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(
        line, COLUMNS, subsequent_indent=f"{indent}    ", break_long_words=False,
        break_on_hyphens=False, replace_whitespace=False, drop_whitespace=True,
    )  # fmt: skip


def complain(text: str) -> None:
    """Print a line of what went wrong, on standard error."""
    sys.stderr.write(f"{printable(text, _KEPT)}\n")


class Parser(argparse.ArgumentParser):
    """Takes ``-`` or ``_`` in an option's name, and names the nearest of an unknown one.

    Attributes:
        elsewhere: Options of other programs, to what stands for them in this one.
    """

    def __init__(self, prog: str | None = None, description: str = "", **more: Any) -> None:
        more.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        more.setdefault("allow_abbrev", False)
        super().__init__(prog=prog, description=description, **more)
        self.elsewhere: Mapping[str, str] = {}

    def read(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse the arguments, by default those of this process.

        Raises:
            ConfigError: an option is unknown or its value is wrong.
        """
        words = list(sys.argv[1:] if argv is None else argv)
        end = words.index("--") if "--" in words else len(words)
        words[:end] = map(_dashed, words[:end])
        self._refuse_unknown_options(words[:end])
        options, rest = self.parse_known_args(words)
        if rest:
            self._refuse(rest[0])
        return options

    def _refuse_unknown_options(self, words: Sequence[str]) -> None:
        """Look before argparse, which takes the value of an unknown option for an argument."""
        parser = self
        for word in words:
            for action in parser._actions:
                if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                    parser = action.choices[word]
            name = word.partition("=")[0]
            if name.startswith("--") and name not in parser._option_string_actions:
                parser._refuse(word)

    def _refuse(self, word: str) -> NoReturn:
        word = word.partition("=")[0]
        known = [name for name in self._option_string_actions if name.startswith("--")]
        begun = [name for name in known if name.startswith(word)]
        # Dashes are no likeness: with them "--tp" is near to whatever has a t.
        bare = {name.removeprefix("--"): name for name in known}
        alike = difflib.get_close_matches(word.lstrip("-"), bare, n=1, cutoff=0.51)
        near = begun or [bare[name] for name in alike]
        hint = f"did you mean '{near[0]}'?" if near else "see --help"
        hint = self.elsewhere.get(word, hint)
        kind = "option" if word.startswith("-") else "argument"
        raise ConfigError(f"unknown {kind} {word!r}: {hint}")

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and leaving."""
        raise ConfigError(f"{message} (see --help)")


def _dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def add_study(options: Options, default: str) -> None:
    """Add ``--study``; ``default`` says which one is meant without it."""
    text = f"a study by its name or its folder [default {default}]"
    options.add_argument("--study", metavar="NAME", help=text)


def add_results_dir(options: Options) -> None:
    """Add ``--results-dir``, a path, by default the checkout's ``results``."""
    text = (
        "folder of all results; run folders stay, tables, figures and report are made anew "
        "[default results]"
    )
    default = ROOT / "results"
    options.add_argument("--results-dir", metavar="DIR", type=Path, default=default, help=text)


def add_warmup(options: Options, text: str = "first iterations left out [default 1]") -> None:
    """Add ``--warmup``, a number of iterations."""
    options.add_argument("--warmup", metavar="N", type=count_from_0, default=1, help=text)


def add_json(options: Options) -> None:
    """Add ``--json``, a switch."""
    options.add_argument("--json", action="store_true", help="print JSON")


def add_machine(options: Options, text: str) -> None:
    """Add ``--machine``; ``text`` says which profiles there are, or what it is for."""
    options.add_argument("--machine", metavar="PROFILE", help=f"{text}, or calibrate's file")


def count(text: str, least: int = 1) -> int:
    """Return a whole number, ``least`` or more."""
    if not (text.isascii() and text.isdigit() and len(text) < 19 and int(text) >= least):
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, {least} or more")
    return int(text)


def count_from_0(text: str) -> int:
    """Return a whole number, 0 or more."""
    return count(text, least=0)


def number_from_0(text: str) -> float:
    """Return a number, 0 or more."""
    return duration("", text, least=0)


def duration(unit: str, text: str, least: float = sys.float_info.min) -> float:
    """Return a number of a unit such as seconds, ``least`` or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value < float("inf"):
        words = f"a number of {unit}" if unit else "a number"
        limit = "above 0" if least else "0 or above"
        raise argparse.ArgumentTypeError(f"{text!r}: give {words} {limit}")
    return value


def run_command(main: Callable[[], int], *errors: type[Exception], name: str = "") -> int:
    """Run a program's ``main`` and return its exit code.

    A ``ConfigError``, an ``OSError`` such as a full disk, and ``errors`` become one line, which
    begins with ``name``, and exit code 2. SIGTERM and SIGHUP unwind as Ctrl-C does.
    """
    begin = f"{name}: " if name else ""
    mistakes: tuple[type[Exception], ...] = (ConfigError, OSError, *errors)
    handled = [number for number in _SIGNALS if signal.getsignal(number) == signal.SIG_DFL]
    try:
        for number in handled:
            signal.signal(number, _terminate)
        return main()
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): nothing is left to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except mistakes as error:
        complain(f"{begin}error: {error}")
        return EXIT_USAGE
    except KeyboardInterrupt:
        complain(f"{begin}interrupted")
        return EXIT_INTERRUPTED
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
