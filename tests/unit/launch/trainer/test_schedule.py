from types import SimpleNamespace

import pytest

from configs.schema import Model, Point
from launch.trainer.schedule import (
    CosineSchedule,
    evaluates_after,
    learning_rate,
    saves_after,
)

MODEL = Model(name="m", hidden=64, ffn=96, layers=2, heads=4, kv_heads=2)
# `learning rate` of the ten iterations of the authors' runs (lr 3e-4, min 3e-5, warm-up 1).
PAPER_RATES = [
    "3.000E-04",
    "2.919E-04",
    "2.684E-04",
    "2.325E-04",
    "1.884E-04",
    "1.416E-04",
    "9.750E-05",
    "6.158E-05",
    "3.814E-05",
    "3.000E-05",
]


def test_rates_are_those_of_the_authors_logs() -> None:
    point = Point(model=MODEL, iterations=10)
    rates = [f"{learning_rate(point, i):.3E}" for i in range(1, 11)]
    assert rates == PAPER_RATES


def test_warm_up_is_linear_up_to_the_peak() -> None:
    point = Point(model=MODEL, iterations=10, lr_warmup_iterations=4)
    assert [learning_rate(point, i) for i in (1, 2, 4)] == pytest.approx([7.5e-5, 1.5e-4, 3e-4])
    assert learning_rate(point, 5) < 3e-4


@pytest.mark.parametrize("warmup", [0, 1, 3, 5])
def test_every_iteration_has_a_rate_between_the_bounds(warmup: int) -> None:
    point = Point(model=MODEL, iterations=3, lr_warmup_iterations=warmup)
    assert all(0 < learning_rate(point, i) <= point.lr for i in range(1, 6))


def test_a_rate_after_the_last_iteration_is_the_smallest() -> None:
    assert learning_rate(Point(model=MODEL, iterations=10), 11) == 3e-5


def test_the_optimizer_has_the_rate_of_the_coming_update() -> None:
    point = Point(model=MODEL, iterations=10)
    optimizer = SimpleNamespace(param_groups=[{"lr": 9.0}, {"lr": 9.0}])
    schedule = CosineSchedule(optimizer, point)
    assert schedule.get_last_lr() == [3e-4, 3e-4]
    schedule.step()
    assert schedule.get_last_lr() == [learning_rate(point, 2)] * 2 == [schedule.current] * 2


def test_a_schedule_goes_on_where_another_stopped() -> None:
    point = Point(model=MODEL, iterations=10)
    first, second = (SimpleNamespace(param_groups=[{"lr": 0.0}]) for _ in range(2))
    stopped = CosineSchedule(first, point)
    stopped.step()
    CosineSchedule(second, point).load_state_dict(stopped.state_dict())
    assert second.param_groups == first.param_groups


def test_checkpoints_are_due_at_every_interval_and_at_the_end() -> None:
    point = Point(model=MODEL, iterations=7, save_interval=3, eval_interval=3)
    assert [i for i in range(1, 8) if saves_after(point, i)] == [3, 6, 7]
    assert [i for i in range(1, 8) if evaluates_after(point, i)] == [3, 6]
    never = Point(model=MODEL, iterations=7)
    assert not any(saves_after(never, i) or evaluates_after(never, i) for i in range(1, 8))
