from pathlib import Path

import pytest

from parse.log import read_log
from parse.two_runs import compare

ARTIFACT = Path(__file__).resolve().parents[4] / ".." / "shared" / "data" / "logs" / "artifact"
FAST, SLOW = (9.9, 0.1, 0.2, 0.3, 0.4), (9.9, 0.2, 0.4, 0.6, 0.8)


def compared(write_log, vanilla, ours, **options):
    logs = read_log(write_log("a/a.log", **vanilla)), read_log(write_log("b/b.log", **ours))
    return compare(*logs, names=("theirs", "ours"), **options)


def test_ratios_are_of_means_after_the_warm_up(write_log):
    result = compared(write_log, {"seconds": SLOW}, {"seconds": FAST})
    assert result.phases["iteration"].ratio == pytest.approx(2.0)
    assert result.speedup == pytest.approx(2.0)
    assert result.phases["iteration"].reference.n == 4
    assert result.phases["update"].ratio == 1.0
    all_of_them = compared(write_log, {"seconds": SLOW}, {"seconds": FAST}, warmup=0)
    assert all_of_them.phases["iteration"].ratio == pytest.approx(11.9 / 10.9)


def test_a_missing_phase_has_no_ratio(write_log, recipe):
    text = "".join(f"{recipe().iteration_line(i)}\n" for i in range(5))
    result = compared(write_log, {"text": text}, {})
    assert result.phases["update"].ratio is None
    assert result.phases["iteration"].ratio is not None


@pytest.mark.parametrize(
    ("ours", "why"),
    [
        ({"losses": (9.0, 8.5, 8.25, 8.125, 8.2)}, "the pair differs from iteration 5"),
        ({"losses": (9.0, 8.0, 8.0, 8.0, 8.0)}, "the loss of ours is frozen at 8.0"),
        ({"losses": (9.0, 8.5, None, None, None)}, "the loss of ours is nan from iteration 3"),
        ({"losses": (9.0, 8.5)}, "1 timed iterations after a warm-up of 1, at least 2"),
    ],
)
def test_a_speed_up_is_withheld_with_its_reason(write_log, ours, why):
    result = compared(write_log, {}, ours)
    assert result.speedup is None
    assert why in result.withheld


def test_a_close_pair_has_a_speed_up(write_log):
    result = compared(write_log, {}, {"losses": (9.0, 8.5, 8.25, 8.125, 8.0005)})
    assert (result.pair.word, result.withheld) == ("close", None)
    assert result.speedup == 1.0


def test_two_logs_of_which_one_is_of_a_cpu_have_no_speed_up(write_log):
    logs = [read_log(write_log(f"{name}/a.log", seconds=SLOW)) for name in "ab"]
    assert compare(*logs).speedup == 1.0
    logs[1].device = "cpu"
    result = compare(*logs)
    assert (result.speedup, result.withheld) == (None, "measured on a CPU")
    assert result.phases["iteration"].ratio == 1.0
    assert compare(*logs, warmup=4).withheld.endswith("are needed; measured on a CPU")


@pytest.mark.skipif(not ARTIFACT.is_dir(), reason="the authors' logs are not here")
def test_the_authors_sample_pair():
    vanilla, ours = (read_log(path) for path in sorted(ARTIFACT.glob("*.log")))
    result = compare(vanilla, ours)
    ratios = [f"{result.phases[name].ratio:.3f}" for name in ("iteration", "backward", "update")]
    assert ratios == ["1.392", "3.054", "0.945"]
    assert result.reference.word == "undecided"
    assert result.ours.text == "frozen at ln(50304) from iteration 2"
    assert (result.pair.word, result.pair.from_iteration) == ("differs", 2)
    assert result.speedup is None
