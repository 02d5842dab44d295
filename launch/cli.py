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
from typing import Protocol

from configs.errors import ConfigError
from configs.overrides import MODEL_PREFIX
from configs.schema import Model
from configs.study import Study, default_study, load_study
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


class _HasArguments(Protocol):
    def add_argument(self, flag: str, /, *, metavar: str, help: str) -> object: ...  # noqa: A002


class Parser(argparse.ArgumentParser):
    """Takes ``-`` or ``_`` in an option's name, and names the nearest of an unknown one."""

    def __init__(self, prog: str, description: str, add_help: bool = True) -> None:
        super().__init__(
            prog=prog,
            description=description,
            add_help=add_help,
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


def add_study_option(parser: _HasArguments) -> None:
    """``--study``, which :func:`study_in` reads."""
    parser.add_argument(
        "--study",
        metavar="NAME",
        help=f"a study by its name or its folder [default {default_study().name}]",
    )


def study_in(argv: Sequence[str]) -> Study:
    """The study that a command line names, or the default one; fields of points are its own.

    Raises:
        ConfigError: there is no such study, or its file is wrong.
    """
    parser = Parser("", "", add_help=False)
    add_study_option(parser)
    name = parser.parse_known_args(argv)[0].study
    return default_study() if name is None else load_study(name)


def add_field_options(parser: Parser, study: Study) -> None:
    """One option for each field of a point, each engine key of the study and each model's field.

    Values stay text; the schema reads and checks them, with one wording of errors for files and
    command lines.
    """
    fields = parser.add_argument_group("fields of the point (they replace those of the file)")
    for name, field in study.point_type.model_fields.items():
        default = "" if field.is_required() else f" [default {field.default!s}]"
        text = (field.description or "").replace("``", "") + default
        fields.add_argument(_flag(name), metavar="V", help=_one_line(text))
    if study.engine_keys:
        keys = parser.add_argument_group("the engine in other keys")
        for name in study.engine_keys:
            keys.add_argument(_flag(name), metavar="V", help="a whole number")
    model = parser.add_argument_group("fields of the model")
    for name, field in Model.model_fields.items():
        flag, dest = _flag(MODEL_PREFIX + name), MODEL_PREFIX + name
        text = _one_line((field.description or "").replace("``", ""))
        model.add_argument(flag, dest=dest, metavar="V", help=text)


def field_overrides(options: argparse.Namespace, study: Study) -> dict[str, str]:
    """The fields that were given, as text."""
    names = [*study.point_type.model_fields, *study.engine_keys]
    names += [MODEL_PREFIX + name for name in Model.model_fields]
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
        "--data",
        metavar="NAME",
        help="embedded, oscar-1gb, or the prefix of a .bin/.idx pair of your own [default: "
        "oscar-1gb for full-size models where it has been prepared, else embedded]",
    )
    parser.add_argument(
        "--vocab-size",
        type=count,
        metavar="N",
        help="of a pair in --data that has no manifest beside it",
    )
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
        "--share",
        action="store_true",
        help="measure beside the runs of other calls on this machine [default: take turns]",
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


def minutes(text: str) -> float:
    """A number of minutes above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of minutes above 0")
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
