"""The host benchmark's sums, ratios and command line; nothing is timed here."""

import pytest
import torch

from benchmarks import host, host_worker
from benchmarks.host_worker import compare, summary
from benchmarks.timing import Times
from configs.errors import ConfigError

PASSES = {
    "fused pass": (0.5, 1.0),
    "probe": (0.4, 0.8),
    "widen gradients": (0.1, 0.2),
    "unscale": (0.1, 0.2),
    "CPUAdam": (0.4, 0.8),
    "cast to kept memory": (0.2, 0.4),
    "cast to fresh memory": (1.0, 2.0),
}


def result(equal=True):
    found = compare({name: Times(seconds) for name, seconds in PASSES.items()}, 10**9)
    engines = {"stock": Times((2.0, 2.0)), "all-host": Times((1.0, 4.0))}
    engines["stride 2"] = Times((4.0, 4.0))
    return {
        "threads": 1,
        "passes": {"numel": 10**9, "instruction_set": "AVX2", "equal": equal, **found},
        "engines": summary(engines, dict.fromkeys(engines, equal), 10**9),
    }


def test_stock_is_the_sum_of_the_passes_it_makes():
    found = result()["passes"]
    assert found["stock_with_gpu_over_fused"]["median"] == pytest.approx(3.0)
    assert found["stock_on_cpu_over_fused"]["median"] == pytest.approx(1.6)


def test_shares_of_what_memory_allows():
    found = result()["passes"]
    assert found["share_of_probe"]["median"] == pytest.approx(0.8)
    # 8 bytes in 0.1 s are 80 a second; the fused pass moves 28 in 0.5 s.
    assert found["share_of_stream"]["median"] == pytest.approx(56 / 80)


def test_goals_are_judged():
    rows = {row[0]: row for row in host.ratios(result())}
    assert rows["stock with a GPU / fused"][2:] == [">= 2.5", "met"]
    assert rows["fused, share of the probe"][2:] == [">= 0.9", "missed"]
    assert rows["stock on the CPU / fused"][2:] == ["", ""]


def test_a_policy_that_uses_the_device_is_said_to_have_an_emulated_one():
    rows = {row[0]: row for row in host.ratios(result())}
    assert rows["step(), stock / all-host"][3] == "met"
    assert rows["step(), stock / stride 2, emulated"][1:] == ["0.50 (0.50 to 0.50)", "", ""]
    note = host.as_text(result()).splitlines()[-1]
    assert note.startswith("emulated: there is no GPU here")
    assert "below 1" in note
    assert host.BYTES_ON_THE_CPU == 28 + 4
    # Slots hold master weight, two moments and a 16-bit gradient; the state alone goes back.
    assert host.BYTES_ON_THE_DEVICE == 2 * 14 + 28 + 2 * 12 + 14


def test_no_ratio_where_the_bits_differ():
    rows = host.ratios(result(equal=False))
    assert {row[1] for row in rows} == {"withheld: the bits differ"}
    assert "3.00" not in host.as_text(result(equal=False)).partition("goal")[2]
    assert not host.all_equal([result(), result(equal=False)])
    engines_alone = result()
    engines_alone["engines"]["equal"]["stride 2"] = False
    assert not host.all_equal([engines_alone])
    assert host.all_equal([result()])


def test_engines_are_equal_that_have_all_of_stocks_state(monkeypatch):
    monkeypatch.setattr(host_worker, "trained_state", lambda state: list(map(torch.tensor, state)))
    made = {"stock": [1.0, 2.0], "same": [1.0, 2.0], "other": [1.0, 3.0], "less": [1.0]}
    assert host_worker._equal(made) == {"same": True, "other": False, "less": False}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--repeats", "0"], "--repeats: '0': give a whole number, 1 or more"),
        (["--threads", "0"], "--threads: '0': give a whole number, 1 or more"),
        (["--threads", "100000"], "--threads 100000"),
        (["--threads", "1", "--numel", str(10**15)], "GiB of memory"),
    ],
)
def test_wrong_values_are_said_in_a_line(flags, said):
    with pytest.raises(ConfigError) as refused:
        host.main(flags)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
