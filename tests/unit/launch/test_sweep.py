import subprocess
import sys
from types import SimpleNamespace

import pytest

from configs.errors import ConfigError
from configs.sweep import load_sweep, make_sweep
from deep_optimizer_states.predict.memory import GIB
from launch import run as run_command, task as task_module
from launch.choose import choose_points
from launch.cli import Asked, asked
from launch.ds_json import deepspeed_config
from launch.feasibility import Host
from launch.postprocess import derive
from launch.simulate import workloads
from launch.sweep import build_parser, main, make_plan
from parse.records import LogError

BASIC = load_sweep("basic")
CPU = Host(20 * GIB)
GPU = Host(160 * GIB, (80 * GIB,))


def planned(machine, *arguments, sweep=BASIC):
    return make_plan(sweep, build_parser(sweep.study).read(arguments), machine)


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


SMALL = "sweep 's' runs in its small form, since no GPU is used"
NAMED = {"grid": {"model": ["1.3B", "3B"]}}


@pytest.mark.parametrize(
    ("machine", "arguments", "table", "line"),
    [
        (CPU, [], NAMED, f"{SMALL}: model tiny in place of 1.3B, 3B; --size full keeps"),
        (GPU, ["--device", "cpu"], NAMED, f"{SMALL}: model tiny in place of 1.3B, 3B; --size"),
        (CPU, [], {}, f"{SMALL}: model tiny in place of the largest that fits; --size full"),
        (CPU, [], {"point": {"model": "tiny"}}, f"{SMALL}; --size full keeps"),
        (CPU, ["--size", "full"], NAMED, ""),
        (CPU, ["--size", "tiny"], NAMED, ""),
        (CPU, ["--model", "tiny"], NAMED, ""),
        (CPU, [], {"model": "tiny"}, ""),
        (GPU, [], NAMED, ""),
    ],
)
def test_a_plan_says_that_it_is_the_small_form_and_whose_place_that_takes(
    machine, arguments, table, line
):
    sweep = make_sweep({"name": "s", "engines": [{"engine": "stock"}], **table})
    form = planned(machine, *arguments, sweep=sweep).form
    assert form.startswith(line) if line else form == ""


def test_the_small_form_is_told_before_anything_else(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("launch.sweep.probe_machine", lambda: CPU)
    assert main(["--dry-run", "--results-dir", str(tmp_path / "r")]) == 0
    assert capsys.readouterr().out.startswith("sweep 'basic' runs in its small form, since no GPU ")


def set_points(*words, sweep=BASIC):
    given = build_parser(sweep.study).read(["--device", "cpu", *words])
    return make_plan(sweep, given, CPU).points


def test_a_field_of_every_run_is_set_from_the_command_line():
    assert planned(CPU, "--repeats", "3").sweep.repeats == 3
    assert {point.lr for point in set_points()} == {3e-4}
    assert {point.lr for point in set_points("--lr", "1e-4", "--clip-grad", "0")} == {1e-4}


def test_a_plan_knows_what_its_command_asks_for_in_place_of_the_sweeps_own():
    assert planned(CPU).asked == Asked()
    words = ["--size", "full", "--model", "tiny", "--repeats", "2", "--engines", "stock"]
    beside = ["--timeout", "9", "--log-to", "csv", "--only", "stock", "--again"]
    plan = planned(CPU, *words, *beside, "--subgroup-numel=200000")
    assert plan.asked.fields == {"subgroup_numel": "200000"}
    options = plan.asked.options
    assert sorted(options) == sorted([*words, "--subgroup-numel", "200000"])
    for options in (plan.asked.options, ["--megatron-flag=--a", "--megatron-flag", "b"]):
        again = build_parser(BASIC.study).read(options)
        assert asked(again, BASIC.study).options == options, "the same command"


def test_a_field_of_some_engines_is_set_for_those_that_take_it(capsys):
    vanilla, async_gradients, hybrid = set_points("--stride", "4", "--model.layers", "3")
    assert (vanilla.stride, async_gradients.stride, hybrid.stride) == (0, 0, 4)
    assert {point.model.layers for point in (vanilla, hybrid)} == {3}
    assert "stride 4: in place of the values that sweep 'basic' has\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engine", "v"], "unknown option '--engine': did you mean '--engines'"),
        (["--lr", "-1"], "field 'lr' = '-1': Input should be greater than 0"),
        (["--engines", "stock", "--stride", "4"],
         "stride = '4': none of its engines takes that; stride would"),
        (["--lrr", "1"], "unknown option '--lrr': did you mean '--lr'"),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_set_is_named(words, message):
    with pytest.raises(ConfigError, match=message):
        set_points(*words)


NAMES = ["tiny stock", "tiny all-host", "tiny stride 2"]


@pytest.mark.parametrize(
    ("words", "case"),
    [
        (["--subgroup-numel", "200000"], "tiny subgroup 200k"),
        (["--global-batch-size", "4", "--iterations", "3"], "tiny accumulation 2 iterations 3"),
        (["--dtype", "fp32", "--model.layers", "3"], "tiny fp32 layers 3"),
        (["--stride", "4"], "tiny"),
        (["--device", "cpu"], "tiny"),
    ],
)
def test_a_point_is_named_by_what_the_command_sets_in_place_of_the_sweeps_own(words, case):
    """Else rows of two commands, and their live lines, had one name and other settings."""
    stride = "stride 4" if "--stride" in words else "stride 2"
    names = [point.name for point in planned(CPU, *words).points]
    assert names == [f"{case} {engine}" for engine in ("stock", "all-host", stride)]


@pytest.mark.parametrize(
    ("only", "index", "found"),
    [
        ([], None, NAMES),
        (["tiny stock"], None, NAMES[:1]),
        (["stride", "tiny st*k"], None, [NAMES[0], NAMES[2]]),
        ([], 2, NAMES[1:2]),
    ],
)
def test_points_are_chosen_by_name_part_pattern_and_position(only, index, found):
    assert choose_points(planned(CPU).points, only, index) == found


@pytest.mark.parametrize(
    ("only", "found"),
    [
        ("dp 4", ["tiny DP 4 stock", "tiny DP 4 stride 2"]),
        ("4 DP", ["tiny DP 4 stock", "tiny DP 4 stride 2"]),
        ("DP 4, stock", ["tiny DP 4 stock"]),
        ("TINY stride dp 2", ["tiny DP 2 stride 2"]),
        ("DP 2", ["tiny DP 2 stock", "tiny DP 2 stride 2"]),
        ("dp 1", ["tiny DP 1 stock", "tiny DP 1 stride 2"]),
        ("4 stri", ["tiny DP 4 stride 2"]),
        ("dp 4 hybrid stride 2", ["tiny DP 4 stride 2"]),
        ("vanilla", [f"tiny DP {dp} stock" for dp in (1, 2, 4, 12)]),
        ("Tiny dp 1 *", ["tiny DP 1 stock", "tiny DP 1 stride 2"]),
    ],
)
def test_any_part_of_what_is_printed_chooses_points(only, found):
    grid = {"model": ["tiny"], "dp": [1, 2, 4, 12]}
    engines = [{"engine": "stock"}, {"engine": "stride", "stride": 2}]
    points = make_sweep(
        {"name": "s", "grid": grid, "engines": engines, "point": {"accumulation": 1}}
    )
    assert choose_points(points.points(None), [only]) == found


@pytest.mark.parametrize("word", ["", " "])
def test_an_empty_word_chooses_no_point(word):
    with pytest.raises(ConfigError, match=f"unknown point '{word}'"):
        choose_points(planned(CPU).points, [word])


def test_a_setting_that_no_name_tells_chooses_points():
    points = load_sweep("models").small().points(None)
    assert choose_points(points, ["8 layers"]) == [p.name for p in points if p.model.layers == 8]
    assert choose_points(points, ["layers 2"]) == [p.name for p in points if p.model.layers == 2]


@pytest.mark.parametrize(
    ("only", "index", "words"),
    [
        (["tiny stok"], None, "did you mean 'tiny stock'"),
        (["dp 4"], None, "^unknown point 'dp 4': known: tiny stock, tiny all-host, "),
        ([], 4, "points 1 to 3"),
    ],
)
def test_what_names_no_point_is_refused(only, index, words):
    with pytest.raises(ConfigError, match=words):
        choose_points(planned(CPU).points, only, index)


@pytest.mark.parametrize(("how", "code"), [("nan", 1), ("falls", 0)])
def test_the_exit_code_of_one_run_follows_its_loss(
    how, code, fake_trainer, tmp_path, capfd, monkeypatch
):
    heads, live = [], run_command.LiveLine
    monkeypatch.setattr(run_command, "LiveLine", lambda *of: heads.append(of[0]) or live(*of))
    words = ["tiny", "--subgroup-numel", "2000000", "--device", "cpu"]
    words += ["--trainer-module", fake_trainer(how)]
    assert run_command.main([*words, "--results-dir", str(tmp_path)]) == code
    assert heads == ["tiny subgroup 2M stock"], "its live line says what was set"
    captured = capfd.readouterr()
    assert (f"nan: {tmp_path}" in captured.out) == (code == 1)
    assert ("nan: ended, but its loss is nan from iteration 3" in captured.err) == (code == 1)


def test_a_dry_run_makes_nothing(tmp_path, capsys):
    arguments = ["--dry-run", "--results-dir", str(tmp_path / "r"), "--device", "cpu"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out.count("point ") == 3
    assert out.count('"stage": 3') == 3
    assert '"policy": "all-host"' in out
    assert "predicted host" in out
    assert out.count("rough, from the model's size") == 3
    assert "3 points, about " in out
    assert "in all (a rough figure from assumed rates)" in out
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
    monkeypatch.setattr("launch.sweep.probe_machine", lambda: GPU)
    assert main([*words[:3], "--size", "tiny", "--iterations", "7"]) == 0
    out = capsys.readouterr().out
    assert f"time     {why}" in out
    assert "; the time of 1 is not known and not in it)" in out


def test_a_single_point_is_of_the_type_that_the_processor_multiplies(monkeypatch, capsys):
    slow = Host(20 * GIB, half_types=frozenset)
    monkeypatch.setattr(run_command.feasibility, "probe_machine", lambda: slow)
    assert run_command.main(["tiny-stride", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("type: fp32 in place of bf16, since torch has no native bf16 ")
    assert '"bf16"' not in out
    assert run_command.main(["tiny-hybrid", "--dry-run", "--dtype", "bf16"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("point ")
    assert '"bf16"' in out


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
    monkeypatch.setattr("launch.sweep.probe_machine", lambda: GPU)
    assert main([*words, "--size", "full"]) == 0
    assert "none here" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "more", [[], ["--device", "cpu"], ["--device", "cuda"], ["--model", "13B"]], ids=str
)
def test_a_dry_run_refuses_what_the_run_refuses_with_its_words(more, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("launch.sweep.probe_machine", lambda: CPU)
    words = ["--sweep", "stride", "--size", "full", "--results-dir", str(tmp_path / "r"), *more]
    assert main([*words, "--dry-run"]) == 0
    out = capsys.readouterr().out
    told = [line for line in out.splitlines() if line.startswith("runs ")]
    assert f"; {len(told)} of the points cannot run here\n" in out
    with pytest.raises(ConfigError) as refused:
        main(words)
    reason = str(refused.value).partition("engine 'stock': ")[2]
    assert told[0] == f"runs     no: {reason}"
    assert all(line.startswith("runs     no: ") for line in told)
    capsys.readouterr()
    assert main([*words, "--dry-run", "--no-memory-check"]) == 0
    assert capsys.readouterr().out.count("runs     yes: never run before") == len(told)


def test_a_dry_run_of_one_point_says_whether_it_would_run(capsys, monkeypatch):
    monkeypatch.setattr(run_command.feasibility, "probe_machine", lambda: CPU)
    for words, text in (["tiny"], "yes"), (["7B-stride"], "no: about "):
        assert run_command.main([*words, "--dry-run"]) == 0
        assert f"\nruns     {text}" in capsys.readouterr().out


def test_a_report_of_nothing_makes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(task_module, "data_prefix", lambda _given: pytest.fail("data was made"))
    assert main(["--report-only", "--device", "cpu", "--results-dir", str(tmp_path / "r")]) == 2
    captured = capsys.readouterr()
    folder = tmp_path / "r" / "basic"
    assert captured.err == f"error: no run of sweep 'basic' in {folder}\n"
    assert captured.out == ""
    assert not folder.exists()


def test_a_report_of_other_points_leaves_the_index_as_it_is(tmp_path, capsys):
    run = tmp_path / "r" / "basic" / "stem" / "run-001" / "run.json"
    run.parent.mkdir(parents=True)
    run.write_text('{"point": {"engine": "stock"}, "point_key": "of another machine"}')
    index = run.parents[2] / "sweep.json"
    index.write_text("its own")
    assert main(["--report-only", "--device", "cpu", "--results-dir", str(tmp_path / "r")]) == 2
    assert "are of other points than these" in capsys.readouterr().err
    assert index.read_text() == "its own"


def refused(*_arguments):
    raise LogError("no room")


def failed(*_arguments):
    raise RuntimeError("a figure nobody thought of")


@pytest.mark.parametrize(
    ("broken", "code", "said"),
    [
        ({"parse.report.parse_sweep": refused}, 2, "tables: no room\n"),
        ({"parse.report.write_report": refused}, 2, "report: no room\nfigures  {}/figures\n"),
        ({"plots.__main__.main": failed}, 2,
         "figures: a figure nobody thought of\nfigures: exit code 2\n\na table\n\n"
         "report   {}/report.html\n"),
        ({"plots.__main__.main": lambda _words: 1}, 1,
         "figures: exit code 1\n\na table\n\nreport   {0}/report.html\nfigures  {0}/figures\n"),
    ],
)  # fmt: skip
def test_an_error_in_one_step_costs_no_other(broken, code, said, tmp_path, capsys, monkeypatch):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "loss.png").touch()
    context = {"results": SimpleNamespace(lines=lambda: ["a table"])}
    parsed = SimpleNamespace(folder=tmp_path, findings=[], all_hold=True, context=context)
    steps = {"parse.report.parse_sweep": lambda _folder: parsed,
             "parse.report.write_report": lambda _parsed: None,
             "plots.__main__.main": lambda _words: 0}  # fmt: skip
    for name, step in (steps | broken).items():
        monkeypatch.setattr(name, step)
    assert derive(tmp_path, ["loss"]) == code
    assert capsys.readouterr().out == said.format(tmp_path)


def test_who_asks_for_help_does_not_wait_for_pandas():
    script = "import sys, launch.sweep; print({'pandas', 'matplotlib', 'scipy'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_every_sweep_and_one_of_them_cannot_both_be_meant():
    with pytest.raises(ConfigError, match="leave out --all or --sweep basic"):
        main(["--all", "--sweep", "basic"])


def test_a_dry_run_says_which_engine_would_be_skipped(own, tmp_path, capsys):
    words = ["--study", str(own.folder), "--engines", "gpu-only", "--size", "tiny", "--dry-run"]
    assert main([*words, "--device", "cpu", "--results-dir", str(tmp_path / "r")]) == 0
    out = capsys.readouterr().out
    assert "--engines: 'stock' is added, which the others are compared with" in out
    assert out.count("runs     no: needs a GPU, and this run has none") == 1
    assert "; 1 of the points cannot run here\n" in out
    assert f"{tmp_path}/r/own/basic/" in out


def test_when_no_engine_can_run_the_reason_is_the_error(own, tmp_path):
    words = ["--study", str(own.folder), "--engines", "gpu-only", "--device", "cpu"]
    with pytest.raises(ConfigError, match="engine 'gpu-only': needs a GPU"):
        main([*words, "--only", "gpu-only", "--results-dir", str(tmp_path)])


def test_studies_are_listed_with_sweeps_points_and_engines(own, capsys):
    assert main(["--list"]) == 0
    shipped = capsys.readouterr().out
    assert shipped.startswith("study interleaved [default]: Deep Optimizer States")
    assert "    stock                    Stock DeepSpeed ZeRO-3" in shipped
    assert " (the reference, also vanilla, v, zero3, zero3-offload)\n" in shipped
    assert main(["--list", "--study", str(own.folder)]) == 0
    mine = capsys.readouterr().out
    assert mine.startswith("study own: engines of mine\n  sweeps (--sweep NAME)\n")
    assert "    gpu-only                 on a GPU (needs gpu)" in mine
    assert "    tiny-stride              model tiny, engine stride, stride 2\n" in mine
    assert "    stock                    Stock DeepSpeed ZeRO-3" in mine
    assert "[default]" not in mine


def test_all_sweeps_are_those_of_the_study(own, capsys):
    (own.folder / "sweeps").mkdir()
    (own.folder / "sweeps" / "mine.toml").write_text(
        'name = "mine"\nmodel = "tiny"\nengines = [{ engine = "gpu-only" }]\n'
    )
    assert main(["--study", str(own.folder), "--all", "--dry-run"]) == 0
    assert "point    tiny gpu-only" in capsys.readouterr().out.splitlines()
