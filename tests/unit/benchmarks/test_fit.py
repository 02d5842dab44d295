"""The fit: rows as they are read, and rates that are found again."""

import dataclasses
import math
import tomllib
from pathlib import Path

import pytest

from benchmarks.fit import __main__ as fit_profile
from benchmarks.fit.rates import STAGES, fit, residuals
from benchmarks.fit.rows import MODELS, FitError, read_observations
from deep_optimizer_states.predict.machine import load_machine, machine_from_table
from deep_optimizer_states.predict.predict import predict

PUBLISHED = (
    Path(__file__).resolve().parents[3] / ".." / "shared" / "facts" / "published-figures.csv"
)
HEAD = "figure,file,group,series,quantity,value\n"
# Rows in the form of the published ones; the values are made up.
ROWS = """\
"H100 x4, DP4, mbs1: iteration breakdown by model",f,7B,ZeRO-3,fwd_s,0.15
"H100 x4, DP4, mbs1: iteration breakdown by model",f,7B,ZeRO-3,bwd_s,1.7
"H100 x4, DP4, mbs1: iteration breakdown by model",f,7B,ZeRO-3,update_s,0.9
"H100 x4, DP4, mbs1: iteration breakdown by model",f,10B,DOS k=2,update_s,0.8
"H100 x4, DP4, mbs1: iteration breakdown by model",f,13B,ZeRO-3,update_s,1.7
H100 x4: update throughput by model,f,8.3B,DOS k=2,Bparam_per_s,10
H100 x4: 99-iteration total time by model,f,7B,ZeRO-3,s,297
H100 x4: 20% static by model,f,7B,DOS k=2 ratio0.8,update_s,0.4
H100 x4: 20% static by model,f,7B,TwinFlow ratio0.8,update_s,0.7
7B update throughput vs k,f,4xA100,k3,Bparam_per_s,5
7B update throughput vs k,f,4xH100,default,Bparam_per_s,8
7B update throughput vs k,f,4xH100,k10,Bparam_per_s,10
"""


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "published.csv"
    path.write_text(HEAD + ROWS)
    return path


def test_rows_become_what_plan_predicts(rows):
    found = {item.label: item for item in read_observations(rows, "H100")}
    assert len(found) == 10  # neither another model nor another machine
    assert found["7B ZeRO-3 bwd_s"].quantity == "backward_s"
    assert found["7B ZeRO-3 bwd_s"].workload.engine == "zero3-0.13"
    # The published throughput is of the nominal size.
    assert found["8.3B DOS k=2 Bparam_per_s"].value == pytest.approx(0.83)
    assert found["7B ZeRO-3 s"].quantity == "iteration_s"
    assert found["7B ZeRO-3 s"].value == pytest.approx(3.0)
    hybrid = found["7B DOS k=2 ratio0.8 update_s"].workload
    assert (hybrid.engine, hybrid.stride, hybrid.offload_ratio) == ("paper", 2, 0.8)
    assert found["7B TwinFlow ratio0.8 update_s"].workload.offload_ratio == 0.8
    assert found["7B k10 Bparam_per_s"].workload.stride == 10
    assert {item.workload.dp for item in found.values()} == {4}
    assert len(read_observations(rows, "A100")) == 1


def test_a_csv_without_rows_is_refused(rows, tmp_path):
    with pytest.raises(FitError, match="no row of"):
        read_observations(rows, "H200")
    with pytest.raises(FitError, match="cannot be read"):
        read_observations(tmp_path / "none.csv", "H100")


def test_a_csv_of_other_columns_says_which_are_missing(tmp_path, capsys):
    path = tmp_path / "other.csv"
    path.write_text("figure,group,value\na,b,1\n")
    assert fit_profile.main([str(path)]) == 2
    err = capsys.readouterr().err
    assert "columns missing: series, quantity; expected figure,group,series,quantity,value" in err
    path.write_text(HEAD + "H100,f,7B,ZeRO-3,fwd_s,much\n")
    assert fit_profile.main([str(path)]) == 2
    assert "a row cannot be read" in capsys.readouterr().err


def test_the_help_names_the_columns(capsys):
    with pytest.raises(SystemExit, match="0"):
        fit_profile.main(["--help"])
    assert "figure,group,series,quantity,value" in capsys.readouterr().out


def test_the_csv_of_the_harness_is_read_with_its_own_columns():
    path = next((Path(__file__).resolve().parents[3] / "configs").rglob("*.csv"))
    found = {item.label: item for item in read_observations(path, "H100")}
    backward = found["8.3B stride 0 ratio 1 backward_s"]
    assert (backward.workload.engine, backward.value) == ("zero3-0.13", 2.646)
    assert backward.workload.model.name == "8.3B"
    hybrid = found["7B stride 2 ratio 0.8 update_s"].workload
    assert (hybrid.engine, hybrid.stride, hybrid.offload_ratio) == ("paper", 2, 0.8)
    total = found["7B stride 0 ratio 1 iterations_99_s"]
    assert total.quantity == "iteration_s"
    assert 2.0 < total.value < 4.0
    assert len(read_observations(path, "A100")) == 7
    machine = load_machine("h100x4")
    median, worst = fit_profile.summary(
        [error for _, error in residuals(machine, list(read_observations(path, "H100")))]
    )
    assert (median, worst) == pytest.approx(
        (machine.residuals["median"], machine.residuals["worst"]), abs=2e-3
    )


def test_rates_behind_made_up_rows_are_found_again(rows):
    truth = load_machine("h100x4")
    observations = [
        dataclasses.replace(item, value=getattr(predict(item.workload, truth), item.quantity))
        for item in read_observations(rows, "H100")
    ]
    start = dataclasses.replace(
        truth,
        rates=dataclasses.replace(
            truth.rates,
            host_adam_parameters_per_s=((24, 2e9),),
            h2d_bytes_per_s=60e9,
            d2h_bytes_per_s=60e9,
            pageable_d2h_bytes_per_s=8e9,
        ),
    )
    before = sum(abs(error) for _, error in residuals(start, observations))
    found = fit(start, observations, STAGES["H100"])
    assert sum(abs(error) for _, error in residuals(found, observations)) < before / 20
    (_, adam) = found.rates.host_adam_parameters_per_s[0]
    assert adam == pytest.approx(truth.rates.host_adam_parameters_per_s[0][1], rel=0.1)
    assert found.rates.pageable_d2h_bytes_per_s == pytest.approx(
        truth.rates.pageable_d2h_bytes_per_s, rel=0.02
    )
    assert found.rates.h2d_bytes_per_s == found.rates.d2h_bytes_per_s


def test_a_profile_that_was_written_is_read_again(rows, tmp_path, capsys):
    out = tmp_path / "new.toml"
    assert fit_profile.main([str(rows), "--machine", "a100x4", "-o", str(out)]) == 0
    assert "fit: 1 rows" in capsys.readouterr().out
    machine = load_machine(out)
    assert machine.kind("host_adam_parameters_per_s") == "fitted"
    assert machine.kind("device_flops_per_s") == "assumed"
    assert machine.residuals["rows"] == 1
    assert fit_profile.main([str(rows), "--machine", "a100x4", "-o", str(out)]) == 2
    assert "is there already" in capsys.readouterr().err


@pytest.mark.skipif(not PUBLISHED.is_file(), reason="the published values are not here")
@pytest.mark.parametrize("name", ["h100x4", "a100x4"])
def test_shipped_profiles_are_what_the_fit_gives(name):
    shipped = load_machine(name)
    hardware = fit_profile.HARDWARE[name]
    observations = read_observations(PUBLISHED, hardware)
    assert {item.workload.model.name for item in observations} <= set(MODELS)
    errors = [error for _, error in residuals(shipped, observations)]
    assert fit_profile.summary(errors) == pytest.approx(
        (shipped.residuals["median"], shipped.residuals["worst"]), abs=1e-3
    )
    again = fit(shipped, observations, STAGES[hardware])
    for item, error in residuals(again, observations):
        near = getattr(predict(item.workload, shipped), item.quantity)
        assert item.value * math.exp(error) == pytest.approx(near, rel=0.03)


def test_a_profile_as_text_keeps_every_figure():
    machine = load_machine("h100x4")
    again = machine_from_table(tomllib.loads(fit_profile.profile_text(machine)))
    assert again == machine
