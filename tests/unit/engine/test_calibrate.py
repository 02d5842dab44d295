"""Rates: how they are worked out, and the profile that holds them."""

import itertools
import os
import tomllib
from types import SimpleNamespace

import psutil
import pytest
import torch
from full_disk import files_of_at_most

from deep_optimizer_states.calibrate import cli, rates
from deep_optimizer_states.calibrate.rates import Findings
from deep_optimizer_states.core.device import emulated
from deep_optimizer_states.core.device.emulated import EmulatedDevice
from deep_optimizer_states.core.host import choose_cores, find_place
from deep_optimizer_states.core.kernels.host import HostAdam
from deep_optimizer_states.predict.machine import (
    RATE_NAMES,
    load_machine,
    machine_from_table,
)

FIELDS = {"source": "a test", "gpus": 0, "cores": 2, "host_memory_bytes": 2**34}


@pytest.fixture(autouse=True)
def cpus(monkeypatch):
    """Percent of each CPU in use by others: a quiet machine."""
    percents = [0.0] * 1024
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval, percpu: percents)
    return percents


@pytest.fixture
def found():
    said = []
    findings = Findings(said.append)
    findings.said = said
    return findings


@pytest.fixture
def device():
    device = EmulatedDevice(HostAdam(tail_mode=1))
    yield device
    device.close()


def test_every_rate_of_a_profile_is_measured_and_those_of_a_device_by_its_own_lanes(device):
    of_gpu = {*rates.GPU_RATES, *rates.COMPUTE_RATES}
    assert {*of_gpu, *rates.HOST_RATES} == set(RATE_NAMES)
    found = {
        **rates.copy_rates(device, 2**24),
        **rates.pageable_rates(device, 2**20),
        **rates.adam_rate(device, 2**16),
        **rates.matrix_rate(device, 64),
        **rates.stream_rate(device, 2**20),
    }
    assert set(found) == of_gpu - set(rates.GATHER_RATES)
    assert all(rate > 0 for rate in found.values())


def test_weights_to_the_device_are_cast_from_fp32_and_count_in_16_bits(device, monkeypatch):
    pairs = []
    monkeypatch.setattr(rates, "lane_rates", lambda _device, way, amount, count: [amount])
    monkeypatch.setattr(rates, "_copy", lambda target, source: pairs.append((target, source)))
    found = rates.pageable_rates(device, 64)
    assert found == {"pageable_h2d_bytes_per_s": 32, "pageable_d2h_bytes_per_s": 64}
    half, full = torch.bfloat16, torch.float32
    types = [(target.dtype, source.dtype) for target, source in pairs]
    assert types == [(half, full), (full, full)]


def test_a_rate_is_an_amount_over_a_median_of_its_own_lane_the_first_turn_left_out(
    device, monkeypatch
):
    calls = []

    def lasting(lane, *seconds):
        """Stamps that lie so far apart, the first piece of work left out."""
        times = itertools.accumulate(seconds, initial=7.0)
        stamps = [emulated._Stamp() for _ in range(len(seconds) + 1)]
        for stamp, time_s in zip(stamps, times, strict=True):
            stamp.time_s = time_s
        monkeypatch.setattr(lane, "stamp", iter(stamps).__next__)
        return lane, lambda: calls.append(1)

    work = lasting(device.h2d, 2.0, 4.0, 40.0), lasting(device.d2h, 5.0, 5.0, 5.0)
    assert rates.lane_rates(device, *work, amount=20.0, count=3) == [5.0, 4.0]
    assert len(calls) == 2 * 4


def test_host_rates_are_amounts_over_medians_for_each_number_of_threads(monkeypatch, found):
    passed_s, set_to = [0.0], []

    def takes(seconds):
        return lambda threads: passed_s.append(seconds / threads)

    fused, stream = "host_fused_parameters_per_s", "host_stream_bytes_per_s"
    passes = {fused: (takes(0.004), 8.0), stream: (takes(0.008), 8.0)}
    monkeypatch.setattr(rates, "time", SimpleNamespace(perf_counter=lambda: sum(passed_s)))
    monkeypatch.setattr(rates, "set_threads", set_to.append)
    monkeypatch.setattr(rates, "host_passes", lambda numel, found: passes)
    rates.measure_host(found, 8, [1, 2])
    assert [rate for _, rate in found.rates[fused]] == pytest.approx([2000, 4000])
    assert [rate for _, rate in found.rates[stream]] == pytest.approx([1000, 2000])
    assert [threads for threads, _ in found.rates[stream]] == [1, 2]
    assert set(set_to) >= {1, 2}


def test_a_gpu_that_failed_costs_only_its_rates(found, monkeypatch):
    made = []

    class Broken:
        pci_address = None

        def __init__(self, **_):
            made.append(self)

        def __getattr__(self, name):
            raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr("deep_optimizer_states.core.device.cuda.CudaDevice", Broken)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    rates.measure_cuda(found)
    assert set(found.notes) == {*rates.GPU_RATES, *rates.COMPUTE_RATES}
    place = find_place(0, None)
    assert made[0].cpu_affinity == choose_cores(place, [place]), (
        "memory is taken as the engine takes it"
    )


def test_every_openmp_runtime_of_the_process_is_found():
    maps = (
        "7f r-xp 00000000 08:01 1  /usr/lib/libgomp.so.1.0.0\n"
        "7f r-xp 00000000 08:01 1  /x/torch.libs/libgomp-a34b3233.so.1\n"
        "7f r-xp 00000000 08:01 1  /x/libiomp5.so\n"
        "7f r-xp 00000000 08:01 1  /x/libcompute.so\n7f rw-p 0 00:00 0\n"
    )
    assert [path.rpartition("/")[2] for path in rates._openmp_runtimes(maps)] == [
        "libgomp.so.1.0.0", "libiomp5.so", "libgomp-a34b3233.so.1",
    ]  # fmt: skip


def test_a_rate_that_fails_costs_no_other(found):
    def fail():
        raise RuntimeError("out of\nmemory")

    found.attempt("copies", ("h2d_bytes_per_s", "d2h_bytes_per_s"), fail)
    found.attempt("gathering", ("gather_bytes_per_s",), lambda: {"gather_bytes_per_s": 2e9})
    assert found.notes == dict.fromkeys(
        ("h2d_bytes_per_s", "d2h_bytes_per_s"), "not measured: out of"
    )
    assert found.rates == {"gather_bytes_per_s": 2e9}
    assert "copies: not measured: out of" in found.said
    assert "  gather_bytes_per_s: 2 G/s" in found.said


def test_threads_double_up_to_the_cores_and_arrays_take_a_quarter_of_the_free_memory():
    threads = {cores: cli.default_threads(cores) for cores in (1, 2, 6)}
    assert threads == {1: [1], 2: [1, 2], 6: [1, 2, 4, 6]}
    assert rates.fitting_numel(2**40) == rates.NUMEL
    assert rates.fitting_numel(80 * 1000) == 992


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU lacks")
def test_without_a_gpu_the_host_is_measured_and_the_rest_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rates, "NUMEL", 2**20)
    monkeypatch.setattr(rates, "TURNS_S", 0.0)
    monkeypatch.setattr(rates, "CPU_MATRIX_SIDE", 64)
    monkeypatch.setattr(cli, "free_host_bytes", lambda: 2**33)
    monkeypatch.setattr(cli, "default_threads", lambda cores: [1])
    path, before = tmp_path / "a folder" / "here.toml", torch.get_num_threads()
    path.parent.mkdir()
    try:
        assert cli.main(["-o", str(path)]) == 0
    finally:
        rates.set_threads(before)
    machine = load_machine(path)
    assert (machine.name, machine.gpus) == ("here", 0)
    for name in rates.HOST_RATES:
        assert getattr(machine.rates, name)[0][0] == 1
    for name in rates.GPU_RATES:
        assert f"# {name}: not measured: " in path.read_text()
    for name in rates.COMPUTE_RATES:
        assert getattr(machine.rates, name) > 0
    assert "# of the CPU, which is the device here\n" in path.read_text()
    out, err = capsys.readouterr()
    assert out == ""
    assert "GPU: not measured: " in err
    assert err.splitlines()[-1].endswith(f"rates not measured: {path}")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-o", "there.toml"], "there.toml: is there already; give another name, or --force"),
        (["-o", "x.json"], "x.json: give a name that ends in .toml"),
        (["-o", "no/x.toml"], "no/x.toml: cannot be written: No such file"),
        (["-o", "/proc/x.toml"], "/proc/x.toml: cannot be written: "),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_is_measured(
    words, text, tmp_path, monkeypatch, capsys
):
    def measure(_found):
        raise AssertionError("measured before the command line was checked")

    monkeypatch.setattr(cli, "measure", measure)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.toml").write_text("kept")
    assert cli.main(words) == 2
    assert capsys.readouterr().err.startswith(f"calibrate: error: {text}")
    assert (tmp_path / "there.toml").read_text() == "kept"


@pytest.fixture
def measured(monkeypatch):
    """A measurement that takes no time; ``meanwhile`` is called during it."""
    found_meanwhile = []

    def measure(found):
        found.rates["h2d_bytes_per_s"] = 1e9
        for action in found_meanwhile:
            action()
        return FIELDS

    monkeypatch.setattr(cli, "measure", measure)
    return found_meanwhile


@pytest.mark.parametrize("to_file", [True, False])
def test_the_profile_is_all_of_the_file_or_of_standard_output(measured, tmp_path, capsys, to_file):
    """With ``--force`` a file is overwritten."""
    path = tmp_path / "m.toml"
    path.write_text("old")
    assert cli.main(["-o", str(path), "--force"] if to_file else []) == 0
    out = capsys.readouterr().out
    machine = load_machine(path) if to_file else machine_from_table(tomllib.loads(out))
    assert machine.rates.h2d_bytes_per_s == 1e9
    assert machine.name == ("m" if to_file else "this-machine")
    assert [file.name for file in tmp_path.iterdir()] == ["m.toml"]


@pytest.mark.parametrize("gpus", [0, 1])
def test_costs_of_a_layer_are_assumed_and_said_to_be_where_there_is_a_gpu(
    monkeypatch, tmp_path, gpus
):
    fields = FIELDS | {"gpus": gpus, "device_memory_bytes": 8e9}
    monkeypatch.setattr(cli, "measure", lambda found: fields)
    path = tmp_path / "m.toml"
    assert cli.main(["-o", str(path)]) == 0
    profile = load_machine(path)
    assert (profile.costs == load_machine("h200x1").costs) == bool(gpus)
    assert {profile.kind(name) for name in ("launch_s", "hooks_s")} == {
        "assumed" if gpus else "measured"
    }
    assert ("# Costs are assumed: " in path.read_text()) == bool(gpus)


def test_a_file_that_came_up_meanwhile_stays_and_ctrl_c_leaves_none(measured, tmp_path, capsys):
    path = tmp_path / "m.toml"
    measured.append(lambda: path.write_text("other"))
    assert cli.main(["-o", str(path)]) == 2
    assert "File exists" in capsys.readouterr().err
    assert path.read_text() == "other"

    def pressed():
        raise KeyboardInterrupt

    measured[:] = [pressed]
    assert cli.main(["-o", str(tmp_path / "n.toml")]) == 130
    said = ["loading torch ...", "calibrate: interrupted, nothing written"]
    assert capsys.readouterr().err.splitlines() == said
    assert [file.name for file in tmp_path.iterdir()] == ["m.toml"]


@pytest.mark.parametrize("before", [None, "old"])
def test_on_a_full_disk_nothing_changes(measured, tmp_path, capsys, before):
    path = tmp_path / "m.toml"
    if before:
        path.write_text(before)
    with files_of_at_most(10):
        assert cli.main(["-o", str(path), "--force"]) == 2
    said = capsys.readouterr().err
    assert "File too large" in said
    assert str(path) in said
    assert [file.read_text() for file in tmp_path.iterdir()] == ([before] if before else [])


def test_too_little_memory_is_said(monkeypatch, capsys):
    monkeypatch.setattr(cli, "free_host_bytes", lambda: 2**20)
    assert cli.main([]) == 2
    assert "1 MiB of host memory are free: too little" in capsys.readouterr().err


def test_what_else_runs_on_usable_cpus_is_warned_of(cpus, measured, capsys):
    usable = sorted(os.sched_getaffinity(0))
    cpus[usable[0]] = 4.0  # what a quiet machine does by itself
    assert cli.busy_warning() == ""
    cpus[usable[0]] = 100.0
    cpus[usable[-1] + 1] = 100.0  # not ours
    cli.main([])
    used = f"warning: other processes use 1.0 of {len(usable)} CPUs: figures come out too low"
    assert used in capsys.readouterr().err
