"""Command lines made from the point's own fields, and what every command prints and returns."""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from configs.errors import ConfigError
from configs.overrides import MODEL_PREFIX
from configs.schema import PAPER_KEYS, Model, Point
from launch.data import LaunchError
from launch.hosts.options import add_launch_options
from launch.records.files import ROOT

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def say(text: str) -> None:
    """Print a line for the user, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Parser(argparse.ArgumentParser):
    """Takes ``-`` or ``_`` in an option's name, and names the nearest of an unknown one."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments.

        Raises:
            ConfigError: an option is unknown or its value is wrong.
        """
        options, unknown = self.parse_known_args([_dashed(word) for word in argv])
        if unknown:
            word = unknown[0].partition("=")[0]
            known = [name for name in self._option_string_actions if name.startswith("--")]
            near = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
            hint = f"did you mean '{near[0]}'?" if near else "see --help"
            kind = "option" if word.startswith("-") else "argument"
            raise ConfigError(f"unknown {kind} {word!r}: {hint}")
        return options

    def error(self, message: str) -> None:  # type: ignore[override]  # argparse says NoReturn
        """Raise instead of printing the usage and leaving."""
        raise ConfigError(f"{message} (see --help)")


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def add_field_options(parser: Parser) -> None:
    """One option for each field of a point, each of the paper's keys and each field of a model.

    Values stay text; the schema reads and checks them, with one wording of errors for files and
    command lines.
    """
    fields = parser.add_argument_group("fields of the point (they replace those of the file)")
    for name, field in Point.model_fields.items():
        default = "" if field.is_required() else f" [default {field.default!s}]"
        text = (field.description or "").replace("``", "") + default
        fields.add_argument(_flag(name), metavar="V", help=_one_line(text))
    paper = parser.add_argument_group("the engine in the paper's keys")
    for name, text in zip(PAPER_KEYS, ("0 or 1", "0 or 1", "the stride"), strict=True):
        paper.add_argument(_flag(name), metavar="V", help=text)
    model = parser.add_argument_group("fields of the model")
    for name, field in Model.model_fields.items():
        flag, dest = _flag(MODEL_PREFIX + name), MODEL_PREFIX + name
        text = _one_line((field.description or "").replace("``", ""))
        model.add_argument(flag, dest=dest, metavar="V", help=text)


def field_overrides(options: argparse.Namespace) -> dict[str, str]:
    """The fields that were given, as text."""
    names = [*Point.model_fields, *PAPER_KEYS, *(MODEL_PREFIX + n for n in Model.model_fields)]
    given = vars(options)
    return {name: given[name] for name in names if given.get(name) is not None}


def add_run_options(parser: Parser, echo: bool) -> None:
    """Options of every command that starts runs."""
    parser.add_argument(
        "--results-dir",
        type=Path,
        default=ROOT / "results",
        metavar="DIR",
        help="folder of all results; nothing in it is ever overwritten [default results]",
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would run, start nothing")
    parser.add_argument(
        "--timeout", type=_seconds, metavar="SECONDS", help="end a run that takes longer"
    )
    parser.add_argument(
        "--hang-timeout",
        type=_seconds_or_0,
        metavar="SECONDS",
        help="end a run without progress for so long, 0 for never [default adapts to the run]",
    )
    parser.add_argument(
        "--monitor-interval",
        type=_seconds_or_0,
        default=1.0,
        metavar="SECONDS",
        help="sample memory, CPU and GPUs so often, 0 for never [default 1]",
    )
    parser.add_argument("--tensorboard", action="store_true", help="write scalars for TensorBoard")
    parser.add_argument(
        "--wandb", metavar="PROJECT", help="send scalars to a project of Weights & Biases"
    )
    parser.add_argument(
        "--echo",
        action=argparse.BooleanOptionalAction,
        default=echo,
        help=f"copy the log to the terminal [default {'yes' if echo else 'no'}]",
    )
    parser.add_argument(
        "--no-memory-check", action="store_true", help="start a run even if memory looks short"
    )
    add_launch_options(parser)


def count(text: str) -> int:
    """A whole number, 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, 1 or more")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of seconds above 0")
    return value


def _seconds_or_0(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of seconds, 0 or above")
    return value


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("%", "%%")


class Terminated(SystemExit):
    """SIGTERM or SIGHUP outside a run; unwinds like Ctrl-C does."""


def run_command(main: Callable[[], int]) -> int:
    """Run a command's body; user errors become one line, signals their exit codes."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _terminate)
    try:
        return main()
    except (ConfigError, LaunchError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): nothing is left to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except OSError as error:
        # A full disk, a read-only folder, a program that is missing.
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated(128 + number)
