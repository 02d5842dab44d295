"""Runs of a sweep, ended in every way by the fake trainer."""

import fcntl
import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from processes import wait_for

from configs.study import make_point
from configs.sweep import make_sweep
from deep_optimizer_states.predict.memory import GIB
from launch import sweep_runner, task as task_module
from launch.cli import Asked
from launch.feasibility import DTYPE_TEXT, NO_PRODUCT, Estimate, Host
from launch.preview import dry_run
from launch.process.live import LiveLine
from launch.process.machine_lock import LOCK_VARIABLE
from launch.records import Driver, Status
from launch.sweep import main
from launch.sweep_runner import Progress, Request, run_all
from parse.records import LogError

NAMES = ["tiny stock", "tiny all-host", "tiny stride 2"]
TWO = {"name": "two", "model": "tiny", "engines": [{"engine": ["stock", "gpu-only"]}]}
CPU = Host(20 * GIB)


@pytest.fixture(autouse=True)
def own_lock(tmp_path, monkeypatch):
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "lock"))


def index_of(plan):
    return json.loads((plan.folder / "sweep.json").read_text())


def test_a_run_that_fails_does_not_stop_the_others(plan, fake_trainer, capsys):
    the_plan = plan(fake_trainer("all-host=fail"))
    progress = run_all(the_plan, Request())
    assert (progress.ok, progress.failed, progress.stop_signal) == (2, 1, 0)
    assert [run["status"] for run in index_of(the_plan)["runs"]] == ["ok", "failed", "ok"]
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("sweep 'basic': 3 points, about ")
    assert out[1] == "[1/3] tiny stock: started"
    assert out[2].startswith("[1/3] tiny stock: ok in ")
    assert out[2].endswith("last loss 7.0")
    assert "ValueError: the trainer's own words" in out[4]


def test_what_no_run_executes_makes_no_result_old(plan, fake_trainer, monkeypatch):
    """A commit of documents, files of the user's in the checkout."""
    facts = task_module.identity.machine_and_checkout()
    for commit in ("1", "2"):
        git = {"git": {"commit": commit, "dirty": True, "changes_sha256": commit}}
        monkeypatch.setattr(
            task_module.identity, "machine_and_checkout", lambda git=git: facts | git
        )
        progress = run_all(plan(fake_trainer("ok")), Request())
    assert (progress.ok, progress.done) == (0, 3)
    assert progress.text(3) == "3 runs: 3 ok before and not run again"
    progress.ok = progress.running = 1
    assert progress.text(5).endswith(
        ": 1 ok, 3 ok before and not run again, 1 running in another call"
    )
    assert Progress(failed=2).text(2) == "2 runs: 0 ok, 2 failed"


def test_changed_code_is_named_when_a_point_is_run_again(plan, fake_trainer, monkeypatch, capsys):
    code, why = {"launch/train_loop/loop.py": "0"}, "code changed: launch/train_loop/loop.py"
    monkeypatch.setattr(task_module.identity, "code_of", lambda _entries: code)
    run_all(plan(fake_trainer("ok")), Request())
    assert "[1/3] tiny stock: started\n" in capsys.readouterr().out
    code["launch/train_loop/loop.py"] = "1"
    run_all(plan(fake_trainer("ok")), Request(chosen=frozenset()))
    runs = index_of(plan(fake_trainer("ok")))["runs"]
    assert [run["older"] for run in runs] == [why] * 3
    progress = run_all(plan(fake_trainer("ok")), Request())
    assert (progress.ok, progress.done) == (3, 0)
    assert f"[1/3] tiny stock: started: {why} (since log-" in capsys.readouterr().out
    assert not any("older" in run for run in index_of(plan(fake_trainer("ok")))["runs"])


def test_a_point_whose_log_is_gone_is_run_again(plan, fake_trainer, capsys):
    run_all(plan(fake_trainer("ok")), Request())
    the_plan = plan(fake_trainer("ok"))
    first = index_of(the_plan)["runs"][0]
    (the_plan.folder / first["run_dir"] / first["log"]).unlink()
    capsys.readouterr()
    progress = run_all(the_plan, Request())
    assert (progress.ok, progress.done) == (1, 2)
    words = f"[1/3] tiny stock: started: its log is missing ({first['run_dir']})\n"
    assert words in capsys.readouterr().out
    assert (the_plan.folder / first["run_dir"] / "run.json").is_file()
    assert index_of(the_plan)["runs"][0]["run_dir"].endswith("/run-002")


def test_again_runs_everything_and_the_index_lists_the_newest(plan, fake_trainer, capsys):
    the_plan = plan(fake_trainer("ok"))
    for again in (False, True):
        run_all(the_plan, Request(again=again))
    index = index_of(the_plan)
    assert (index["schema_version"], index["name"]) == (2, "basic")
    assert [run["name"] for run in index["runs"]] == NAMES
    assert [run["engine"] for run in index["runs"]] == ["stock", "all-host", "stride"]
    assert [point["name"] for point in index["points"]] == NAMES
    for run in index["runs"]:
        assert run["run_dir"].endswith("/run-002")
        assert (the_plan.folder / run["run_dir"] / run["log"]).is_file()
        saved = json.loads((the_plan.folder / run["run_dir"] / "run.json").read_text())
        assert make_point(saved["point"]).engine == run["engine"]


def test_a_run_that_ends_without_having_trained_has_failed(plan, fake_trainer, capsys):
    how = "stock=nan,all-host=frozen,stride=falls"
    the_plan = plan(fake_trainer(how))
    progress = run_all(the_plan, Request())
    assert (progress.ok, progress.failed) == (1, 2)
    assert [run["status"] for run in index_of(the_plan)["runs"]] == ["nan", "frozen", "ok"]
    out = capsys.readouterr().out
    assert "[1/3] tiny stock: nan in " in out
    assert "; ended, but its loss is nan from iteration 3; see " in out
    assert "; ended, but its loss is frozen at 7.0 from iteration 2; see " in out
    status = next(the_plan.folder.glob("log-*async1-opt_gaps0/run-001/status.json"))
    record = json.loads(status.read_text())
    assert (record["status"], record["exit_code"]) == ("frozen", 1)
    assert run_all(plan(fake_trainer("falls")), Request()).ok == 2


def test_a_log_that_cannot_be_judged_says_nothing_against_a_run(plan, fake_trainer, monkeypatch):
    def unreadable(path):
        raise LogError(f"{path}: cannot be read")

    monkeypatch.setattr("launch.postprocess.read_log", unreadable)
    assert run_all(plan(fake_trainer("stock=nan")), Request()).ok == 3


def test_a_damaged_index_is_made_anew(plan, fake_trainer):
    asked = Asked(["--lr", "1e-4"], {"lr": "1e-4"})
    the_plan = replace(plan(fake_trainer("ok")), asked=asked)
    run_all(the_plan, Request())
    (the_plan.folder / "sweep.json").write_text('{"points": ')
    assert run_all(the_plan, Request()).done == 3
    assert len(index_of(the_plan)["runs"]) == 3
    assert index_of(the_plan)["asked"] == {"options": ["--lr", "1e-4"], "fields": {"lr": "1e-4"}}


def test_repeats_alternate(plan, fake_trainer, capsys):
    sweep = make_sweep(
        {"name": "r", "model": "tiny", "repeats": 2, "engines": [{"engine": "v"}, {"engine": "a"}]}
    )
    the_plan = plan(fake_trainer("ok"), sweep)
    run_all(the_plan, Request())
    runs = index_of(the_plan)["runs"]
    assert [(run["engine"], run["repeat"]) for run in runs] == [
        ("stock", 1),
        ("all-host", 1),
        ("stock", 2),
        ("all-host", 2),
    ]
    assert "[3/4] tiny stock repeat 2: started" in capsys.readouterr().out


def test_a_point_that_does_not_fit_is_left_out_and_the_others_run(plan, fake_trainer, capsys):
    grid = {"dp": [1, 64], "accumulation": 1}
    big = make_sweep({"name": "big", "model": "tiny", "grid": grid, "engines": [{"engine": "v"}]})
    progress = run_all(plan(fake_trainer("ok"), big, Host(8 * GIB)), Request())
    assert (progress.ok, progress.unfit, progress.failed) == (1, 1, 0)
    assert "left out: about" in capsys.readouterr().out


@pytest.fixture
def clock(monkeypatch):
    """The clock of the runner, in s; nothing but the test lets it pass."""
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(sweep_runner, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def test_with_too_little_time_left_a_point_is_left_out_and_says_so(
    plan, fake_trainer, clock, capsys
):
    the_plan, request = plan(fake_trainer("ok")), Request(deadline_s=10_000)
    assert run_all(the_plan, request).ok == 3
    # Their times are known now; so many seconds are left as no run takes.
    clock.s = 10_000 - 1e-9
    progress = run_all(the_plan, replace(request, again=True))
    assert (progress.ok, progress.unfit, progress.failed) == (0, 3, 0)
    assert "left out: it takes about" in capsys.readouterr().out.splitlines()[-1]
    assert [run["status"] for run in index_of(the_plan)["runs"]] == ["ok", "ok", "ok"]


def test_a_rough_estimate_gives_way_to_the_runs_of_this_call(
    plan, fake_trainer, clock, monkeypatch
):
    monkeypatch.setattr(sweep_runner, "estimate", lambda *_: Estimate(5.0, "rough"))
    tasks, later = [], []

    def executed(task, _options, live):
        tasks.append(task)
        return SimpleNamespace(
            status=Status("ok", seconds=30.0),
            folder=SimpleNamespace(last_loss=lambda: 1.0),
            stop_signal=None,
        )

    class Live(LiveLine):
        def __init__(self, head, iterations, later_s):
            later.append(later_s)
            super().__init__(head, iterations, later_s)

    monkeypatch.setattr(sweep_runner, "execute", executed)
    monkeypatch.setattr(sweep_runner, "LiveLine", Live)
    progress = run_all(plan(fake_trainer("ok")), Request(deadline_s=20.0))
    assert (len(tasks), progress.ok, progress.unfit) == (1, 1, 2)
    run_all(plan(fake_trainer("ok")), Request())
    assert later == [10.0, 10.0, 30.0, None], "a guess, then what this call's first run took"


def test_a_run_is_ended_when_the_time_is_up(plan, fake_trainer, clock, monkeypatch):
    the_plan = plan(fake_trainer("hang"))
    given = []

    def executed(_task, options, _live):
        given.append(options.timeout_s)
        raise OSError("not started here")

    monkeypatch.setattr(sweep_runner, "execute", executed)
    run_all(the_plan, Request(deadline_s=500.0))
    timed = replace(the_plan, options=replace(the_plan.options, timeout_s=60.0))
    run_all(timed, Request(deadline_s=500.0))
    assert given == [500.0] * 3 + [60.0] * 3


def test_equal_points_of_another_sweep_stand_for_this_ones(plan, fake_trainer):
    first = plan(fake_trainer("ok"))
    run_all(first, Request())
    iterations = first.points[0].iterations
    other = make_sweep(
        {"name": "other", "model": "tiny", "point": {"dp": 1, "iterations": iterations},
         "engines": [{"engine": "v"}]}
    )  # fmt: skip
    the_plan = plan(fake_trainer("fail"), other)
    progress = run_all(the_plan, Request(shared=(first.folder, the_plan.folder)))
    assert progress.done == 1
    (run,) = index_of(the_plan)["runs"]
    assert run["run_dir"].startswith("../basic/")
    assert (the_plan.folder / run["run_dir"] / run["log"]).is_file()


def test_a_folder_that_cannot_be_written_costs_no_other_point(plan, fake_trainer, capsys):
    the_plan = plan(fake_trainer("ok"))
    stem = the_plan.points[0].log_name.removesuffix(".log")
    the_plan.folder.mkdir(parents=True)
    (the_plan.folder / stem).write_text("a file in the way")
    progress = run_all(the_plan, Request())
    assert (progress.ok, progress.failed) == (2, 1)
    assert "not started: results folder" in capsys.readouterr().out


def test_a_dry_run_says_which_points_would_run_and_why(plan, fake_trainer, capsys, monkeypatch):
    the_plan = plan(fake_trainer("stride=fail"))
    run_all(the_plan, Request(chosen=frozenset(NAMES[1:])))
    capsys.readouterr()
    dry_run(the_plan, NAMES, Request())
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("runs ")] == [
        "runs     yes: never run before",
        f"runs     no: done before ({the_plan.points[1].log_name[:-4]}/run-001)",
        f"runs     yes: failed before ({the_plan.points[2].log_name[:-4]}/run-001)",
    ]
    assert "sweep 'basic': 3 points, 2 of 3 runs left, about " in out
    dry_run(the_plan, NAMES[1:2], Request(chosen=frozenset(NAMES[1:2])))
    assert "sweep 'basic': 1 of 3 points, none is left to run" in capsys.readouterr().out
    monkeypatch.setattr(task_module.identity, "code_of", lambda _entries: {"x.py": "1"})
    dry_run(the_plan, NAMES[1:2], Request(chosen=frozenset(NAMES[1:2])))
    assert "runs     yes: code changed: " in capsys.readouterr().out


@pytest.mark.usefixtures("plan")
def test_a_sweep_that_goes_on_in_another_type_says_so_and_mixes_nothing(
    fake_trainer, tmp_path, monkeypatch, capsys
):
    def call(machine, *words):
        monkeypatch.setattr("launch.sweep.probe_machine", lambda: machine)
        given = ["--results-dir", str(tmp_path / "r"), "--trainer-module", fake_trainer("ok")]
        assert main([*given, "--no-report", *words]) == 0
        small, *lines = capsys.readouterr().out.splitlines()
        assert "runs in its small form" in small
        return lines

    assert not call(CPU, "--only", "stock")[0].startswith("type")
    slow = replace(CPU, half_types=frozenset)
    out = call(slow)
    assert out[0] == DTYPE_TEXT
    assert out[1].startswith("sweep 'basic': 3 points, ")
    where = next((tmp_path / "r" / "basic").glob("log-*flush_async0*")).name
    assert out[2] == "[1/3] tiny stock: started"
    assert "[2/3] tiny all-host: started" in out
    folder = tmp_path / "r" / "basic"
    runs = json.loads((folder / "sweep.json").read_text())["runs"]
    saved = [json.loads((folder / r["run_dir"] / "run.json").read_text()) for r in runs]
    assert [(run["point"]["dtype"], run["dtype_reason"]) for run in saved] == [
        ("fp32", NO_PRODUCT)
    ] * 3
    first = json.loads((folder / where / "run-001" / "run.json").read_text())
    assert (first["point"]["dtype"], first["dtype_reason"]) == ("bf16", "")
    # What is done needs no words of how long it takes.
    assert call(slow)[1] == f"[1/3] tiny stock: done before ({where}/run-002)"


def test_why_a_point_was_left_out_stays_known(own, plan, fake_trainer, capsys):
    the_plan, reason = plan(fake_trainer("ok"), make_sweep(TWO, own)), "needs a GPU, and this run"
    progress = run_all(the_plan, Request())
    assert progress.text(2) == "2 runs: 1 ok, 1 left out"
    assert f"[2/2] tiny gpu-only: left out: {reason}" in capsys.readouterr().out
    assert list(the_plan.folder.glob("log-*gpu-only*")) == []
    run_all(the_plan, Request(chosen=frozenset({"tiny stock"})))
    known = [point.get("skipped", "") for point in index_of(the_plan)["points"]]
    assert known == ["", f"{reason} has none"]


def test_the_index_of_the_second_has_what_the_first_still_ran(plan, fake_trainer, tmp_path, capsys):
    """The first has the turn, and its last run going on, when the second begins."""
    the_plan, went = plan(fake_trainer("ok")), []
    run_all(the_plan, Request())
    path = next(the_plan.folder.glob("*/run-001/status.json"))
    done = json.loads(path.read_text())
    driver = vars(Driver.this_process("0" * 32))
    path.write_text(json.dumps({**done, "status": "running", "driver": driver}))
    with (tmp_path / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=lambda: went.append(run_all(the_plan, Request())))
        thread.start()
        said = []
        wait_for(lambda: said.append(capsys.readouterr().out) or "its turn" in "".join(said))
        path.write_text(json.dumps(done))
    thread.join()
    assert (went[0].failed, went[0].done) == (0, 3)
    assert {run["status"] for run in index_of(the_plan)["runs"]} == {"ok"}


def test_a_long_sweep_names_shorter_forms_beforehand(plan, fake_trainer, capsys):
    def last_line(**changes):
        points = [p.model_copy(update={n: f(i) for n, f in changes.items()})
                  for i, p in enumerate(the_plan.points)]  # fmt: skip
        dry_run(replace(the_plan, points=tuple(points)), NAMES, Request())
        return capsys.readouterr().out.splitlines()[-1]

    the_plan = plan(fake_trainer("ok"))
    others = "--iterations N, or --minutes 5 (the runs that are likely to end by then)"
    assert last_line(iterations=lambda _: 4000).endswith(f"; shorter: {others}")
    found = last_line(iterations=lambda _: 4000, seed=lambda i: 7 + i)
    assert f'; shorter: --only "seed 7" (one of 3 seeds), {others}' in found
    assert "shorter" not in last_line()
    assert main(["--study", "optimus-cc", "--device", "cpu", "--dry-run"]) == 0
    found = capsys.readouterr().out.splitlines()[-1]
    assert '; shorter: --only "seed 1" (one of 3 seeds, too few for the gate), ' in found
