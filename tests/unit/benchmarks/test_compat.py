"""What `make compat` does with its cells; nothing is installed or trained here."""

import json
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.compat import __main__ as command, cells as cells_module, documents, environments
from benchmarks.compat.cells import EQUALITY, TRAINER, Cell, Result, all_cells, code_of, stored
from benchmarks.compat.environments import (
    OWN_PYTHON,
    Environment,
    EnvironmentFailedError,
    IndexUnreachableError,
)
from benchmarks.compat.runs import summary
from deep_optimizer_states.deepspeed_guard import CHECKED_VERSIONS

ROOT = Path(__file__).resolve().parents[3]
OLD = Cell(EQUALITY, OWN_PYTHON, "1.0")
NEW = Cell(EQUALITY, OWN_PYTHON, "2.0")
GPT = Cell(TRAINER, OWN_PYTHON, "2.0", "7.0")
VERSIONS = {"torch": "9.9", "deepspeed": "1.0", "megatron-core": "7.0"}


def result(**fields):
    return Result("code", VERSIONS, **fields)


def table_row(text, release):
    (row,) = (line for line in text.splitlines() if line.startswith(f"| {release} |"))
    return [part.strip() for part in row.split("|")[2:-1]]


def test_a_cell_says_how_many_comparisons_were_equal_and_what_was_not():
    others = [
        Cell(EQUALITY, "9.1", "1.0"),
        Cell(EQUALITY, "9.2", "1.0"),
        Cell(TRAINER, "9.1", "1.0", "8"),
    ]
    why = {"Muon": "its arithmetic", "fp32": "no stage = 1", "bf16": "no stage = 2"}
    refused = result(equal={"1": 5}, refused=why)
    results = {
        OLD: result(equal={"1": 12, "2": 7}),
        others[0]: result(equal={"1": 11}, different=["1 ranks: fp32 | dynamic"], reason="killed"),
        NEW: refused,
    }
    text = documents.compatibility([OLD, NEW, *others, GPT], results)
    assert table_row(text, "1.0") == ["12 + 7", "11, **1 not**, **did not end**", ""]
    assert table_row(text, "2.0") == ["5, 3 refused", "n/a", "n/a"]
    assert table_row(text, "7.0") == ["n/a", ""]
    assert f"* {others[0].name}: killed" in text
    assert f"* {others[0].name}: 1 ranks: fp32 | dynamic" in text
    assert "* Refused with DeepSpeed 2.0 (its arithmetic):\n    * Muon\n" in text
    assert "* Refused with DeepSpeed 2.0 (no stage = 1 or 2):\n    * fp32\n    * bf16\n" in text
    assert "torch 9.9; hash of the files that were run: code;" in text


TABLE = """\
words | with a bar

| feature | stage | DeepSpeed | all-host |
|---|---|---|---|
| fp32 | 3 | 0.1, 0.2 | 1, 2 |
| Muon | 3 |  |  |

| saved by | stock | dynamic |
|---|---|---|
| stock |  | 1 |
"""


def test_a_row_names_the_releases_in_which_it_was_equal():
    def of(release, **features):
        return {Cell(EQUALITY, "3.11", release): result(features=features)}

    releases = ("0.1", "0.2", "0.3")
    assert documents.with_releases(TABLE, {}, releases) == TABLE
    more = documents.with_releases(TABLE, of("0.3", fp32=True, Muon=True), releases)
    assert "| fp32 | 3 | 0.1, 0.2, 0.3 | 1, 2 |" in more
    assert "| Muon | 3 | 0.3 |  |" in more
    # What was equal before and is not any more, or with another Python, is not named.
    other = {Cell(EQUALITY, "3.12", "0.1"): result(features={"fp32": True})}
    less = documents.with_releases(TABLE, of("0.1", fp32=False) | other, releases)
    assert "| fp32 | 3 | 0.2 | 1, 2 |" in less
    refused = {Cell(EQUALITY, "3.11", "0.2"): result(refused={"fp32": "why"})}
    assert "| fp32 | 3 | 0.1 | 1, 2 |" in documents.with_releases(TABLE, refused, releases)
    # A release that is not among those supported is named all the same.
    assert "| fp32 | 3 | 0.2, 0.1 | 1, 2 |" in documents.with_releases(TABLE, {}, ("0.2",))
    assert less.splitlines()[-3:] == TABLE.splitlines()[-3:]


def test_the_table_in_docs_keeps_its_form():
    text = documents.EQUALITY_TABLE.read_text()
    assert documents.with_releases(text, {}, CHECKED_VERSIONS) == text


def test_the_document_has_a_place_for_every_supported_version():
    text = documents.COMPATIBILITY.read_text()
    cells = all_cells(CHECKED_VERSIONS)
    empty = documents.compatibility(cells, {})
    rows = [line.split("|")[1] for line in empty.splitlines() if line.startswith("|")]
    assert [line.split("|")[1] for line in text.splitlines() if line.startswith("|")] == rows
    assert {line for line in text.splitlines() if "| Python " in line} == {
        line for line in empty.splitlines() if "| Python " in line
    }


def test_versions_are_those_that_set_up_accepts_and_pins():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pythons = list(cells_module.trainers_by_python())
    named = [
        line.rpartition(" ")[2] for line in project["project"]["classifiers"] if "Python ::" in line
    ]
    assert pythons == named
    for python, megatrons in cells_module.trainers_by_python().items():
        pins = environments.pins(python)
        assert pins["megatron-core"] == megatrons[-1]
        assert pins["deepspeed"] == CHECKED_VERSIONS[-1]


def test_reports_of_all_ranks_and_numbers_of_ranks_are_put_together():
    def report(controls=(), refused=(), left_out=(), **comparisons):
        found = {name.replace("_", " | "): differs for name, differs in comparisons.items()}
        others = {"controls": controls, "refused": refused, "left_out": left_out}
        return {"comparisons": found, **{name: dict(given) for name, given in others.items()}}

    controls = {"STEPPED": ["loss"], "PREFETCHED": []}
    alone = report(controls, {"z": "why"}, {"y": 4}, a_p=[], a_q=[], b_p=[])
    first, second = report(a_p=[], b_p=[]), report(a_p=[], b_p=["norm"])
    assert summary({1: [alone], 2: [first, second]}) == {
        "equal": {"1": 3, "2": 1},
        "different": ["1 ranks: without PREFETCHED", "2 ranks: b | p"],
        "refused": {"y": "that release does not have it", "z": "why"},
        "features": {"a": True, "b": False},
    }


@pytest.fixture
def built(tmp_path, monkeypatch):
    monkeypatch.setattr(cells_module, "BUILT", tmp_path)
    monkeypatch.setattr(environments, "BUILT", tmp_path)
    return tmp_path


def keep(cell, kept):
    path = cells_module._path(cell)
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(asdict(kept)))


def test_results_of_other_code_do_not_count(built):
    keep(OLD, Result(code_of(EQUALITY), VERSIONS, {"1": 3}))
    keep(NEW, Result("of an older plugin", VERSIONS, {"1": 3}))
    keep(GPT, Result(code_of(EQUALITY), VERSIONS, {"1": 3}))
    assert list(stored([OLD, NEW, GPT])) == [OLD]


def test_code_is_told_apart_by_the_plugin_the_cases_and_the_trainers(tmp_path, monkeypatch):
    monkeypatch.setattr(cells_module, "SOURCE_FOLDER", tmp_path)
    plugin = tmp_path / "src" / "deep_optimizer_states" / "zero3" / "a.py"
    case = tmp_path / "tests" / "integration" / "engine" / "cases_moe.py"
    trainer = tmp_path / "launch" / "trainer" / "loop.py"
    seen = []
    for path in (plugin, case, trainer):
        path.parent.mkdir(parents=True)
        path.write_text("first")
        seen.append((code_of(EQUALITY), code_of(TRAINER)))
    assert len({equality for equality, _ in seen}) == 2  # the trainer's loop is none of its own
    assert len({trainers for _, trainers in seen}) == 2  # nor a case of the table


@pytest.fixture
def ran(built, monkeypatch):
    """Names of the cells that were run; a cell of DeepSpeed 1.0 fails."""
    names = []

    def run_cell(cell):
        names.append(cell.name)
        made = Result(
            code_of(cell.kind), VERSIONS, reason="broken" if cell.deepspeed == "1.0" else ""
        )
        keep(cell, made)
        return made

    monkeypatch.setattr(command, "run_cell", run_cell)
    monkeypatch.setattr(command, "CHECKED_VERSIONS", ("1.0", "2.0"))
    monkeypatch.setattr(documents, "COMPATIBILITY", built / "compatibility.md")
    monkeypatch.setattr(documents, "EQUALITY_TABLE", built / "equality.md")
    (built / "equality.md").write_text(TABLE)
    return names


def test_a_call_goes_on_where_one_was_stopped_and_runs_again_what_failed(ran, built):
    only = ["--python", OWN_PYTHON, "--deepspeed", "1.0", "--deepspeed", "2.0"]
    assert command.main(only) == 1
    assert ran == [OLD.name, NEW.name]
    assert command.main(only) == 1
    assert ran[2:] == [OLD.name]
    assert command.main([*only[:2], "--deepspeed", "2.0", "--again"]) == 0
    assert ran[3:] == [NEW.name]
    assert f"* {OLD.name}: broken" in (built / "compatibility.md").read_text()


def test_a_call_that_is_stopped_keeps_what_it_has_and_says_that_it_goes_on(
    ran, built, monkeypatch, capsys
):
    run_cell = command.run_cell

    def stopped(cell):
        if cell == NEW:
            raise KeyboardInterrupt
        return run_cell(cell)

    monkeypatch.setattr(command, "run_cell", stopped)
    assert command.main(["--python", OWN_PYTHON]) == 130
    assert capsys.readouterr().out.splitlines()[-1] == "stopped; the same command goes on"
    assert f"* {OLD.name}: broken" in (built / "compatibility.md").read_text()


def test_single_cells_are_chosen_by_their_versions(ran):
    def chosen(*options):
        ran.clear()
        command.main(["--python", OWN_PYTHON, *options])
        return [name.partition(",")[0] for name in ran]

    megatron, *others = cells_module.trainers_by_python()[OWN_PYTHON]
    assert chosen("--deepspeed", "2.0") == [EQUALITY]
    assert chosen("--megatron-core", megatron) == [TRAINER]
    # What failed or was not chosen, and not again what is done.
    assert chosen() == [EQUALITY, *[TRAINER] * len(others)]


def test_versions_that_no_cell_has_are_said_in_a_line(ran, capsys):
    assert command.main(["--deepspeed", "0.1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("no cell has these versions; there are: equality, Python 3.11")
    assert said.count("\n") == 1
    assert ran == []


def test_a_python_that_is_not_there_is_left_out_and_missed_only_when_asked_for(
    ran, monkeypatch, capsys
):
    other = next(python for python in cells_module.trainers_by_python() if python != OWN_PYTHON)
    monkeypatch.setattr(command, "find_interpreter", lambda python: "")
    assert command.main(["--deepspeed", "2.0"]) == 0
    assert ran == [NEW.name]
    assert f"left out, no python{other} on PATH that runs" in capsys.readouterr().out
    assert command.main(["--deepspeed", "2.0", "--python", other]) == 1


def test_two_ranks_are_compared_with_one_python_and_one_rank_with_each():
    first, *others = cells_module.trainers_by_python()
    assert Cell(EQUALITY, first, "1.0").ranks == (1, 2)
    assert others
    assert all(Cell(EQUALITY, python, "1.0").ranks == (1,) for python in others)


@pytest.fixture
def steps(built, monkeypatch):
    """Steps of making environments, by the names of their logs; each does nothing."""
    done = []

    def do(arguments, name, variables):
        done.append(name)
        if name.startswith("venv-"):
            packages = Path(arguments[-1]) / "lib" / "python3" / "site-packages"
            assert not packages.exists()
            packages.mkdir(parents=True)

    monkeypatch.setattr(environments, "_do", do)
    return done


def test_only_releases_that_set_up_does_not_install_are_laid_over_its_environment(steps, built):
    own = environments.pins(OWN_PYTHON)
    plain = environments.make(OWN_PYTHON, {"deepspeed": own["deepspeed"]})
    assert plain.folder == plain.base
    assert steps == []
    name = f"python-{OWN_PYTHON}-deepspeed-0.1"
    releases = {"deepspeed": "0.1", "megatron-core": own["megatron-core"]}
    made = environments.make(OWN_PYTHON, releases)
    assert made.folder == built / name
    assert steps == [f"venv-{name}", f"pip-{name}", f"ops-{name}"]
    (path,) = made.folder.rglob("base.pth")
    assert str(ROOT / "src") in path.read_text().split()
    # Python 3.12 and later has distutils only by a line that setuptools leaves among the packages.
    program = f"import site, sys; site.addsitedir({str(path.parent)!r}); print(*sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", program]
    modules = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "_distutils_hack" in modules.split()
    assert made.variables()["TORCH_EXTENSIONS_DIR"] == str(made.folder / "torch_extensions")
    # Without a DeepSpeed of its own it has the ops that set-up built, which a look makes sure of.
    steps.clear()
    other = environments.make(OWN_PYTHON, {"deepspeed": own["deepspeed"], "megatron-core": "0.1"})
    assert [step.partition("-")[0] for step in steps] == ["venv", "pip", "ops"]
    assert other.variables()["TORCH_EXTENSIONS_DIR"] == str(other.base / "torch_extensions")


def test_an_environment_whose_making_was_killed_is_made_anew(steps, built, monkeypatch):
    do = environments._do

    def killed(arguments, name, variables):
        do(arguments, name, variables)
        if name.startswith("pip-"):
            raise KeyboardInterrupt

    monkeypatch.setattr(environments, "_do", killed)
    with pytest.raises(KeyboardInterrupt):
        environments.make(OWN_PYTHON, {"deepspeed": "0.1"})
    monkeypatch.setattr(environments, "_do", do)
    steps.clear()
    environments.make(OWN_PYTHON, {"deepspeed": "0.1"})
    assert [step.partition("-")[0] for step in steps] == ["venv", "pip", "ops"]
    # Its ops are looked at each time.
    steps.clear()
    environments.make(OWN_PYTHON, {"deepspeed": "0.1"})
    assert [step.partition("-")[0] for step in steps] == ["ops"]


@pytest.mark.parametrize(
    ("says", "kind"),
    [
        ("ERROR: No matching distribution found for deepspeed==0.1", IndexUnreachableError),
        ("error: subprocess-exited-with-error", EnvironmentFailedError),
    ],
)
def test_a_step_that_fails_says_its_last_line_and_where_the_rest_is(built, says, kind):
    with pytest.raises(EnvironmentFailedError, match=says) as raised:
        environments._do(["sh", "-c", f"echo '{says}'; exit 3"], "pip-x", None)
    assert raised.type is kind
    assert str(built / "pip-x.log") in str(raised.value)


def test_a_cell_whose_environment_has_another_release_is_not_run(built, monkeypatch):
    monkeypatch.setattr(
        environments, "make", lambda python, releases: Environment(built, built, built)
    )
    monkeypatch.setattr(cells_module, "versions_of", lambda environment: VERSIONS)
    ran = {"equal": {"1": 3}}
    monkeypatch.setattr(cells_module, "run_equality", lambda *arguments: ran)
    assert cells_module.run_cell(OLD).equal == {"1": 3}
    wrong = cells_module.run_cell(NEW)
    assert not wrong.equal
    assert "the environment has" in wrong.reason
    assert stored([OLD, NEW])[NEW].reason == wrong.reason
