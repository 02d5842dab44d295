"""README and the pages of docs/studies: every command is one that today's programs take."""

import argparse
import csv
import importlib
import re
import runpy
import shlex

import pytest
from study_pages import PAGES, ROOT, block_commands, commands

import launch.feasibility
from configs.cli import Parser
from configs.errors import ConfigError
from configs.study import load_study
from configs.sweep import load_sweep
from launch import cli, config_n_run, run, sweep
from launch.feasibility import HALF_TYPES, Host

LONGEST_PAGE = 120
COMMANDS = [(page.stem, command) for page in PAGES for command in commands(page.read_text())]
COMMANDS += [
    (page, command.removeprefix(".venv/bin/"))
    for page in ("README.md", "docs/prediction.md")
    for command in block_commands((ROOT / page).read_text())
]


class Parsed(Exception):
    """Raised where a program has read its arguments, so that it does nothing with them."""


def stopping(read):
    def stop(self, *arguments):
        read(self, *arguments)
        raise Parsed

    return stop


def check_main(main, argv):
    """Let a program read its arguments, and stop there."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("sys.argv", ["", *argv])
        for owner, name in ((argparse.ArgumentParser, "parse_args"), (Parser, "read")):
            patches.setattr(owner, name, stopping(getattr(owner, name)))
        with pytest.raises(Parsed):
            main()


def check_point(main):
    """Let a program make the point of a run, and stop there."""

    def check(argv):
        def with_point(*_):
            raise Parsed

        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(importlib.import_module(main.__module__), "run_point", with_point)
            with pytest.raises(Parsed):
                main(argv)

    return check


def check_sweep(argv):
    """Make the points of a sweep as the main job does, and choose those that are asked for."""
    study = cli.study_in(argv)
    given = sweep.build_parser(study).read(argv)
    if not given.list:
        one = load_sweep(given.sweep or study.default_sweep, study)
        plan = sweep.make_plan(one, given, Host(20 << 30))
        assert sweep.choose_points(plan.points, given.only, given.index)


def check_module(argv):
    module = importlib.import_module(argv[0])
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{argv[0]}.__main__")
    check_main(module.main, argv[1:])


def check_script(argv):
    check_main(runpy.run_path(str(ROOT / "quick-parse-results.py"))["main"], argv)


def check_target(argv):
    assert re.search(rf"^{argv[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), argv


def check_session(argv):
    name = argv[0].partition("(")[0].replace("-", "_")
    assert f"def {name}(" in (ROOT / "noxfile.py").read_text(), argv


def check_compression(argv):
    check_main(importlib.import_module("optimus_cc.predict").main, argv)


PROGRAMS = {
    "bash master-script.sh": check_sweep,
    "bash config-n-run.sh": check_point(config_n_run.main),
    "python -m launch.run": check_point(run.main),
    "python -m optimus_cc predict": check_compression,
    "python -m": check_module,
    "python quick-parse-results.py": check_script,
    "make": check_target,
    "nox -s": check_session,
}
"""How a command begins, to what looks at the rest of its words; the first that fits does."""


@pytest.fixture
def check(monkeypatch):
    """Return a function that raises for a command that its program would refuse."""
    monkeypatch.setattr(launch.feasibility, "ask_half_types", lambda: HALF_TYPES)

    def check(command):
        words = shlex.split(re.sub(r"^(\w+=\S* )*", "", command), comments=True)
        for start, look in PROGRAMS.items():
            own = start.split()
            if words[: len(own)] == own:
                return look(words[len(own) :])
        raise AssertionError(f"no program of this project: {command}")

    return check


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_of_a_page_is_taken(page, command, check, capsys):
    if command.endswith("--help"):
        with pytest.raises(SystemExit, match=r"^0$"):
            check(command)
    else:
        check(command)


@pytest.mark.parametrize(
    "command",
    [
        "bash master-script.sh --swep stride",
        "bash master-script.sh --sweep strid",
        "bash master-script.sh --study imdb --engines stage-9",
        "bash master-script.sh --sweep stride --size tiny --only 'stride 77'",
        "bash config-n-run.sh -m 7 -Z 1",
        "python -m launch.run tiny --study zero-ladder --engine stage-9",
        "python -m parse diagnose",
        "python -m ds_config explain --fixx a.json",
        "python -m optimus_cc predict --model 2.5B --bogus",
        "python -m nosuch",
        "make nosuch",
        "nox -s nosuch",
        "llamafactory-cli train",
    ],
)
def test_a_command_that_nobody_takes_is_seen(command, check, capsys):
    with pytest.raises((ConfigError, ImportError, AssertionError, SystemExit)) as caught:
        check(command)
    assert getattr(caught.value, "code", 2) == 2


@pytest.mark.parametrize(
    ("study", "head", "column"),
    [
        ("imdb", "| in the text | here, of", 2),
        ("optimus-cc", "| flags of the scripts |", 3),
    ],
)
def test_options_that_stand_for_those_of_a_text_are_there(study, head, column):
    text = (ROOT / "docs" / "studies" / f"{study}.md").read_text()
    table = (head + text.partition(head)[2]).partition("\n\n")[0].splitlines()[2:]
    named = {
        word for row in table for word in re.findall(r"--[a-z][\w.-]+", row.split("|")[column])
    }
    of_runs, of_sweeps = (
        build(load_study(study)) for build in (run.build_parser, sweep.build_parser)
    )
    assert len(named) > 4
    assert named <= of_runs._option_string_actions.keys() | of_sweeps._option_string_actions.keys()


def test_published_ratios_are_those_of_the_published_bars():
    """In the paper's page: update of 7B by stride, 99 iterations, and update at ratio 0.8."""
    lines = (ROOT / "configs/studies/interleaved/published.csv").read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))

    def ratio(**wanted):
        found = [row for row in rows if wanted.items() <= row.items()]
        (stock,) = (float(row["value"]) for row in found if row["engine"] == "stock")
        (ours,) = (float(row["value"]) for row in found if (row["engine"], row["stride"]) != STOCK)
        return f"{max(stock / ours, ours / stock):.2f}"

    STOCK = ("stock", "0")
    rows = [row for row in rows if row["stride"] in ("0", "2")]
    by_machine = [ratio(sweep="stride", machine=name) for name in ("h100x4", "a100x4")]
    models = ("7B", "8.3B", "10B")
    in_all = [ratio(quantity="iterations_99_s", model=name) for name in models]
    shared = [ratio(sweep="offload-ratio", quantity="update_s", model=name) for name in models]
    text = (ROOT / "docs/studies/paper.md").read_text()
    assert "update of 7B, k = 2: {} (H100), {} (A100)".format(*by_machine) in text
    assert "99 iterations: {} (7B), {} (8.3B), {} (10B)".format(*in_all) in text
    assert "update at ratio 0.8: {}, {}, {}".format(*shared) in text


def test_the_tests_that_a_page_names_are_there():
    named = {
        name
        for page in PAGES
        for name in re.findall(r"`(test(?:_[a-z0-9]+){3,})`", page.read_text())
    }
    there = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert named
    assert sorted(name for name in named if f"def {name}(" not in there) == []


def test_a_page_is_read_in_minutes():
    lines = {page.name: len(page.read_text().splitlines()) for page in PAGES}
    assert {name: number for name, number in lines.items() if number > LONGEST_PAGE} == {}


def test_every_page_is_found_from_the_list_of_studies():
    text = (ROOT / "docs" / "studies.md").read_text()
    assert [page.name for page in PAGES if f"](studies/{page.name})" not in text] == []
    assert len(COMMANDS) > 50
