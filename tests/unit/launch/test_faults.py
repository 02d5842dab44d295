"""A call that fails anywhere in a sweep: the next one goes on, and keeps nothing wrong."""

import json
import re
import shutil
import traceback

import pytest
from faults import MARK, Watch, draw, points_of

from configs.files import ROOT
from configs.sweep import make_sweep
from launch.process.machine_lock import LOCK_VARIABLE
from launch.sweep_runner import Request, run_all

ONE = {"name": "one", "model": "tiny", "engines": [{"engine": "stock"}]}
ERRORS = ("MemoryError", "OSError", "RuntimeError", "KeyboardInterrupt")
ANSWERS = (
    r"^OSError at process/supervise.py:Members\._has, ",  # a process that ended meanwhile
    r"^OSError at launchers.py:(_keep|free_port, before (bind|getsockname))",  # it is taken
    r"^OSError at records.py:disk_is_full, before statvfs",  # nobody knows
    # A file that is not made yet, a process that is gone.
    r"^OSError at process/watch.py:(GrowingFile\.|_name|_text_of)",
    r"^OSError at process/live.py:.* before (write|flush)",  # nobody reads the line
)
"""Errors that say something which the code asks for, so that nobody need be told of them."""


@pytest.fixture
def play(plan, fake_trainer, tmp_path, monkeypatch):
    """``play(POINT)`` -> the watch, and the progress or the error of one call of the sweep."""
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "lock"))
    trainer = fake_trainer("ok")

    def run(point=None):
        kind = lambda name: "main" if name == "MainThread" else "beside"  # noqa: E731
        the_plan = plan(trainer, make_sweep(ONE))
        with Watch(ROOT / "launch", kind, point) as watch:
            try:
                told = run_all(the_plan, Request())
            except BaseException as error:  # noqa: BLE001 - whatever comes of it
                traceback.clear_frames(error.__traceback__)  # or it keeps what they had open
                told = error
        return watch, told, the_plan.folder

    return run


@pytest.mark.own_process  # files that nobody has closed are no matter of the next test
@pytest.mark.parametrize("number", [8, pytest.param(400, marks=pytest.mark.exhaustive)])
def test_a_sweep_that_was_cut_short_goes_on(play, number, capfd):
    watch, told, folder = play()
    assert told.ok == 1, told
    points = [
        it
        for it in points_of(watch.counts, ERRORS)
        if not any(re.search(answer, str(it)) for answer in ANSWERS)
    ]
    # Which are drawn depends on what this process has cached; the last word of a run is always one.
    last_word = [it for it in points if "record_end" in it.place.function][:1]
    wrong = []
    for point in [*last_word, *draw(points, number)]:
        shutil.rmtree(folder, ignore_errors=True)
        watch, told, folder = play(point)
        if not watch.is_fired:
            continue
        output = "".join(capfd.readouterr()) + "".join(
            path.read_text() for path in folder.rglob("*") if path.suffix in (".json", ".log")
        )
        is_told = isinstance(told, BaseException) or MARK in output
        _, again, folder = play()
        if isinstance(again, BaseException):
            wrong.append((str(point), "stuck", repr(again)))
            continue
        index = json.loads((folder / "sweep.json").read_text())
        if [run["status"] for run in index["runs"]] != ["ok"]:
            wrong.append((str(point), "not ok", index["runs"]))
        for path in folder.glob("*/run-*/status.json"):
            status = json.loads(path.read_text())
            if status["status"] == "running":
                wrong.append((str(point), "kept", status))
        if not is_told:
            wrong.append((str(point), "silent", output[-500:]))
        left = [str(path) for path in folder.rglob(".*.*")]
        if left:
            wrong.append((str(point), "left", left))
    assert wrong == []
