"""The sessions of tests/programs see differences, in a program that is a stand-in."""

import json
import runpy
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.exhaustive
FOLDER = Path(__file__).resolve().parents[1] / "programs"
PROGRAM = """
import json, pathlib, sys, torch
from safetensors.torch import save_file
block = json.loads(pathlib.Path("ds.json").read_text())["deep_optimizer_states"]
given = json.loads(sys.argv[1]) if sys.argv[2] == "plugin" else {}
assert block["enabled"]
if sys.argv[2] == "plugin" and given.get("line", True):
    print("deep_optimizer_states: this engine uses the plugin")
if "error" in given:
    raise ValueError(given["error"])
out = pathlib.Path("out")
losses = [{"loss": 2.0 + step, "grad_norm": 1.0 + step, "runtime": id(out)} for step in range(6)]
losses[-1]["loss"] += given.get("loss", 0)
(out / "trainer_state.json").write_text(json.dumps({"log_history": losses}))
save_file({"weight": torch.ones(3)}, out / "model.safetensors")
moments = torch.full((3,), 0.5)
moments[-1] += given.get("moment", 0)
torch.save({"state": {"exp_avg": moments}}, out / "rank_0_optim_states.pt")
"""


@pytest.fixture
def sessions(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    module = runpy.run_path(str(FOLDER / "__main__.py"), run_name="programs")
    yield module
    for name in ("inputs", "table"):
        sys.modules.pop(name, None)


def outcome(sessions, folder, expected=None, **given):
    """What a session says of a program that does ``given`` under the plugin."""
    table = sys.modules["table"]

    def command(run):
        engine = "plugin" if run.with_plugin else "stock"
        return [sys.executable, "-c", PROGRAM, json.dumps(given), engine], {}

    sessions["PROGRAMS"]["stand-in"] = table.Program(command, {"preset": {}})
    if expected is not None:
        sessions["EXPECTED"]["stand-in", "preset"] = ("", expected)
    return sessions["compare"]("stand-in", "preset", 1, folder)


def test_equal_runs_are_equal_whatever_their_times(sessions, tmp_path):
    assert outcome(sessions, tmp_path) == "equal (14 values)"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"loss": 2**-50}, "1 differ: .*loss"),
        ({"moment": 2**-24}, "1 differ: .*exp_avg"),
        ({"line": False}, "engines' lines"),
        ({"error": "no"}, "not expected: .*ValueError: no"),
    ],
)
def test_a_difference_is_seen(sessions, tmp_path, given, words):
    with pytest.raises(AssertionError, match=words):
        outcome(sessions, tmp_path, **given)


def test_an_error_is_accepted_word_for_word(sessions, tmp_path):
    said = outcome(sessions, tmp_path, expected="ValueError: no", error="no")
    assert said == "refused: `ValueError: no`"
    with pytest.raises(AssertionError, match="not expected"):
        outcome(sessions, tmp_path, expected="ValueError: no", error="nothing")


def test_a_row_replaces_that_of_its_own_case_alone(sessions, tmp_path):
    table, write = tmp_path / "programs.csv", sessions["write_row"]
    write.__globals__["TABLE"] = table
    table.write_text("program,preset,ranks,device,outcome\nb,p,1,CPU,kept\nb,p,2,CPU,old\n")
    for program, ranks, outcome in (("b", "2", "new"), ("a", "1", "added, and first")):
        row = {"program": program, "preset": "p", "ranks": ranks, "device": "CPU"}
        write(row | {"outcome": outcome})
    assert table.read_text().splitlines()[1:] == [
        'a,p,1,CPU,"added, and first"',
        "b,p,1,CPU,kept",
        "b,p,2,CPU,new",
    ]
