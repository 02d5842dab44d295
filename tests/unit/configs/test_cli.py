"""What every command line has in common."""

import os
import signal
import sys

import pytest

from configs import cli
from configs.errors import ConfigError


class OwnError(Exception):
    pass


def parser():
    made = cli.Parser("it", "does it")
    made.add_argument("--micro-batch", type=cli.count, metavar="N")
    made.add_argument("--warmup-iterations", type=cli.count_from_0)
    made.add_argument("--timeout", type=lambda text: cli.duration("seconds", text))
    made.add_argument("--hang", type=lambda text: cli.duration("seconds", text, least=0))
    return made


def two_commands():
    made = cli.Parser("it", "does it")
    commands = made.add_subparsers(dest="command", required=True)
    one, two = commands.add_parser("one", help="this"), commands.add_parser("two", help="that")
    one.add_argument("file")
    one.add_argument("--model", required=True)
    two.add_argument("--machine")
    return made


@pytest.mark.parametrize(
    "words", [["--micro-batch", "2"], ["--micro_batch", "2"], ["--micro_batch=2"]]
)
def test_dashes_and_underscores_are_the_same(words):
    assert parser().read(words).micro_batch == 2


def test_a_value_keeps_its_underscores_and_a_double_dash_ends_the_options():
    made = cli.Parser("it")
    made.add_argument("--path")
    made.add_argument("words", nargs="*")
    given = made.read(["--path=/a_b", "--", "--any_thing"])
    assert (given.path, given.words) == ("/a_b", ["--any_thing"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--micro-bach", "2"], r"unknown option '--micro-bach': did you mean '--micro-batch'\?"),
        (["--zzzzzz"], r"unknown option '--zzzzzz': see --help"),
        (["-z"], r"unknown option '-z': see --help"),
        (["--micro", "2"], r"unknown option '--micro': did you mean"),
        (["more"], r"unknown argument 'more'"),
        (["--timeout"], r"--timeout: expected one argument \(see --help\)"),
        *((["--micro-batch", text], f"'{text}': give a whole number, 1 or more")
          for text in ("0", "1.5", "٣", "1" * 20)),
        (["--warmup-iterations", "x"], "'x': give a whole number, 0 or more"),
        *((["--timeout", text], f"'{text}': give a number of seconds above 0")
          for text in ("0", "-1", "x", "nan", "inf")),
        (["--hang", "-1"], "'-1': give a number of seconds 0 or above"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_named_with_its_value(words, message):
    with pytest.raises(ConfigError, match=message) as refused:
        parser().read(words)
    assert "\n" not in str(refused.value)


def test_an_unknown_option_of_a_command_is_named_before_what_is_missing():
    assert two_commands().read(["one", "f", "--model", "m"]).model == "m"
    with pytest.raises(ConfigError, match=r"'--modle': did you mean '--model'"):
        two_commands().read(["one", "--modle", "m", "f"])
    with pytest.raises(ConfigError, match=r"unknown option '--model'"):
        two_commands().read(["two", "--model", "m"])
    with pytest.raises(ConfigError, match="invalid choice: 'three'"):
        two_commands().read(["three"])


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("a is wrong"), 2, "error: a is wrong\n"),
        (ConfigError("a\x1b[2J is wrong"), 2, "error: a?[2J is wrong\n"),
        (OwnError("b failed"), 2, "error: b failed\n"),
        (OSError(28, "No space left", "a"), 2, "error: [Errno 28] No space left: 'a'\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_user_errors_are_one_line_and_an_exit_code(error, code, text, capsys):
    def fail():
        raise error

    assert cli.run_command(fail, OwnError) == code
    assert capsys.readouterr().err == text


def test_a_mistake_of_the_program_is_no_users_error():
    with pytest.raises(OwnError):
        cli.run_command(lambda: exec("raise OwnError", {"OwnError": OwnError}))
    assert cli.run_command(lambda: 3) == 3


def test_a_reader_that_has_gone_is_not_complained_of(capfd, monkeypatch):
    with open(os.devnull, "w") as nobody:  # noqa: PTH123
        monkeypatch.setattr(sys, "stdout", nobody)

        def write():
            raise BrokenPipeError

        assert cli.run_command(write) == 141
    assert capfd.readouterr().err == ""


@pytest.mark.own_process
def test_sigterm_unwinds_with_its_exit_code_and_the_handlers_are_put_back():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with pytest.raises(SystemExit) as caught:
        cli.run_command(lambda: signal.raise_signal(signal.SIGTERM))
    assert caught.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_terminal_gets_lines_folded_and_a_file_gets_them_whole(capsys, monkeypatch):
    long, path = " ".join(["word"] * 30), "/" + "x" * 120
    cli.say(f"  {long}\n{path}")
    assert capsys.readouterr().out == f"  {long}\n{path}\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    cli.say(f"  {long}\n{path}")
    first, second, third = capsys.readouterr().out.splitlines()
    assert len(first) <= 100 < len(long)
    assert second.startswith("      word")
    assert f"{first.strip()} {second.strip()}" == long
    assert third == path, "what can be copied stays whole"
