"""The loop's rules: what follows an iteration, rates, phases, fingerprints, eager imports."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from configs.schema import Model
from configs.study import default_study
from launch.train_loop import deepspeed_adapter, loop
from launch.train_loop.loop import PeakMemory, learning_rate
from launch.train_loop.runtime import eager_imports

Point = default_study().point_type

MODEL = Model(name="m", hidden=64, ffn=96, layers=2, heads=4, kv_heads=2)
CPU = torch.device("cpu")
# `learning rate` of the ten iterations of the authors' runs (lr 3e-4, min 3e-5, warm-up 1).
PAPER_RATES = [
    *("3.000E-04", "2.919E-04", "2.684E-04", "2.325E-04", "1.884E-04"),
    *("1.416E-04", "9.750E-05", "6.158E-05", "3.814E-05", "3.000E-05"),
]


def test_rates_are_those_of_the_authors_logs():
    point = Point(model=MODEL, iterations=10)
    rates = [f"{learning_rate(point, i):.3E}" for i in range(1, 11)]
    assert rates == PAPER_RATES
    assert learning_rate(point, 11) == 3e-5


def test_warm_up_is_linear_up_to_the_peak():
    point = Point(model=MODEL, iterations=10, lr_warmup_iterations=4)
    assert [learning_rate(point, i) for i in (1, 2, 4)] == pytest.approx([7.5e-5, 1.5e-4, 3e-4])
    assert learning_rate(point, 5) < 3e-4


@pytest.mark.parametrize("warmup", [0, 1, 3, 5])
def test_every_iteration_has_a_rate_between_the_bounds(warmup):
    point = Point(model=MODEL, iterations=3, lr_warmup_iterations=warmup)
    assert all(0 < learning_rate(point, i) <= point.lr for i in range(1, 6))


@pytest.mark.parametrize(
    ("fields", "evaluated", "saved"),
    [({"save_interval": 3, "eval_interval": 3}, [3, 6, 7], [3, 6, 7]), ({}, [], [])],
)
def test_evaluations_and_checkpoints_are_due_at_every_interval_and_at_the_end(
    monkeypatch, fields, evaluated, saved
):
    seen = {"evaluation": [], "checkpoint": [], "iteration": []}
    monkeypatch.setattr(loop.dist, "barrier", lambda: None)
    monkeypatch.setattr(
        loop, "save_whole", lambda run, number, save, when_whole: when_whole("folder")
    )
    timed = []
    adapter = SimpleNamespace(
        begin_timing=lambda: timed.append(len(seen["iteration"])),
        train=lambda number: number,
        evaluate=lambda: 1.0,
        save=None,
        end_save=lambda: seen["checkpoint"].append("end"),
    )
    recorder = SimpleNamespace(
        iteration=seen["iteration"].append,
        evaluation=lambda number, loss, seconds: seen["evaluation"].append(number),
        checkpoint=lambda number, path: seen["checkpoint"].append(number),
        checkpoint_stall=lambda number, seconds: seen["checkpoint"].append(-number),
    )
    run = SimpleNamespace(point=Point(model=MODEL, iterations=7, **fields), checkpoint=None)
    loop.iterate(run, adapter, recorder)
    checkpoints = [number for each in saved for number in (each, -each)] + ["end"]
    assert seen == {"evaluation": evaluated, "checkpoint": checkpoints, "iteration": [*range(1, 8)]}
    assert timed == [0, *saved]


def test_a_peak_is_noted_before_somebody_else_resets_it(monkeypatch):
    peaks, resets = iter((5, 3, 2)), []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: next(peaks))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: resets.append(1))
    peak = PeakMemory(torch.device("cuda"))
    peak.note()
    assert (peak.take(), peak.take()) == (5, 2)
    assert len(resets) == 2
    assert PeakMemory(CPU).take() is None


def test_reserved_memory_is_no_less_than_what_is_resident(monkeypatch):
    status = Path("/proc/self/status").read_text(encoding="ascii")
    [resident] = [int(line.split()[1]) for line in status.splitlines() if "VmHWM:" in line]
    assert deepspeed_adapter.reserved_peak_gib() >= resident / 2**20
    with monkeypatch.context() as on_a_gpu:
        on_a_gpu.setattr(torch.cuda, "is_available", lambda: True)
        assert deepspeed_adapter.reserved_peak_gib() is None
    # Some containers' kernels have no such line, and the figure is read when training is over.
    monkeypatch.setattr(Path, "read_text", lambda *_args, **_options: "Name:\tpython\n")
    assert deepspeed_adapter.reserved_peak_gib() is None


WEIGHTS, MASTER, MOMENTS = torch.ones(4), torch.zeros(4), [torch.ones(4), torch.zeros(4)]


@pytest.fixture
def digests(monkeypatch):
    """Takes the fingerprints of subgroups' moments, as one rank of one."""

    def gather(everyone, mine):
        everyone[:] = [mine]

    monkeypatch.setattr(loop.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(loop.dist, "all_gather_object", gather)

    def take(*moments, weights=WEIGHTS):
        state = [
            SimpleNamespace(weights=[weights], masters=[MASTER], moments=found) for found in moments
        ]
        monkeypatch.setattr(loop, "read_state", lambda engine: state)
        return loop.state_digests(None)

    return take


def test_equal_state_has_equal_fingerprints_and_any_other_bit_has_another(digests):
    whole = digests(MOMENTS, MOMENTS)
    assert whole == digests(MOMENTS, MOMENTS)
    assert whole[1] != digests(MOMENTS, MOMENTS[::-1])[1]
    assert whole[0] != digests(MOMENTS, MOMENTS, weights=WEIGHTS + 1)[0]


def test_moments_that_another_process_holds_leave_no_fingerprint_to_compare(digests):
    weights, state = digests(MOMENTS, [])
    assert weights == digests(MOMENTS, MOMENTS)[0]
    assert state is None


def test_state_that_one_of_the_ranks_cannot_read_has_no_fingerprint(monkeypatch):
    def gather(everyone, mine):
        everyone[:] = [mine, ("b", None)]

    monkeypatch.setattr(loop.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(loop.dist, "all_gather_object", gather)
    weights, state = loop.joined_over_ranks(("a", "c"))
    assert weights is not None
    assert weights != loop.joined_over_ranks(("d", "c"))[0]
    assert state is None


def test_more_parameters_than_hashing_is_worth_have_none(digests, monkeypatch):
    monkeypatch.setattr(loop, "MAX_NUMEL_PER_CORE", 1)
    monkeypatch.setattr(loop, "usable_cores", lambda: 4)
    assert digests(MOMENTS) == (None, None)
    monkeypatch.setattr(loop, "usable_cores", lambda: 5)
    assert None not in digests(MOMENTS)


def test_imports_are_eager_only_inside_the_context():
    compiler = torch.compile
    with eager_imports():

        @torch.compile(mode="max-autotune")
        def decorated() -> int:
            return 1

        assert torch.compile(decorated) is decorated
    assert torch.compile is compiler
    assert decorated() == 1
