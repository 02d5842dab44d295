"""The fit: rows as they are read, and rates that are found again."""

import dataclasses
import math

import pytest

from benchmarks import fit as fit_profile
from benchmarks.fit import MODELS, STAGES, fit, observations_of, residuals
from deep_optimizer_states.predict.machine import load_machine
from deep_optimizer_states.predict.predict import predict


def test_rows_become_what_is_predicted():
    found = {item.label: item for item in observations_of("h100x4")}
    assert found["7B stride 0 ratio 1 backward_s"].quantity == "backward_s"
    assert found["7B stride 0 ratio 1 backward_s"].workload.engine == "stock-0.13"
    # The published rate is of the nominal size.
    assert found["8.3B stride 2 ratio 1 update_rate"].value == pytest.approx(8.3 / 10.672)
    assert found["7B stride 0 ratio 1 iterations_99_s"].quantity == "iteration_s"
    assert found["7B stride 0 ratio 1 iterations_99_s"].value == pytest.approx(295.382 / 99)
    hybrid = found["7B stride 2 ratio 0.8 update_s"].workload
    assert (hybrid.engine, hybrid.stride, hybrid.offload_ratio) == ("stride-0.13", 2, 0.8)
    assert {item.workload.dp for item in found.values()} == {4}
    assert {item.workload.model.name for item in found.values()} == set(MODELS)
    assert observations_of("h200x1") == []


def test_rates_behind_made_up_rows_are_found_again():
    truth = load_machine("h100x4")
    phases = (f"7B stride 0 ratio 1 {name}_s" for name in ("forward", "backward", "update"))
    made_up = {
        *phases,
        "7B stride 0 ratio 1 iterations_99_s",
        "7B stride 0 ratio 0.8 update_s",
        "7B stride 2 ratio 0.8 update_s",
        "7B stride 10 ratio 1 update_rate",
        "8.3B stride 2 ratio 1 update_rate",
        "10B stride 2 ratio 1 update_s",
    }
    observations = [
        dataclasses.replace(item, value=getattr(predict(item.workload, truth), item.quantity))
        for item in observations_of("h100x4")
        if item.label in made_up
    ]
    rates = dataclasses.replace(
        truth.rates,
        host_adam_parameters_per_s=((24, 2e9),),
        h2d_bytes_per_s=60e9,
        d2h_bytes_per_s=60e9,
        pageable_d2h_bytes_per_s=8e9,
    )
    start = dataclasses.replace(truth, rates=rates)
    before = sum(abs(error) for _, error in residuals(start, observations))
    found = fit(start, observations, STAGES["h100x4"])
    assert sum(abs(error) for _, error in residuals(found, observations)) < before / 20
    (_, adam) = found.rates.host_adam_parameters_per_s[0]
    assert adam == pytest.approx(truth.rates.host_adam_parameters_per_s[0][1], rel=0.1)
    assert found.rates.pageable_d2h_bytes_per_s == pytest.approx(
        truth.rates.pageable_d2h_bytes_per_s, rel=0.02
    )
    assert found.rates.h2d_bytes_per_s == found.rates.d2h_bytes_per_s


def test_a_profile_that_was_written_is_read_again(tmp_path, capsys):
    out = tmp_path / "new.toml"
    assert fit_profile.main(["--machine", "a100x4", "-o", str(out)]) == 0
    assert "fit: 7 rows" in capsys.readouterr().out
    machine, shipped = load_machine(out), load_machine("a100x4")
    assert machine.kinds == shipped.kinds
    assert machine.costs == shipped.costs
    assert machine.residuals["worst"] == pytest.approx(shipped.residuals["worst"], abs=1e-3)
    with pytest.raises(OSError, match="File exists"):
        fit_profile.main(["--machine", "a100x4", "-o", str(out)])


@pytest.mark.parametrize("name", ["h100x4", "a100x4"])
def test_shipped_profiles_are_what_the_fit_gives(name):
    shipped, observations = load_machine(name), observations_of(name)
    assert len(observations) == shipped.residuals["rows"]
    errors = [error for _, error in residuals(shipped, observations)]
    assert fit_profile.summary(errors) == pytest.approx(
        (shipped.residuals["median"], shipped.residuals["worst"]), abs=1e-3
    )
    again = fit(shipped, observations, STAGES[name])
    for item, error in residuals(again, observations):
        near = getattr(predict(item.workload, shipped), item.quantity)
        assert item.value * math.exp(error) == pytest.approx(near, rel=0.03)
