"""Rates: how they are worked out, and the profile that holds them."""

import tomllib
from types import SimpleNamespace

import pytest
import torch

from deep_optimizer_states.calibrate import cli, rates
from deep_optimizer_states.calibrate.cli import profile_text
from deep_optimizer_states.calibrate.rates import Findings
from deep_optimizer_states.core.device.emulated import EmulatedDevice
from deep_optimizer_states.core.host import choose_cores, find_place
from deep_optimizer_states.core.kernels.host import HostAdam
from deep_optimizer_states.core.timeline import Recorder, Span
from deep_optimizer_states.predict.machine import (
    CURVE_NAMES,
    RATE_NAMES,
    MachineError,
    load_machine,
    machine_from_table,
)

FIELDS = {
    "name": "m", "source": "a test", "gpus": 0, "cores": 2, "host_memory_bytes": 2**34,
}  # fmt: skip


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    """What else runs on the machine of the tests is told in test_watch.py."""
    monkeypatch.setattr(cli, "look_around", lambda say: SimpleNamespace(warning=lambda verb: ""))


@pytest.fixture
def found():
    said = []
    findings = Findings(said.append)
    findings.said = said
    return findings


@pytest.fixture
def bench():
    recorder = Recorder()
    emulated = EmulatedDevice(HostAdam(tail_mode=1), recorder=recorder)
    yield rates.Bench(emulated, recorder)
    emulated.close()


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(rates, "NUMEL", 2**20)
    monkeypatch.setattr(rates, "_TURNS_S", 0.0)
    monkeypatch.setattr(rates, "CPU_MATRIX_SIDE", 64)
    monkeypatch.setattr(cli, "free_host_bytes", lambda: 2**33)
    before = torch.get_num_threads()
    yield
    rates.set_threads(before)


def test_every_rate_of_a_profile_is_measured_somewhere():
    of_gpu = (*rates.GPU_RATES, *rates.COMPUTE_RATES)
    assert {*of_gpu, *rates.HOST_RATES} == set(RATE_NAMES)
    assert set(rates.HOST_RATES) == set(CURVE_NAMES)


def test_the_rate_beside_counts_what_moved_while_both_ways_were_busy():
    spans = [
        Span("H2D", "c", 0.0, 2.0), Span("H2D", "c", 2.0, 4.0), Span("H2D", "c", 4.0, 6.0),
        Span("D2H", "c", 1.0, 3.0), Span("D2H", "c", 3.0, 5.0),
    ]  # fmt: skip
    # From 1 to 5 s: half a copy, a whole one and another half.
    assert rates.rate_beside(spans, "H2D", 10.0) == pytest.approx(10.0 * 2 / 4)
    assert rates.rate_beside(spans, "D2H", 10.0) == pytest.approx(10.0 * 2 / 4)
    faster = [*spans[:3], Span("D2H", "c", 1.0, 2.0), Span("D2H", "c", 2.0, 3.0)]
    assert rates.rate_beside(faster, "D2H", 10.0) == pytest.approx(10.0)
    with pytest.raises(RuntimeError, match="did not overlap"):
        rates.rate_beside([spans[0], Span("D2H", "c", 3.0, 4.0)], "H2D", 1.0)


def test_all_rates_of_a_device_come_from_its_own_lanes(bench):
    found = {
        **rates.copy_rates(bench, 2**24),
        **rates.pageable_rates(bench, 2**20),
        **rates.adam_rate(bench, 2**16),
        **rates.matrix_rate(bench, 64),
        **rates.stream_rate(bench, 2**20),
    }
    names = {*rates.GPU_RATES, *rates.COMPUTE_RATES}
    assert set(found) == names - set(rates.GATHER_RATES)
    assert all(rate > 0 for rate in found.values())


def test_a_bench_leaves_the_first_turn_out(bench):
    calls = []
    spans = bench.spans((bench.device.compute, lambda: calls.append(1)), count=3)
    assert len(calls) == 4
    assert [span.lane for span in spans] == ["GPU"] * 3


class Clock:
    """Time that passes while the passes of a test run, and only then."""

    def __init__(self):
        self.now_s = 0.0

    def perf_counter(self):
        return self.now_s

    def takes(self, seconds):
        """A pass by the seconds it takes with a number of threads."""

        def run(threads):
            self.now_s += seconds(threads)

        return run


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(rates, "time", clock)
    monkeypatch.setattr(rates, "set_threads", lambda threads: None)
    return clock


def test_host_rates_are_amounts_over_medians_for_each_number_of_threads(clock):
    passes = {
        "host_fused_parameters_per_s": (clock.takes(lambda threads: 0.004 / threads), 8.0),
        "host_stream_bytes_per_s": (clock.takes(lambda threads: 0.008 / threads), 8.0),
    }
    lines = []
    found = Findings(lines.append)
    rates.measure_host(found, passes, [1, 2])
    curves = found.rates
    fused, stream = ([rate for _, rate in curves[name]] for name in passes)
    assert fused == pytest.approx([2000, 4000])
    assert stream == pytest.approx([1000, 2000])
    assert [threads for threads, _ in curves["host_stream_bytes_per_s"]] == [1, 2]
    assert lines[1].startswith("  1 thread(s): fused ")
    assert len(lines) == 4


def test_rates_are_measured_with_as_many_threads_of_torch(monkeypatch):
    before, seen = torch.get_num_threads(), []
    monkeypatch.setattr(rates, "_TURNS_S", 0.0)
    passes = {
        "host_fused_parameters_per_s": (lambda threads: seen.append(torch.get_num_threads()), 8.0)
    }
    try:
        rates.measure_host(Findings(lambda line: None), passes, [1, 2])
    finally:
        rates.set_threads(before)
    assert set(seen) == {1, 2}
    assert seen == sorted(seen)


def test_more_threads_that_are_slower_are_warned_of(clock):
    passes = {"host_stream_bytes_per_s": (clock.takes(lambda threads: 0.002 * threads), 8.0)}
    lines = []
    rates.measure_host(Findings(lines.append), passes, [1, 2])
    (warning,) = lines[4:]
    assert "host_stream_bytes_per_s: 2 threads gave " in warning
    assert "was something else running?" in warning


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
    assert set(found.missing) == {*rates.GPU_RATES, *rates.COMPUTE_RATES}
    place = find_place(0, None)
    assert made[0].near == choose_cores(place, [place]), "memory is taken as the engine takes it"


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
    assert found.missing == dict.fromkeys(("h2d_bytes_per_s", "d2h_bytes_per_s"), "out of")
    assert found.rates == {"gather_bytes_per_s": 2e9}
    assert "copies: not measured: out of" in found.said
    assert "  gather_bytes_per_s: 2 G/s" in found.said


def test_a_profile_says_what_was_measured_and_what_not(found):
    found.rates = {"h2d_bytes_per_s": 5.12345e10, "host_fused_parameters_per_s": [(1, 1e9), (2, 3)]}
    found.lack("copies", ("d2h_bytes_per_s",), "no CUDA\n[rates]")
    found.notes["h2d_bytes_per_s"] = "a stand-in"
    text = profile_text({**FIELDS, "name": 'a "b" \\ \u00e9\t'}, found)
    machine = machine_from_table(tomllib.loads(text))
    assert machine.name == 'a "b" \\ \u00e9\t'
    assert machine.rates.h2d_bytes_per_s == 5.123e10
    assert machine.rates.host_fused_parameters_per_s == ((1, 1e9), (2, 3.0))
    assert machine.rates.d2h_bytes_per_s is None
    assert "# d2h_bytes_per_s: not measured: no CUDA [rates]\n" in text
    assert "# a stand-in\n" in text


def test_a_profile_that_no_reader_takes_is_not_written(found):
    found.rates = {"h2d_bytes_per_s": float("inf")}
    with pytest.raises(MachineError, match="h2d_bytes_per_s"):
        profile_text(FIELDS, found)


@pytest.mark.parametrize(("cores", "threads"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6])])
def test_threads_double_up_to_the_cores(cores, threads):
    assert cli.default_threads(cores) == threads


def test_arrays_take_a_quarter_of_the_free_memory_at_most():
    assert rates.fitting_numel(2**40) == rates.NUMEL
    assert rates.fitting_numel(80 * 1000) == 992


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU lacks")
def test_without_a_gpu_the_host_is_measured_and_the_rest_named(tmp_path, small, capsys):
    path = tmp_path / "a folder" / "here.toml"
    path.parent.mkdir()
    assert cli.main(["-o", str(path), "--threads", "1"]) == 0
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


def test_without_a_file_the_profile_is_all_of_standard_output(small, capsys):
    assert cli.main(["--threads", "1", "--device", "cpu", "--name", "n"]) == 0
    table = tomllib.loads(capsys.readouterr().out)
    assert table["name"] == "n"
    assert machine_from_table(table).cores >= 1


@pytest.fixture
def not_measured(monkeypatch):
    def measure(*_args, **_options):
        raise AssertionError("measured before the command line was checked")

    monkeypatch.setattr(cli, "measure", measure)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-o", "there.toml"], "there.toml: is there already; give another name, or --force"),
        (["-o", "."], ".: is a folder; give a file"),
        (["-o", "x.json"], "x.json: give a name that ends in .toml"),
        (["-o", "no/x.toml"], "no: no such folder"),
        (["-o", "/proc/x.toml"], "/proc/x.toml: cannot be written: "),
        (["--threads", "1", "100000"], "--threads 100000: this process may use "),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_is_measured(
    words, text, not_measured, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.toml").write_text("kept")
    assert cli.main(words) == 2
    assert capsys.readouterr().err.startswith(f"calibrate: error: {text}")
    assert (tmp_path / "there.toml").read_text() == "kept"


@pytest.fixture
def measured(monkeypatch):
    def measure(found, *_args, **_options):
        found.rates["h2d_bytes_per_s"] = 1e9
        return {name: value for name, value in FIELDS.items() if name != "name"}

    monkeypatch.setattr(cli, "measure", measure)


def test_force_overwrites(measured, tmp_path):
    path = tmp_path / "m.toml"
    path.write_text("old")
    assert cli.main(["-o", str(path), "--force"]) == 0
    assert load_machine(path).rates.h2d_bytes_per_s == 1e9
    assert [file.name for file in tmp_path.iterdir()] == ["m.toml"]


def test_a_file_that_came_up_meanwhile_stays(tmp_path, monkeypatch, capsys):
    path = tmp_path / "m.toml"

    def measure(*_args, **_options):
        path.write_text("other")
        return {name: value for name, value in FIELDS.items() if name != "name"}

    monkeypatch.setattr(cli, "measure", measure)
    assert cli.main(["-o", str(path)]) == 2
    assert "File exists" in capsys.readouterr().err
    assert path.read_text() == "other"
    assert [file.name for file in tmp_path.iterdir()] == ["m.toml"]


def test_after_ctrl_c_nothing_is_written(tmp_path, monkeypatch, capsys):
    def measure(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "measure", measure)
    assert cli.main(["-o", str(tmp_path / "m.toml")]) == 130
    said = ["loading torch ...", "calibrate: interrupted, nothing written"]
    assert capsys.readouterr().err.splitlines() == said
    assert list(tmp_path.iterdir()) == []


def test_too_little_memory_is_said(monkeypatch, capsys):
    monkeypatch.setattr(cli, "free_host_bytes", lambda: 2**20)
    assert cli.main(["--threads", "1"]) == 2
    assert "1 MiB of host memory are free: too little" in capsys.readouterr().err
