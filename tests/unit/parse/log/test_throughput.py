"""DeepSpeed's throughput lines and its flops profiler, sound and damaged."""

import pytest

from parse.log import read_log
from parse.records import ThroughputLine

HEAD = "[2026-11-22 12:40:16,782] [INFO] [timer.py:264:stop] "
LINE = (
    "epoch=0/micro_step=20/global_step=10, RunningAvgSamplesPerSec=1.9648661578794193, "
    "CurrSamplesPerSec=2.5, MemAllocated=0.37GB, MaxMemAllocated=0.48GB"
)
PROFILE = """
-------------------------- DeepSpeed Flops Profiler --------------------------
Profile Summary at step 1:
Notations:
number of floating-point operations (flops), floating-point operations per second (FLOPS),

world size:                                                             1
params per GPU:                                                         2.49 M
params of model = params per GPU * mp_size:                             1.5 B
fwd MACs per GPU:                                                       654.31 MMACs
fwd flops per GPU:                                                      1.31 G
{between}fwd latency:                                                            352.97 ms
bwd FLOPS per GPU = 2 * fwd flops per GPU / bwd latency:                3.01 GFLOPS
step latency:                                                           25.75 us
samples/second:                                                         1.63

----------------------------- Aggregated Profile per GPU -----------------------------
depth 0:
later latency:                                                          1 s
"""


@pytest.fixture
def read(write_log):
    return lambda text: read_log(write_log(text=text))


def test_a_throughput_line_is_read(read):
    log = read(f"{HEAD}{LINE}\n")
    assert log.throughput == [ThroughputLine(1, 10, 20, 1.9648661578794193, 2.5, 0.37, 0.48)]
    assert not log.rejects


def test_an_infinite_rate_is_no_rate(read):
    [line] = read(LINE.replace("1.9648661578794193", "-inf") + "\n").throughput
    assert (line.running_samples_per_s, line.current_samples_per_s) == (None, 2.5)


@pytest.mark.parametrize(
    "damage",
    [
        ("CurrSamplesPerSec=2.5", "CurrSamplesPerSec=2.x5"),
        ("0.37GB", "0.37"),
        ("0.48GB", "0.4"),
        ("0.48GB", "0.48GBnode"),
        ("micro_step=20", "micro_step="),
    ],
)
def test_a_damaged_line_counts_as_none_and_is_listed(read, damage):
    log = read(HEAD + LINE.replace(*damage) + "\n")
    assert log.throughput == []
    assert [reject.reason for reject in log.rejects] == ["a throughput line that cannot be read"]


@pytest.mark.parametrize("between", ["", "node-2: something of another rank: 3.5 \n"])
def test_the_profilers_summary_is_read_up_to_its_next_heading(read, between):
    found = {p.quantity: (p.value, p.unit) for p in read(PROFILE.format(between=between)).profile}
    found.pop("node-2", None)
    assert found == {
        "world size": (1.0, ""),
        "params per GPU": (2.49e6, ""),
        "params of model": (1.5e9, ""),
        "fwd MACs per GPU": (pytest.approx(654.31e6), "MAC"),
        "fwd flops per GPU": (1.31e9, ""),
        "fwd latency": (pytest.approx(0.35297), "s"),
        "bwd FLOPS per GPU": (pytest.approx(3.01e9), "FLOP/s"),
        "step latency": (pytest.approx(25.75e-6), "s"),
        "samples/second": (1.63, ""),
    }


def test_the_step_that_was_profiled_is_kept(read):
    assert {line.step for line in read(PROFILE.format(between="")).profile} == {1}


def test_lines_of_no_profile_are_no_figures_of_one(read):
    text = PROFILE.replace("DeepSpeed Flops Profiler", "Something else").format(between="")
    assert read(text).profile == []
    assert read("DeepSpeed Flops Profiler Enabled: False\nfwd latency:   1.0 s\n").profile == []
