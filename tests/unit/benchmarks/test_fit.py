"""The fit: rows as they are read, and rates that are found again."""

import dataclasses
import math
import tomllib
from pathlib import Path

import pytest

from benchmarks import fit as fit_profile
from benchmarks.fit import MODELS, STAGES, FitError, fit, read_observations, residuals
from deep_optimizer_states.predict.machine import load_machine, machine_from_table
from deep_optimizer_states.predict.predict import predict

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
PUBLISHED = next(path for path in CONFIGS.rglob("*.csv") if "h100x4" in path.read_text())
HEAD = "sweep,machine,model,engine,stride,offload_ratio,quantity,value\n"
# Rows in the form of the published ones; the values are made up.
ROWS = """\
models,h100x4,7B,v,0,1,forward_s,0.15
models,h100x4,7B,v,0,1,backward_s,1.7
models,h100x4,7B,v,0,1,update_s,0.9
models,h100x4,10B,h,2,1,update_s,0.8
models,h100x4,13B,v,0,1,update_s,1.7
update-rates,h100x4,8.3B,h,2,1,update_rate,10
models,h100x4,7B,v,0,1,iterations_99_s,297
offload-ratio,h100x4,7B,h,2,0.8,update_s,0.4
offload-ratio,h100x4,7B,v,0,0.8,update_s,0.7
stride,a100x4,7B,h,3,1,update_rate,5
stride,h100x4,7B,v,0,1,update_rate,8
stride,h100x4,7B,h,10,1,update_rate,10
models,h100x4,7B,v,0,1,tflops,10
"""


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "published.csv"
    path.write_text(HEAD + ROWS)
    return path


def test_rows_become_what_is_predicted(rows):
    found = {item.label: item for item in read_observations(rows, "h100x4")}
    assert len(found) == 10  # neither another model, nor another machine, nor another quantity
    assert found["7B stride 0 ratio 1 backward_s"].quantity == "backward_s"
    assert found["7B stride 0 ratio 1 backward_s"].workload.engine == "zero3-0.13"
    # The published rate is of the nominal size.
    assert found["8.3B stride 2 ratio 1 update_rate"].value == pytest.approx(0.83)
    assert found["7B stride 0 ratio 1 iterations_99_s"].quantity == "iteration_s"
    assert found["7B stride 0 ratio 1 iterations_99_s"].value == pytest.approx(3.0)
    hybrid = found["7B stride 2 ratio 0.8 update_s"].workload
    assert (hybrid.engine, hybrid.stride, hybrid.offload_ratio) == ("paper", 2, 0.8)
    assert found["7B stride 0 ratio 0.8 update_s"].workload.offload_ratio == 0.8
    assert found["7B stride 10 ratio 1 update_rate"].workload.stride == 10
    assert {item.workload.dp for item in found.values()} == {4}
    assert len(read_observations(rows, "a100x4")) == 1


def test_a_csv_without_rows_is_refused(rows, tmp_path):
    with pytest.raises(FitError, match="no row of"):
        read_observations(rows, "h200x1")
    with pytest.raises(FitError, match="cannot be read"):
        read_observations(tmp_path / "none.csv", "h100x4")


def test_a_csv_of_other_columns_says_which_are_missing(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("machine,model,stride,value\na,b,1,2\n")
    missing = "columns missing: offload_ratio, quantity; expected machine,model,stride,"
    with pytest.raises(FitError, match=missing):
        fit_profile.main([str(path)])
    path.write_text(HEAD + "models,h100x4,7B,v,0,1,forward_s,much\n")
    with pytest.raises(FitError, match="a row cannot be read"):
        fit_profile.main([str(path)])


def test_rates_behind_made_up_rows_are_found_again(rows):
    truth = load_machine("h100x4")
    observations = [
        dataclasses.replace(item, value=getattr(predict(item.workload, truth), item.quantity))
        for item in read_observations(rows, "h100x4")
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
    found = fit(start, observations, STAGES["h100x4"])
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
    with pytest.raises(OSError, match="File exists"):
        fit_profile.main([str(rows), "--machine", "a100x4", "-o", str(out)])


@pytest.mark.parametrize("name", ["h100x4", "a100x4"])
def test_shipped_profiles_are_what_the_fit_gives(name):
    shipped = load_machine(name)
    observations = read_observations(PUBLISHED, name)
    assert len(observations) == shipped.residuals["rows"]
    assert {item.workload.model.name for item in observations} <= set(MODELS)
    errors = [error for _, error in residuals(shipped, observations)]
    assert fit_profile.summary(errors) == pytest.approx(
        (shipped.residuals["median"], shipped.residuals["worst"]), abs=1e-3
    )
    again = fit(shipped, observations, STAGES[name])
    for item, error in residuals(again, observations):
        near = getattr(predict(item.workload, shipped), item.quantity)
        assert item.value * math.exp(error) == pytest.approx(near, rel=0.03)


def test_a_profile_as_text_keeps_every_figure():
    machine = load_machine("h100x4")
    again = machine_from_table(tomllib.loads(fit_profile.profile_text(machine)))
    assert again == machine
