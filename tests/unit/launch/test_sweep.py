import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.study import load_study, make_point
from configs.sweep import load_sweep, make_sweep
from deep_optimizer_states.predict.memory_need import GIB
from launch import sweep_runner, task as task_module
from launch.derive import derive
from launch.describe import describe
from launch.ds_json import deepspeed_config
from launch.fit.machine import Machine
from launch.fit.time_limit import TimeLimit
from launch.records.identity import data_facts
from launch.records.ledger import Choice
from launch.records.run_folder import Status
from launch.simulate import workloads
from launch.sweep import build_parser, choose_points, main, make_plan
from launch.sweep_runner import Plan, Progress, Request, run_all, summary
from launch.task import RunOptions
from launch.trainers.own import OwnTrainer

BASIC = load_sweep("basic")
CPU = Machine(20 * GIB)
GPU = Machine(160 * GIB, (80 * GIB,))


def planned(machine, *arguments, sweep=BASIC):
    return make_plan(sweep, build_parser().read(arguments), machine)


def models(plan):
    return {point.model.name for point in plan.points}


@pytest.mark.parametrize(
    ("machine", "arguments", "model"),
    [
        (CPU, [], "tiny"),
        (GPU, [], "7B"),
        (GPU, ["--device", "cpu"], "tiny"),
        (GPU, ["--size", "tiny"], "tiny"),
        (CPU, ["--model", "13B"], "13B"),
        (GPU, ["--model", "tiny"], "tiny"),
    ],
)
def test_auto_is_tiny_on_a_cpu_and_the_largest_that_fits_on_a_gpu(machine, arguments, model):
    assert models(planned(machine, *arguments)) == {model}


def test_a_cpu_runs_a_sweeps_small_form_and_shows_the_full_one_on_request():
    stride = load_sweep("stride")
    assert models(planned(CPU, sweep=stride)) == {"tiny"}
    assert models(planned(CPU, "--size", "full", sweep=stride)) == {"7B", "13B", "20B"}


def test_a_model_that_the_sweep_names_is_not_replaced_on_a_gpu():
    own = make_sweep({"name": "s", "model": "70B", "engines": [{"engine": "v"}]})
    assert models(planned(GPU, sweep=own)) == {"70B"}


def test_repeats_of_the_command_line_win():
    assert planned(CPU, "--repeats", "3").sweep.repeats == 3


NAMES = ["tiny vanilla", "tiny async-gradients", "tiny hybrid stride 2"]


@pytest.mark.parametrize(
    ("only", "index", "found"),
    [
        ([], None, NAMES),
        (["tiny vanilla"], None, NAMES[:1]),
        (["hybrid", "tiny v*"], None, [NAMES[0], NAMES[2]]),
        ([], 2, NAMES[1:2]),
    ],
)
def test_points_are_chosen_by_name_part_pattern_and_position(only, index, found):
    assert choose_points(planned(CPU).points, only, index) == found


@pytest.mark.parametrize(
    ("only", "index", "words"),
    [(["tiny vanila"], None, "did you mean 'tiny vanilla'"), ([], 4, "points 1 to 3")],
)
def test_what_names_no_point_is_refused(only, index, words):
    with pytest.raises(ConfigError, match=words):
        choose_points(planned(CPU).points, only, index)


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """The basic sweep on a file of data, with runs ended by the fake trainer."""
    for end in (".bin", ".idx"):
        (tmp_path / f"data{end}").write_bytes(b"tokens")
    monkeypatch.setattr(task_module, "data_prefix", lambda given: str(tmp_path / "data"))

    def make(trainer, sweep=BASIC, machine=CPU):
        points = sweep.points("tiny", {"device": "cpu"})
        options = RunOptions(tmp_path / "results", sweep.name, trainer=OwnTrainer(module=trainer))
        return Plan(sweep, tuple(points), machine, options)

    return make


def index_of(plan):
    return json.loads((plan.folder / "sweep.json").read_text())


def test_a_run_that_fails_does_not_stop_the_others(plan, fake_trainer, capsys):
    the_plan = plan(fake_trainer("async-gradients=fail"))
    progress = run_all(the_plan, Request())
    assert (progress.ok, progress.failed, progress.stop_signal) == (2, 1, 0)
    assert [run["status"] for run in index_of(the_plan)["runs"]] == ["ok", "failed", "ok"]
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "[1/3] tiny vanilla: started"
    assert out[1].startswith("[1/3] tiny vanilla: ok in ")
    assert out[1].endswith("last loss 7.0")
    assert "ValueError: the trainer's own words" in out[3]


def test_the_same_call_again_runs_what_is_missing_alone(plan, fake_trainer, capsys):
    run_all(plan(fake_trainer("async-gradients=fail")), Request())
    kept = run_all(plan(fake_trainer("ok")), Request(choice=Choice.RESUME))
    assert (kept.ok, kept.skipped) == (0, 3)
    the_plan = plan(fake_trainer("ok"))
    progress = run_all(the_plan, Request())
    assert (progress.ok, progress.skipped) == (1, 2)
    assert "[1/3] tiny vanilla: done before" in capsys.readouterr().out
    runs = index_of(the_plan)["runs"]
    assert [run["status"] for run in runs] == ["ok", "ok", "ok"]
    assert [run["run_dir"][-3:] for run in runs] == ["001", "002", "001"]


def test_changed_data_make_it_another_point(plan, fake_trainer, tmp_path):
    run_all(plan(fake_trainer("ok")), Request())
    (tmp_path / "data.bin").write_bytes(b"other tokens")
    progress = run_all(plan(fake_trainer("ok")), Request())
    assert (progress.ok, progress.skipped) == (3, 0)


def test_again_runs_everything_and_the_index_lists_the_newest(plan, fake_trainer, capsys):
    the_plan = plan(fake_trainer("ok"))
    for choice in (Choice.MISSING, Choice.AGAIN):
        run_all(the_plan, Request(choice=choice))
    index = index_of(the_plan)
    assert (index["schema_version"], index["name"]) == (2, "basic")
    assert [run["name"] for run in index["runs"]] == NAMES
    assert [run["engine"] for run in index["runs"]] == ["vanilla", "async-gradients", "hybrid"]
    assert [point["name"] for point in index["points"]] == NAMES
    for run in index["runs"]:
        assert run["run_dir"].endswith("/run-002")
        assert (the_plan.folder / run["run_dir"] / run["log"]).is_file()
        saved = json.loads((the_plan.folder / run["run_dir"] / "run.json").read_text())
        assert make_point(saved["point"]).engine == run["engine"]


def test_repeats_alternate(plan, fake_trainer, capsys):
    sweep = make_sweep(
        {"name": "r", "model": "tiny", "repeats": 2, "engines": [{"engine": "v"}, {"engine": "a"}]}
    )
    the_plan = plan(fake_trainer("ok"), sweep)
    run_all(the_plan, Request())
    runs = index_of(the_plan)["runs"]
    assert [(run["engine"], run["repeat"]) for run in runs] == [
        ("vanilla", 1),
        ("async-gradients", 1),
        ("vanilla", 2),
        ("async-gradients", 2),
    ]
    assert "[3/4] tiny vanilla repeat 2: started" in capsys.readouterr().out


def test_chosen_points_alone_are_run(plan, fake_trainer):
    the_plan = plan(fake_trainer("ok"))
    run_all(the_plan, Request(chosen=frozenset(NAMES[1:2])))
    assert [run["name"] for run in index_of(the_plan)["runs"]] == NAMES[1:2]


def test_a_point_that_does_not_fit_is_left_out_and_the_others_run(plan, fake_trainer, capsys):
    grid = {"dp": [1, 64], "accumulation": 1}
    big = make_sweep({"name": "big", "model": "tiny", "grid": grid, "engines": [{"engine": "v"}]})
    progress = run_all(plan(fake_trainer("ok"), big, Machine(8 * GIB)), Request())
    assert (progress.ok, progress.unfit, progress.failed) == (1, 1, 0)
    assert "left out: about" in capsys.readouterr().out


def test_with_too_little_time_left_a_point_is_left_out_and_says_so(plan, fake_trainer, capsys):
    the_plan, now = plan(fake_trainer("ok")), [0.0]
    limit = TimeLimit(10_000, lambda: now[0])
    assert run_all(the_plan, Request(time_limit=limit)).ok == 3
    # Their times are known now; so many seconds are left as no run takes.
    now[0] = 10_000 - 1e-9
    progress = run_all(the_plan, Request(choice=Choice.AGAIN, time_limit=limit))
    assert (progress.ok, progress.unfit, progress.failed) == (0, 3, 0)
    assert "left out: it takes about" in capsys.readouterr().out.splitlines()[-1]
    assert [run["status"] for run in index_of(the_plan)["runs"]] == ["ok", "ok", "ok"]


def test_a_run_is_ended_when_the_time_is_up(plan, fake_trainer):
    the_plan = plan(fake_trainer("hang"))
    given = []

    def executed(task, options, watch):
        given.append(options.timeout_s)
        raise OSError("not started here")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep_runner, "execute", executed)
        run_all(the_plan, Request(time_limit=TimeLimit(500, lambda: 0.0)))
        timed = replace(the_plan, options=replace(the_plan.options, timeout_s=60.0))
        run_all(timed, Request(time_limit=TimeLimit(500, lambda: 0.0)))
    assert given == [500.0] * 3 + [60.0] * 3


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf"])
def test_minutes_are_a_number_above_0(minutes):
    with pytest.raises(ConfigError, match="give a number of minutes above 0"):
        main(["--minutes", minutes])


def test_a_point_that_the_trainer_refuses_is_left_out_by_name(plan, fake_trainer, capsys):
    engines = [{"engine": "v", "zero_stage": 2}, {"engine": "hybrid", "stride": 2, "zero_stage": 2}]
    own = make_sweep({"name": "own", "model": "tiny", "engines": engines})
    progress = run_all(plan(fake_trainer("ok"), own), Request(memory_check=False))
    assert (progress.ok, progress.unfit, progress.failed) == (1, 1, 0)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "left out: " in line]
    assert "tiny hybrid stride 2: left out: zero_stage = 2: engine 'hybrid' needs" in line


def test_equal_points_of_another_sweep_stand_for_this_ones(plan, fake_trainer):
    first = plan(fake_trainer("ok"))
    run_all(first, Request())
    other = make_sweep(
        {"name": "other", "model": "tiny", "point": {"dp": 1}, "engines": [{"engine": "v"}]}
    )
    the_plan = plan(fake_trainer("fail"), other)
    progress = run_all(the_plan, Request(shared=(first.folder, the_plan.folder)))
    assert progress.skipped == 1
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


def test_data_is_known_by_its_content(tmp_path):
    for end in (".bin", ".idx"):
        (tmp_path / f"a{end}").write_bytes(b"x")
        (tmp_path / f"b{end}").write_bytes(b"x")
    facts = data_facts(str(tmp_path / "a"))
    assert facts == data_facts(str(tmp_path / "b"))
    assert facts[".bin"]["bytes"] == 1


def test_a_dry_run_makes_nothing(tmp_path, capsys):
    arguments = ["--dry-run", "--results-dir", str(tmp_path / "r"), "--device", "cpu"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out.count("point ") == 3
    assert out.count('"stage": 3') == 3
    assert '"policy": "all-host"' in out
    assert "predicted host" in out
    assert out.count("rough, from the rates of cpu-only") == 3
    assert "3 points, about" in out
    assert not (tmp_path / "r").exists()


def test_a_dry_run_says_what_is_not_predicted(tmp_path, capsys, monkeypatch):
    """A peer, that the performance model does not know, among engines that it knows."""

    def change(point):
        config = deepspeed_config(point)
        if "deep_optimizer_states" not in config:
            config["zero_optimization"]["offload_optimizer"]["super_offload"] = True
        return config

    monkeypatch.setattr(workloads, "deepspeed_config", change)
    words = ["--dry-run", "--results-dir", str(tmp_path / "r"), "--device", "cpu"]
    assert main([*words, "--iterations", "7"]) == 0  # other points than any predicted before
    out = capsys.readouterr().out
    assert out.count("predicted host") == 2
    why = "not predicted: offload_optimizer.super_offload = True: the performance model knows"
    assert f"memory   {why}" in out
    assert f"time     {why}" in out
    assert "; the time of 1 is not predicted and not in it)" in out


def test_all_sweeps_can_be_listed_and_dry_run(tmp_path, capsys):
    assert main(["--list"]) == 0
    out = capsys.readouterr().out
    for name in ("basic", "stride", "gpu-hogging", "tiny-hybrid"):
        assert f"  {name} " in out
    assert main(["--all", "--size", "full", "--model", "7B", "--list-points"]) == 0
    assert "7B hybrid stride 10" in capsys.readouterr().out


def test_a_full_dry_run_without_a_gpu_is_one_of_a_gpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("launch.sweep.probe_machine", lambda: CPU)
    words = ["--dry-run", "--sweep", "memory", "--results-dir", str(tmp_path / "r")]
    assert main([*words, "--size", "full"]) == 0
    out = capsys.readouterr().out
    assert out.count("(as on a GPU of profile h200x1; none here)") == 3
    assert out.count("rough, from the rates of h200x1") == 3
    assert "each GPU 0.0 GiB" not in out
    assert main([*words, "--size", "full", "--device", "cpu"]) == 0
    assert "h200x1" not in capsys.readouterr().out
    assert main(["--dry-run", "--size", "full", "--list-points"]) == 0
    assert "tiny" not in capsys.readouterr().out
    monkeypatch.setattr("launch.sweep.probe_machine", lambda: GPU)
    assert main([*words, "--size", "full"]) == 0
    assert "none here" not in capsys.readouterr().out


def test_a_report_of_nothing_makes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(task_module, "data_prefix", lambda _given: pytest.fail("data was made"))
    assert main(["--report-only", "--device", "cpu", "--results-dir", str(tmp_path / "r")]) == 2
    captured = capsys.readouterr()
    folder = tmp_path / "r" / "basic"
    assert captured.err == f"error: no run of sweep 'basic' in {folder}\n"
    assert captured.out == ""
    assert not folder.exists()


@pytest.mark.parametrize(
    ("codes", "said"),
    [
        ({"parse": 2}, "tables: exit code 2\n"),
        ({"parse.report": 2}, "report: exit code 2\nfigures  {}/figures\n"),
        ({"plots": 2}, "figures: exit code 2\nreport   {}/report.html\n"),
        ({"plots": 1, "parse.report": 1}, "figures: exit code 1\nreport: exit code 1\n"
         "report   {0}/report.html\nfigures  {0}/figures\n"),
    ],
)  # fmt: skip
def test_only_what_was_made_is_shown(codes, said, tmp_path, capsys, monkeypatch):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "loss.png").touch()

    started = []

    def run(command, **_options):
        started.append(command[2:])
        return subprocess.CompletedProcess(command, codes.get(command[2], 0))

    monkeypatch.setattr(subprocess, "run", run)
    assert derive(tmp_path, ["loss"]) == next(iter(codes.values()))
    # One step alone reads logs.
    assert started[0] == ["parse", str(tmp_path), "--out", str(tmp_path / "tables"), "--report"]
    assert all("--from-tables" in command for command in started if "report" in command[0])
    assert capsys.readouterr().out == said.format(tmp_path)


def test_every_sweep_and_one_of_them_cannot_both_be_meant():
    with pytest.raises(ConfigError, match="leave out --all or --sweep basic"):
        main(["--all", "--sweep", "basic"])


def test_data_that_are_not_there_are_named_before_a_run():
    point = make_point({"model": "tiny", "data_prefix": "/none/such"})
    with pytest.raises(ConfigError, match=r"no file '/none/such\.bin'"):
        describe(point, CPU, RunOptions(Path("r"), "single"))


def test_what_the_user_stopped_has_not_failed(plan, fake_trainer, monkeypatch, capsys):
    real = sweep_runner.execute

    def stopped(task, options, watch):
        outcome = real(task, options, watch)
        return replace(outcome, status=Status("interrupted", cause="SIGINT"), stop_signal=2)

    monkeypatch.setattr(sweep_runner, "execute", stopped)
    progress = run_all(plan(fake_trainer("ok")), Request())
    assert (progress.ok, progress.failed, progress.interrupted) == (0, 0, 1)
    assert summary(progress, 3) == "3 runs: 0 ok, 1 interrupted"
    assert summary(Progress(ok=1), 1) == "1 runs: 1 ok"


OWN = """
extends = "interleaved"
title = "engines of mine"
[engines.gpu-only]
title = "on a GPU"
tag = "G"
needs = ["gpu"]
"""


@pytest.fixture
def own(tmp_path):
    """A study with an engine that needs a GPU, and the paper's."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "study.toml").write_text(OWN)
    return load_study(tmp_path / "own")


TWO = {"name": "two", "model": "tiny", "engines": [{"engine": ["vanilla", "gpu-only"]}]}


def test_an_engine_that_cannot_run_here_is_skipped_and_fails_nothing(
    own, plan, fake_trainer, capsys
):
    the_plan = plan(fake_trainer("ok"), make_sweep(TWO, own))
    progress = run_all(the_plan, Request())
    assert (progress.ok, progress.unfit, progress.failed) == (1, 1, 0)
    assert summary(progress, 2) == "2 runs: 1 ok, 1 left out"
    reason = "needs a GPU, and this run has none"
    assert f"[2/2] tiny gpu-only: left out: {reason}" in capsys.readouterr().out
    assert [p.get("skipped") for p in index_of(the_plan)["points"]] == [None, reason]
    assert index_of(the_plan)["study"]["name"] == "own"
    assert list(the_plan.folder.glob("log-*gpu-only*")) == []
    # A call that runs another point alone keeps what is known of this one.
    run_all(the_plan, Request(chosen=frozenset({"tiny vanilla"})))
    assert [p.get("skipped") for p in index_of(the_plan)["points"]] == [None, reason]


def test_a_dry_run_says_which_engine_would_be_skipped(own, tmp_path, capsys):
    words = ["--study", str(own.folder), "--engines", "gpu-only", "--size", "tiny", "--dry-run"]
    assert main([*words, "--device", "cpu", "--results-dir", str(tmp_path / "r")]) == 0
    out = capsys.readouterr().out
    assert "--engines: 'vanilla' is added, which the others are held against" in out
    assert out.count("skipped  needs a GPU, and this run has none") == 1
    assert f"{tmp_path}/r/own/basic/" in out


def test_when_no_engine_can_run_the_reason_is_the_error(own, tmp_path):
    words = ["--study", str(own.folder), "--engines", "gpu-only", "--device", "cpu"]
    with pytest.raises(ConfigError, match="engine 'gpu-only': needs a GPU"):
        main([*words, "--only", "gpu-only", "--results-dir", str(tmp_path)])


def test_studies_are_listed_with_sweeps_points_and_engines(own, capsys):
    assert main(["--list"]) == 0
    shipped = capsys.readouterr().out
    assert shipped.startswith("study interleaved [default]: Deep Optimizer States")
    assert "    vanilla                  Stock DeepSpeed ZeRO-3" in shipped
    assert main(["--list", "--study", str(own.folder)]) == 0
    mine = capsys.readouterr().out
    assert mine.startswith("study own: engines of mine\n  sweeps (--sweep NAME)\n")
    assert "    gpu-only                 on a GPU (needs gpu)" in mine
    assert "    tiny-hybrid              tiny hybrid stride 2, 1 rank(s)" in mine


def test_all_sweeps_are_those_of_the_study(own, capsys):
    (own.folder / "sweeps").mkdir()
    (own.folder / "sweeps" / "mine.toml").write_text(
        'name = "mine"\nmodel = "tiny"\nengines = [{ engine = "gpu-only" }]\n'
    )
    assert main(["--study", str(own.folder), "--all", "--list-points"]) == 0
    assert "tiny gpu-only" in capsys.readouterr().out.splitlines()
