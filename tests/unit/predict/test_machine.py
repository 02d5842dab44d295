"""Profiles: what is read, what is refused, and what a missing rate says."""

import math
import tomllib

import pytest

from deep_optimizer_states.predict.machine import (
    MachineError,
    load_machine,
    machine_from_table,
    machine_names,
    profile_text,
)

SMALL = {"name": "m", "source": "s", "gpus": 0, "cores": 2, "host_memory_bytes": 1e9}


@pytest.mark.parametrize("name", machine_names())
def test_every_shipped_profile_says_how_each_rate_came_about(name):
    machine = load_machine(name)
    assert machine.name == name
    assert set(machine.kinds) == set(machine.known)
    assert {"h2d_bytes_per_s", "launch_s"} & set(machine.known)
    assert ("measured" in machine.kinds.values()) == machine.source.startswith("measured")


def test_a_profile_is_read_from_any_file(tmp_path):
    path = tmp_path / "my machine.toml"
    path.write_text(
        'name = "mine"\nsource = "here"\ngpus = 0\ncores = 4\nhost_memory_bytes = 8e9\n'
        "[rates]\nhost_stream_bytes_per_s = [[1, 10e9], [3, 20e9]]\n"
    )
    machine = load_machine(path)
    assert machine.kind("host_stream_bytes_per_s") == "measured"
    # Below the first thread count in proportion, between two linear, above the last level.
    curve = [machine.curve("host_stream_bytes_per_s", n) for n in (0.5, 1, 2, 3, 9)]
    assert curve == [5e9, 10e9, 15e9, 20e9, 20e9]


RATES = (0, 0.0, -1e9, math.nan, math.inf, True, "fast")
CURVES = ([], 5e9, [[0, 1e9]], [[1, 0.0]], [[2, 1e9], [1, 2e9]], [[1]])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *(({"rates": {"h2d_bytes_per_s": rate}}, r"rates\.h2d_bytes_per_s") for rate in RATES),
        *(({"rates": {"host_adam_parameters_per_s": c}}, "host_adam_param") for c in CURVES),
        *(({field: None}, f"{field} is missing") for field in SMALL),
        ({"rates": {"h2d_bytes": 1e9}}, r"unknown key 'rates\.h2d_bytes'.*h2d_bytes_per_s"),
        ({"core": 2}, "unknown key 'core': did you mean 'cores'"),
        ({"gpus": -1}, "gpus = -1"),
        ({"gpus": 1}, "device_memory_bytes is missing"),
        ({"cores": 0}, "cores = 0"),
        ({"name": " "}, "name = ' ': give text"),
        ({"rates": 3}, "rates = 3: give a table"),
        ({"kinds": {"h2d_bytes": "fitted"}}, "kinds.h2d_bytes: there is no such rate or cost"),
        ({"costs": {"launch_s": 1e-3, "hooks_s": 2e-3}}, "costs.hooks_s = 0.002: it is a part of"),
        ({"kinds": {"h2d_bytes_per_s": "guessed"}}, "'measured', 'fitted' or 'assumed'"),
        ({"costs": {"layer_s": -1.0}}, r"costs\.layer_s"),
        ({"host_memory_bytes": 0}, "host_memory_bytes = 0"),
    ],
)
def test_a_wrong_or_missing_field_is_refused(change, words):
    table = {name: value for name, value in (SMALL | change).items() if value is not None}
    with pytest.raises(MachineError, match=f"FILE: .*{words}"):
        machine_from_table(table, "FILE")


def test_a_missing_rate_says_what_measures_it():
    machine = machine_from_table(SMALL)
    for ask in (machine.rate, lambda name: machine.curve(name, 1)):
        name = "d2h_bytes_per_s" if ask == machine.rate else "host_adam_parameters_per_s"
        with pytest.raises(
            MachineError, match=rf"rates\.{name}: .*deep_optimizer_states calibrate"
        ):
            ask(name)


def test_files_that_are_no_profiles(tmp_path):
    with pytest.raises(MachineError, match="cannot be read"):
        load_machine(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("name = ")
    with pytest.raises(MachineError, match="not valid TOML"):
        load_machine(broken)


def test_a_profile_as_text_says_what_was_measured_and_what_not():
    rates = {"h2d_bytes_per_s": 5.12345e10, "host_fused_parameters_per_s": [(1, 1e9), (2, 3)]}
    notes = {"d2h_bytes_per_s": "not measured: no CUDA", "h2d_bytes_per_s": "a stand-in"}
    name = 'a "b" \\ \u00e9\t'
    text = profile_text({**SMALL, "name": name, "rates": rates, "kinds": {}}, notes)
    machine = machine_from_table(tomllib.loads(text))
    assert machine.name == name
    assert machine.rates.h2d_bytes_per_s == 5.123e10
    assert machine.rates.host_fused_parameters_per_s == ((1, 1e9), (2, 3.0))
    assert machine.rates.d2h_bytes_per_s is None
    assert "# d2h_bytes_per_s: not measured: no CUDA\n" in text
    assert "# a stand-in\n" in text
    with pytest.raises(MachineError, match="h2d_bytes_per_s"):
        profile_text({**SMALL, "rates": {"h2d_bytes_per_s": float("inf")}})
