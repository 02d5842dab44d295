"""Sweeps that are predicted: folders, published values beside them, errors."""

import csv
import json
import shutil
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.published import as_published, published_of, read_published
from configs.study import default_study, load_study, make_point
from configs.sweep import load_sweep, make_sweep
from deep_optimizer_states.predict.machine import MACHINES_DIR, load_machine
from deep_optimizer_states.predict.predict import predict
from deep_optimizer_states.predict.workload import WorkloadError
from launch.ds_json import deepspeed_config
from launch.records import read_records
from launch.simulate import workloads
from launch.simulate.workloads import workload_of
from launch.sweep import main

STUDY = default_study()
SHARED = Path(__file__).resolve().parents[3] / ".." / "shared" / "facts" / "published-figures.csv"
SEVEN = {"model": "7B", "subgroup_numel": 100_000_000}


@pytest.fixture
def simulate(tmp_path):
    def simulate(*words, machine="h100x4"):
        base = ["--simulate", "--machine", str(machine), "--results-dir", str(tmp_path / "r")]
        return main([*base, "--no-report", *words])

    return simulate


def index_of(folder):
    return json.loads((folder / "sweep.json").read_text())


def values_of(folder, entry):
    return json.loads((folder / entry["run_dir"] / entry["log"]).read_text())


PLUGIN = {"enabled": True, "just_in_time_forward": False}


@pytest.fixture
def with_json(monkeypatch):
    """Makes a workload of a point whose DeepSpeed JSON was changed."""

    def make(change, of_paper=False):
        config = deepspeed_config(make_point(SEVEN))
        change(config)
        monkeypatch.setattr(workloads, "deepspeed_config", lambda point: config)
        return workload_of(make_point(SEVEN), of_paper)

    return make


def offload(**fields):
    return lambda config: config["zero_optimization"]["offload_optimizer"].update(fields)


def zero(**fields):
    return lambda config: config["zero_optimization"].update(fields)


def block(**fields):
    return lambda config: config.update(deep_optimizer_states={**PLUGIN, **fields})


@pytest.mark.parametrize(
    ("change", "paper", "today"),
    [
        (lambda config: None, "stock-0.13", "stock"),
        (block(policy="all-host"), "all-host-0.13", "plugin"),
        (block(policy="ratio", ratio=0.8), "all-host-0.13", "plugin"),
        (block(policy="stride", stride=3), "stride-0.13", "plugin"),
    ],
)
def test_the_papers_software_has_three_modes(with_json, change, paper, today):
    old, new = (with_json(change, of_paper) for of_paper in (True, False))
    assert (old.engine, new.engine) == (paper, today)
    assert (old.stride, old.offload_ratio) == (new.stride, new.offload_ratio)


NO_SUCH = ": the paper's software has no such"


@pytest.mark.parametrize(
    ("of_paper", "change", "text"),
    [
        (True, block(policy="dynamic"), f"policy = 'dynamic'{NO_SUCH}"),
        (True, block(policy="stride", just_in_time_forward=True), f"_forward = True{NO_SUCH}"),
        (True, zero(offload_param={"device": "cpu"}), rf"offload_param\.device = 'cpu'{NO_SUCH}"),
        (False, offload(device="nvme"), r"offload_optimizer\.device = 'nvme': "),
        (False, offload(super_offload=True), r"offload_optimizer\.super_offload = True: "),
        (False, zero(zenflow={"topk_ratio": 0.1}), r"zero_optimization\.zenflow = "),
        (False, zero(offload_param={"device": "nvme"}), r"offload_param\.device = 'nvme': "),
        (False, lambda c: c.update(compile={"deepcompile": True}), r"deepcompile = True: "),
        (False, lambda c: c.update(optimizer={"type": "Muon"}), r"optimizer\.type = 'Muon': "),
        (False, lambda c: c.clear(), r"optimizer\.type = None: "),
        (False, block(policy="often"), r"deep_optimizer_states\.policy"),
        (False, block(step_before_norm=True), r"step_before_norm = True: "),
    ],
)
def test_a_json_that_the_model_does_not_know_is_refused(with_json, of_paper, change, text):
    with pytest.raises(WorkloadError, match=text):
        predict(with_json(change, of_paper), load_machine("h100x4"))


@pytest.mark.parametrize(
    "change",
    [offload(super_offload=False), zero(zenflow=None), zero(offload_param={"device": "none"})],
)
def test_what_is_switched_off_in_the_json_is_no_reason_to_refuse(with_json, change):
    assert with_json(change).engine == "stock"


@pytest.mark.parametrize(
    "change", [zero(stage=2), zero(offload_optimizer=None), offload(device="none")]
)
def test_every_stage_is_predicted_with_and_without_offload(with_json, change):
    machine = load_machine("h100x4")
    before, found = (predict(with_json(each), machine) for each in (zero(), change))
    assert found.iteration_s != before.iteration_s > 0


def test_shaped_links_are_refused():
    point = make_point({**SEVEN, "dp": 2, "global_batch_size": 32, "link_mbit": 20})
    with pytest.raises(WorkloadError, match=r"link_mbit = 20: .* links as they are"):
        workload_of(point)


def test_a_workload_has_every_setting_of_its_point():
    point = make_point(
        {
            **SEVEN, "engine": "v", "dp": 2, "tp": 2, "micro_batch_size": 4, "accumulation": 8,
            "offload_ratio": 0.7, "activation_checkpointing": False, "attention": "sdpa",
            "hog_share": 0.25,
        }
    )  # fmt: skip
    found = workload_of(point, True)
    assert found.model.numel == point.model.num_parameters()
    assert (found.dp, found.tp, found.micro_batch_size, found.accumulation) == (2, 2, 4, 8)
    assert (found.offload_ratio, found.subgroup_numel, found.hog_share) == (0.7, 100_000_000, 0.25)
    assert (found.activation_checkpointing, found.materialized_attention) == (False, False)


@pytest.mark.skipif(not SHARED.is_file(), reason="the figures it was typed from are not here")
def test_published_values_are_those_of_the_figures():
    with SHARED.open() as file:
        theirs = sorted(float(row["value"]) for row in csv.DictReader(file))
    assert sorted(value.value for value in read_published(STUDY)) == theirs


def test_published_values_are_found_for_the_points_they_are_of():
    points = load_sweep("models").points(None, {"subgroup_numel": "100_000_000"})
    found = published_of(points, "models", "h100x4", read_published(STUDY))
    assert list(found) == [
        f"{model} subgroup 100M {engine}"
        for model in ("7B", "8.3B", "10B")
        for engine in ("stock", "stride 2")
    ]
    seven = found["7B subgroup 100M stock"]
    assert (seven["forward_ms"], seven["backward_ms"], seven["update_ms"]) == (146, 1718, 886)
    assert seven["iteration_ms"] == pytest.approx(295_382 / 99)
    assert "10.1145/3652892.3700781" in seven["about"]
    assert published_of(points, "models", "h200x1", read_published(STUDY)) == {}


def test_a_published_rate_counts_a_model_by_its_name():
    sweep = make_sweep(
        {"name": "stride", "engines": [{"engine": "v"}, {"engine": "h", "stride": [2, 3]}]}
    )
    seven = sweep.points("7B")
    points = [point.model_copy(update={"subgroup_numel": 100_000_000}) for point in seven]
    found = published_of(points, "stride", "a100x4", read_published(STUDY))
    times = {name: fields["update_ms"] for name, fields in found.items()}
    assert times == pytest.approx(
        {
            "7B stock": 7000 / 3.506,
            "7B stride 2": 7000 / 5.251,
            "7B stride 3": 7000 / 4.82,
        }
    )
    # Of the two that were published of one point, the figure's own.
    both = published_of(points, "stride", "h100x4", read_published(STUDY))["7B stock"]
    assert both["update_ms"] == pytest.approx(7000 / 7.793)
    assert "iteration_ms" not in found["7B stride 3"]


@pytest.mark.parametrize(
    "change",
    [
        {"dp": 2},
        {"micro_batch_size": 2, "global_batch_size": 8},
        {"global_batch_size": 8},
        {"subgroup_numel": 10_000_000},
        {"offload_ratio": 0.7},
        {"hog_share": 0.2},
        {"model": "20B"},
        {"activation_checkpointing": False},
    ],
)
def test_a_point_run_otherwise_has_no_published_values(change):
    fields = {**SEVEN, "engine": "v", "dp": 4, "global_batch_size": 4, "name": "p"}
    every = read_published(STUDY)
    assert published_of([make_point(fields)], "models", "h100x4", every)
    assert not published_of([make_point({**fields, **change})], "models", "h100x4", every)


def test_named_models_get_the_subgroups_they_were_published_with():
    every = read_published(STUDY)

    def sizes(sweep):
        points = as_published(sweep, sweep.points(None), every)
        return {(point.model.name, point.subgroup_numel) for point in points}

    engines = [{"engine": "v"}]
    own = make_sweep({"name": "s", "grid": {"model": ["7B", "3B"]}, "engines": engines})
    assert sizes(own) == {("7B", 100_000_000), ("3B", 10_000_000)}
    given = make_sweep(
        {"name": "s", "grid": {"model": "7B", "subgroup_numel": 5_000_000}, "engines": engines}
    )
    assert sizes(given) == {("7B", 5_000_000)}


def test_a_damaged_file_of_published_values_is_named(tmp_path):
    shutil.copytree(STUDY.folder, tmp_path / "own")
    own, file = load_study(tmp_path / "own"), tmp_path / "own" / "published.csv"
    columns = "sweep,machine,model,engine,stride,offload_ratio,quantity,value"
    row = "models,h100x4,7B,stock,0,1,forward_s,"
    file.write_text(f"# said by\n{columns}\n{row}0.1\n")
    assert len(read_published(own)) == 1
    file.write_text(f"{columns}\n{row}-1\n")
    with pytest.raises(ConfigError, match=rf"published\.csv: '{row[:20]}.*'value' = '-1': "):
        read_published(own)
    file.write_text(f"{columns},strid\n{row}0.1,1\n")
    with pytest.raises(ConfigError, match=r"unknown column 'strid': did you mean 'stride'"):
        read_published(own)
    file.unlink()
    assert read_published(own) == []


def test_a_simulated_sweep_has_folders_of_its_own(simulate, tmp_path, capsys):
    assert simulate("--sweep", "models") == 0
    folder = tmp_path / "r" / "simulated-h100x4" / "models"
    assert [path.name for path in (tmp_path / "r").iterdir()] == ["simulated-h100x4"]
    index = index_of(folder)
    assert index["source"] == "simulated"
    assert index["simulated"]["machine"] == "h100x4"
    assert "loss" not in index["figures"]
    assert "no loss" in index["figures_left_out"]["loss"]
    kinds = [entry["run_dir"].rpartition("/")[2] for entry in index["runs"]]
    assert (kinds.count("simulated-001"), kinds.count("published-001")) == (15, 6)
    for entry in index["runs"]:
        run = json.loads((folder / entry["run_dir"] / "run.json").read_text())
        assert run["source"] == entry["run_dir"].rpartition("/")[2].partition("-")[0]
        assert make_point(run["point"]).name == entry["name"]
    shipped = list(csv.reader((STUDY.folder / "predicted.csv").read_text().splitlines()))
    for entry in index["runs"]:
        values = json.loads((folder / entry["run_dir"] / "values.json").read_text())
        model, _, engine = entry["name"].partition(" ")
        told = f"{values['update_ms'] / 1000:.3g}"
        source = entry["run_dir"].rpartition("/")[2].partition("-")[0]
        assert [model, f"{engine}, {source}", "update (s)", told] in shipped, "draw it anew"
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("[1/15] 7B stock: simulated ")
    assert out[-1].startswith("simulated, nothing was run: 15 points on h100x4 (the paper's ")


def test_no_measured_sweep_can_take_a_simulated_run_for_its_own(simulate, tmp_path):
    simulate("--sweep", "basic")
    for folder in ("", "simulated-h100x4", "simulated-h100x4/basic"):
        assert read_records(tmp_path / "r" / folder) == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--simulate"], "--simulate: name a machine with --machine"),
        (["--machine", "h100x4"], "--machine needs --simulate"),
        (["--simulate", "--machine", "h100x5"], "unknown machine 'h100x5': did you mean 'h100x4'"),
        (["--simulate", "--machine", "no.toml"], "no.toml: cannot be read"),
        (["--simulate", "--machine", "h100x4", "--again"], "leave out --again"),
        (["--simulate", "--machine", "h100x4", "--report-only"], "leave out --again"),
        (["--simulate", "--machine", "h100x4", "--repeats", "2"], "--repeats: a prediction is"),
        (["--simulate", "--machine", "h100x4", "--sweep", "model"], "did you mean 'models'"),
    ],
)
def test_what_cannot_be_meant_is_refused(words, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        main([*words, "--results-dir", str(tmp_path / "r")])
    assert text in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_rate_that_is_missing_names_what_measures_it(simulate, tmp_path):
    profile = tmp_path / "mine.toml"
    profile.write_text(
        'name = "mine"\nsource = "s"\ngpus = 4\ncores = 8\nhost_memory_bytes = 1e12\n'
        "device_memory_bytes = 8e10\n"
    )
    with pytest.raises(ConfigError, match=r"no rates\.\w+.*deep_optimizer_states calibrate"):
        simulate("--sweep", "models", machine=profile)


def test_a_sweep_that_no_such_machine_can_run_is_refused(simulate, tmp_path):
    sweep = tmp_path / "tp.toml"
    sweep.write_text('name = "t"\nmodel = "20B"\npoint = { tp = 4, dp = 1 }\n'
                     '[[engines]]\nengine = "v"\n')  # fmt: skip
    with pytest.raises(ConfigError, match=r"sweep 't' .*: tp = 4: machine 'h200x1' has 1 GPU"):
        simulate("--sweep", str(sweep), machine="h200x1")


def test_the_folder_shows_the_part_of_a_sweep_that_was_asked_for(simulate, tmp_path):
    folder = tmp_path / "r" / "simulated-h100x4" / "gpu-hogging"
    for index in ("5", "2"):
        assert simulate("--sweep", "gpu-hogging", "--index", index) == 0
        (entry,) = index_of(folder)["runs"]
        saved = json.loads((folder / entry["run_dir"] / "run.json").read_text())
        assert saved["point"]["name"] == entry["name"]


def test_a_dry_simulation_prints_and_writes_nothing(simulate, tmp_path, capsys):
    assert simulate("--sweep", "basic", "--model", "7B", "--dry-run") == 0
    assert "7B stock: simulated " in capsys.readouterr().out
    assert not (tmp_path / "r").exists()


def test_a_profile_of_ones_own_has_todays_software(simulate, tmp_path):
    own = tmp_path / "own.toml"
    own.write_text((MACHINES_DIR / "h100x4.toml").read_text())
    simulate("--sweep", "basic", "--model", "7B", machine=own)
    index = index_of(tmp_path / "r" / "simulated-h100x4" / "basic")
    assert index["asked"] == {"options": ["--model", "7B"], "fields": {}}
    assert "today" in index["simulated"]["software"]
    assert {run["run_dir"].rpartition("/")[2] for run in index["runs"]} == {"simulated-001"}


def test_a_point_that_does_not_fit_has_no_time(simulate, tmp_path, capsys):
    """What an earlier prediction left is replaced."""
    for _ in range(2):
        simulate("--sweep", "micro-batch", "--only", "20B micro-batch 64 stock", machine="h200x1")
    folder = tmp_path / "r" / "simulated-h200x1" / "micro-batch"
    (entry,) = index_of(folder)["runs"]
    assert len(list(folder.glob("*/*/run.json"))) == 1
    assert entry["status"].startswith("oom-")
    values = values_of(folder, entry)
    assert (values["iteration_ms"], values["update_ms"], values["fits"]) == (None, None, False)
    status = json.loads((folder / entry["run_dir"] / "status.json").read_text())
    assert " memory: " in status["cause"]
    assert f"does not fit: {status['cause']}" in capsys.readouterr().out


def test_phases_and_what_lies_outside_them_make_an_iteration(simulate, tmp_path):
    simulate("--sweep", "models", "--only", "7B stock")
    folder = tmp_path / "r" / "simulated-h100x4" / "models"
    values = values_of(folder, index_of(folder)["runs"][0])
    phases = values["forward_ms"] + values["backward_ms"] + values["update_ms"]
    assert 0 < phases <= values["iteration_ms"] < 1.3 * phases
    assert 0 < values["bound_ms"] <= values["iteration_ms"]
    assert (values["parameters"], values["num_ranks"]) == (5_948_837_888, 4)


def test_peaks_of_memory_are_predicted_and_their_course_is_not(simulate, tmp_path):
    simulate("--sweep", "memory", "--only", "stock")
    folder = tmp_path / "r" / "simulated-h100x4" / "memory"
    index = index_of(folder)
    assert index["figures"] == ["peaks"]
    assert list(index["figures_left_out"]) == ["memory", "utilisation"]
    assert index["results"] == ["gpu_peak_gib", "host_peak_gib"]
    values = values_of(folder, index["runs"][0])
    assert values["host_peak_gib"] == values["host_memory_bytes"] * values["num_ranks"] / 2**30
    assert values["gpu_peak_gib"] == values["device_memory_bytes"] / 2**30


def test_the_papers_software_is_named_only_where_todays_could(simulate, tmp_path):
    sweep = tmp_path / "jit.toml"
    sweep.write_text('name = "j"\nmodel = "7B"\npoint = { just_in_time = true }\n'
                     '[[engines]]\nengine = "h"\nstride = 2\n')  # fmt: skip
    with pytest.raises(ConfigError, match="predict today's on a machine other than h100x4"):
        simulate("--sweep", str(sweep))
