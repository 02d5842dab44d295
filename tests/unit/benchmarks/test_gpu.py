"""Rows, model and figures of the GPU benchmark; nothing is trained here."""

import pytest
import torch

from benchmarks import gpu, gpu_pace, gpu_report
from benchmarks.bound import Limits
from benchmarks.gpu_model import choose_parameters, make_point, stock_config
from benchmarks.gpu_report import Outcome
from benchmarks.gpu_rows import ROWS, STOCK, config_of
from benchmarks.gpu_worker import explain
from benchmarks.report import BenchmarkError

GIB = 2**30
BY_NAME = {row.name: row for row in ROWS}
POINT = make_point(3_000_000, 64, 5, "cpu")
CPU = Limits(None, None, 28e9, 28e9, None)


def found(iteration_s, update_s=None, loss="0x1p+0", **more):
    return {
        "losses": [loss],
        "digests": {"weights": "a"},
        "iteration_s": iteration_s,
        "update_s": update_s,
        "compute_s": [0.5] * len(iteration_s) if update_s else None,
        "parameters": 10**9,
        "set_up_s": 1.0,
        "device_bytes": None,
        "resident_bytes": GIB,
        **more,
    }


def outcome(name, *rounds):
    return Outcome(BY_NAME[name], dict(enumerate(rounds)))


def test_rows_change_nothing_but_their_own_keys():
    stock, untouched = stock_config(POINT, 1.0), stock_config(POINT, 1.0)
    for row in ROWS:
        config = config_of(row, stock)
        assert stock == untouched
        assert config_of(BY_NAME[STOCK], stock) == untouched
        for key in ("deep_optimizer_states", *row.config):
            config.pop(key, None)
        zero = config["zero_optimization"]
        zero.pop("zenflow", None)
        for key in row.offload:
            zero["offload_optimizer"].pop(key)
        plain = config_of(BY_NAME[STOCK], stock)
        for key in row.offload:
            plain["zero_optimization"]["offload_optimizer"].pop(key, None)
        assert config == plain, row.name


def test_our_rows_are_checked_by_the_engines_own_config():
    from deep_optimizer_states.config import read_settings

    stock = stock_config(POINT, 1.0)
    assert [row.name for row in ROWS if read_settings(config_of(row, stock)).enabled] == [
        row.name for row in ROWS if row.block
    ]


@pytest.mark.parametrize("parameters", [1_000_000, 3_000_000, 50e6, 300e6, 1.6e9, 7e9, 40e9])
def test_the_model_is_near_the_size_asked_for(parameters):
    point = make_point(int(parameters), 2048, 5, "cuda")
    assert point.model.num_parameters() == pytest.approx(parameters, rel=0.5)
    assert point.subgroup_numel <= 100_000_000


def test_too_small_a_model_is_refused():
    with pytest.raises(BenchmarkError, match="--parameters 1,000"):
        make_point(1000, 64, 5, "cpu")


def test_the_scarcest_resource_limits_the_model():
    plenty = 10**15

    def row_s(numel):
        return 10 + 8e-9 * numel

    assert choose_parameters(64 * GIB, plenty, 1e9, row_s)[1] == "host memory"
    assert choose_parameters(plenty, 24 * GIB, 1e9, row_s)[1] == "device memory"
    chosen, limit = choose_parameters(plenty, None, 34, row_s)
    assert limit == "time"
    assert chosen == pytest.approx(3e9, rel=1e-3)
    assert choose_parameters(0, 0, 1, row_s)[0] > 0


def test_without_rates_the_model_is_of_a_fixed_size_and_says_so():
    chosen, why = choose_parameters(10**15, None, 60, None)
    assert chosen == 10**9
    assert "could not be measured" in why
    assert choose_parameters(16 * GIB, None, 60, None) == choose_parameters(
        16 * GIB, None, 1e9, lambda numel: 0.0
    )


def profile(path, **changes):
    """A profile whose rates are round, with some of them changed or (None) left out."""
    rates = {
        "h2d_bytes_per_s": 50e9,
        "d2h_bytes_per_s": 50e9,
        "device_flops_per_s": 400e12,
        "device_stream_bytes_per_s": 3e12,
        "device_adam_parameters_per_s": 100e9,
        "page_lock_bytes_per_s": 2e9,
        "host_stream_bytes_per_s": [[1, 10e9], [16, 160e9]],
        "host_adam_parameters_per_s": [[1, 0.3e9], [16, 4e9]],
        "host_fused_parameters_per_s": [[1, 0.3e9], [16, 5e9]],
        "host_cast_parameters_per_s": [[1, 1e9], [16, 14e9]],
        **changes,
    }
    lines = ['name = "made up"', 'source = "made up"', "gpus = 1", "cores = 16"]
    lines += ["host_memory_bytes = 137e9", "device_memory_bytes = 150e9", "[rates]"]
    lines += [f"{name} = {rate}" for name, rate in rates.items() if rate is not None]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def pace(tmp_path, monkeypatch):
    """Makes the pace of a machine whose every rate is known, of sha256 too."""
    monkeypatch.setattr(gpu_pace, "_hash_bytes_per_s", lambda: 1e9)
    point = make_point(3_000_000, 2048, 7, "cuda")
    path = tmp_path / "machine.toml"
    return lambda **changes: gpu_pace.read_pace(profile(path, **changes), 12.0, point)


def test_a_row_takes_what_the_measured_rates_say(pace):
    fast = pace().row_time(4_000_000_000)
    assert fast.start_s == 12.0
    assert fast.lock_s == pytest.approx(18 * 4e9 / 2e9, rel=0.05)
    # Stock's CPUAdam alone takes a second an iteration; its other passes come on top.
    assert 7 * 1.0 < fast.iterations_s < 7 * 4.0
    slow = pace(host_adam_parameters_per_s=[[16, 0.4e9]]).row_time(4_000_000_000)
    assert slow.iterations_s > fast.iterations_s + 7 * 0.85 * 4e9 / 0.4e9
    assert slow.lock_s == fast.lock_s
    locked = pace(page_lock_bytes_per_s=8e9).row_time(4_000_000_000)
    assert locked.lock_s == pytest.approx(fast.lock_s / 4)


def test_a_faster_machine_gets_a_larger_model(pace):
    sizes = [
        choose_parameters(10**13, 10**13, 40, lambda numel, at=at: at.row_time(numel).seconds)[0]
        for at in (pace(page_lock_bytes_per_s=1e9), pace(), pace(page_lock_bytes_per_s=8e9))
    ]
    assert sizes == sorted(set(sizes))
    assert pace().row_time(sizes[1]).seconds == pytest.approx(40, abs=2)


def test_the_sentence_names_the_rates(pace):
    told = pace().explain(1_000_000_000)
    assert "12 s to start" in told
    assert "page-lock at 2 GB/s" in told
    assert "CPUAdam 4e9 parameters/s, link 50 GB/s" in told
    assert "7 iterations of stock" in told
    assert "to hash at 16 GB/s" in told


def test_a_rate_that_lacks_is_named(pace):
    with pytest.raises(BenchmarkError, match="host_adam_parameters_per_s"):
        pace(host_adam_parameters_per_s=None)


def test_the_model_follows_from_the_calibration_that_ran_first(monkeypatch, capsys):
    order = []

    def calibrate(path, device, limit_s):
        order.append("calibrate")
        profile(path)
        return ""

    def worker(job, prefix, limit_s):
        order.append(prefix.name)
        return 1.0, found([1.0], [0.5])

    monkeypatch.setattr(gpu, "measure_start", lambda device: gpu.Start(5.0, None))
    monkeypatch.setattr(gpu, "run_calibration", calibrate)
    monkeypatch.setattr(gpu, "run_worker", worker)
    monkeypatch.setattr(gpu, "free_host_bytes", lambda: 2**40)
    flags = ["--device", "cpu", "--rounds", "1", "--rows", "all-host", "--minutes", "4"]
    assert gpu.main(flags) == 0
    assert order == ["calibrate", "stock-0", "all-host-0"]
    told = capsys.readouterr().err
    assert "limited by time" in told
    assert "s are there for a row; a row is predicted to take" in told


def test_state_that_does_not_fit_the_device_is_not_started(monkeypatch, capsys):
    started = []

    def worker(job, prefix, limit_s):
        started.append(prefix.name)
        return 1.0, found([1.0], [0.5])

    monkeypatch.setattr(gpu, "measure_start", lambda device: gpu.Start(5.0, 30 * GIB))
    monkeypatch.setattr(gpu, "run_calibration", lambda *_: "left out here")
    monkeypatch.setattr(gpu, "run_worker", worker)
    monkeypatch.setattr(gpu, "free_host_bytes", lambda: 2**40)
    flags = ["--rounds", "1", "--rows", "all-resident", "--parameters"]
    # 18 device bytes a parameter beside 8 GiB kept free: 1.2e9 parameters fit, 1.6e9 do not.
    assert gpu.main([*flags, "1.2e9"]) == 0
    assert gpu.main([*flags, "1.6e9"]) == 0
    assert started == ["stock-0", "all-resident-0", "stock-0"]
    assert "18 device bytes a parameter" in capsys.readouterr().out


def test_state_on_the_device_has_no_share_of_a_bound_that_assumes_the_host():
    limits = Limits(50e9, 50e9, 100e9, 100e9, None)
    rows = [outcome(STOCK, found([2.0], [1.0]))]
    rows.append(outcome("all-resident", found([0.6], [0.05], device_share=1.0)))
    resident = gpu_report.figures(rows, limits, cores=2)[1]
    assert resident["iteration_s_stock_over"] == pytest.approx(2.0 / 0.6)
    assert "share_of_iteration_bound" not in resident
    assert "share_of_limits" not in resident


def test_one_row_synchronises_deepspeeds_timer_and_one_leaves_it_to_the_plugin():
    stock = stock_config(POINT, 1.0)
    shipped, timed = (
        config_of(BY_NAME[name], stock) for name in ("just-in-time", "just-in-time-timer")
    )
    assert timed.pop("timers") == {"throughput": {"synchronized": True}}
    assert timed == shipped


def test_speed_ups_are_medians_over_common_rounds():
    stock = outcome(STOCK, found([2.0], [1.0]), found([8.0], [2.0]))
    ours = outcome("all-host", found([1.0], [0.25]), found([4.0], [0.5]), found([1.0], [1.0]))
    rows = gpu_report.figures([stock, ours], CPU, cores=2)
    assert rows[1]["iteration_s_stock_over"] == 2.0
    assert rows[1]["update_s_stock_over"] == 4.0
    assert rows[1]["verdict"] == "equal"
    assert rows[1]["parameters_per_s"] == pytest.approx(1e9 / 0.5)
    assert rows[1]["share_of_update_bound"] == pytest.approx(1.0 / 0.5)


def test_no_speed_up_of_ours_where_the_bits_differ():
    ours = outcome("all-host", found([1.0], [0.5], loss="0x1p+3"))
    rows = gpu_report.figures([outcome(STOCK, found([2.0], [1.0])), ours], CPU, cores=2)
    assert rows[1]["withheld"]
    assert "withheld" in gpu_report.as_text(rows)
    assert rows[1]["iteration_s_stock_over"] is None


def test_others_may_differ_and_say_so():
    stale = outcome("zenflow", found([1.0], loss="0x1p+3"))
    rows = gpu_report.figures([outcome(STOCK, found([2.0], [1.0])), stale], CPU, cores=2)
    assert rows[1]["iteration_s_stock_over"] == 2.0
    assert "differs: losses from iteration 1 (stale)" in gpu_report.as_text(rows)


def test_failures_and_lack_of_time_are_in_the_table():
    failed = Outcome(BY_NAME["superoffload"], failed="no GPU")
    late = Outcome(BY_NAME["zenflow"], left_out="no time")
    rows = gpu_report.figures([failed, late], None, cores=2)
    text = gpu_report.as_text(rows)
    assert "failed: no GPU" in text
    assert "left out: no time" in text
    assert gpu_report.bounds([failed, late], None) is None


def test_rows_are_chosen_by_name_and_stock_is_always_there():
    assert [row.name for row in gpu.chosen_rows(["zenflow"])] == [STOCK, "zenflow"]
    assert len(gpu.chosen_rows(None)) == len(ROWS)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rows", "nothing"], "--rows nothing: known are stock"),
        (["--rounds", "0"], "--rounds 0"),
        (["--minutes", "-1"], "--minutes -1.0"),
        (["--minutes", "nan"], "--minutes nan: give a number above 0"),
        (["--clip-grad", "nan"], "--clip-grad nan: give 0 or more"),
        (["--row-timeout", "inf"], "--row-timeout inf"),
        (["--warm-up", "-1"], "--warm-up -1"),
        (["--parameters", "10"], "--parameters 10"),
    ],
)
def test_wrong_values_are_said_in_a_line(flags, said, monkeypatch, capsys):
    def measure(*_):
        raise AssertionError("measured before the command line was checked")

    monkeypatch.setattr(gpu, "run_calibration", measure)
    assert gpu.main(["--device", "cpu", "--small", *flags]) == gpu.EXIT_USAGE
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_the_small_form_is_named():
    with pytest.raises(BenchmarkError, match=r"no CUDA device can be used \(.+\); --device cpu"):
        gpu.measure_start("cuda")


def test_memory_that_ran_out_is_called_that():
    assert explain(RuntimeError("CUDA out of memory. Tried\nmore")).startswith("out of memory: ")
    assert explain(ValueError("wrong\nmore")) == "ValueError: wrong"
    assert explain(KeyError()) == "KeyError: no message"


@pytest.mark.parametrize("text", ["abc", "inf", "nan", ""])
def test_parameters_that_are_no_number(text, capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--parameters", text])
    assert "give a number such as 4e9" in capsys.readouterr().err


def test_interrupted_runs_show_what_there_is(monkeypatch, capsys, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "run_calibration", lambda *_: "left out here")
    monkeypatch.setattr(gpu, "run_worker", interrupt)
    path = tmp_path / "figures.json"
    flags = ["--device", "cpu", "--small", "--json", str(path)]
    assert gpu.main(flags) == gpu.EXIT_INTERRUPTED
    assert path.is_file()
    assert "stock ZeRO-3 offload" in capsys.readouterr().out


def test_rows_without_time_or_memory_are_not_started(monkeypatch, capsys):
    started = []

    def worker(job, prefix, limit_s):
        started.append(prefix.name)
        return 30.0, found([1.0], [0.5])

    monkeypatch.setattr(gpu, "run_calibration", lambda *_: "left out here")
    monkeypatch.setattr(gpu, "run_worker", worker)
    flags = ["--device", "cpu", "--small", "--rows", "all-host"]
    # 25 s are left: nothing is known of the first row, the second is guessed to take its 30 s.
    assert gpu.main([*flags, "--minutes", "0.58"]) == 0
    assert started == ["stock-0"]
    assert "left out: no time" in capsys.readouterr().out
    monkeypatch.setattr(gpu, "free_host_bytes", lambda: 40_000_000)
    started.clear()
    # Stock's 18 bytes for each of 2.4 million parameters do not fit, our 14 do.
    assert gpu.main([*flags, "--rounds", "1"]) == 0
    assert started == ["all-host-0"]
    assert "failed: out of memory" in capsys.readouterr().out
