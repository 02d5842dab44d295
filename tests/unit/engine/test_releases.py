"""What a release before 0.19 gets beside its own methods; equality under it is another test's."""

import pytest
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from deep_optimizer_states.zero3 import releases
from deep_optimizer_states.zero3.optimizer import InterleavedZeroOptimizer
from deep_optimizer_states.zero3.releases import StockZeroOptimizer, ZeroOptimizerBefore019


@pytest.fixture
def optimizer(monkeypatch):
    """One of 0.18.9, as far as it was made before the engine and stock's methods touch it."""
    monkeypatch.setattr(DeepSpeedZeroOptimizer_Stage3, "__init__", lambda self: None)
    monkeypatch.setattr(DeepSpeedZeroOptimizer_Stage3, "_pre_step", lambda self: None)
    return ZeroOptimizerBefore019()


def test_whether_a_window_ends_is_asked_as_of_newer_releases(optimizer):
    assert optimizer.is_gradient_accumulation_boundary() is True
    optimizer.is_gradient_accumulation_boundary = False  # as the engine does before 0.19
    assert optimizer.is_gradient_accumulation_boundary() is False


def test_every_step_begins_a_new_window(optimizer):
    optimizer._offload_boundary_param_ids.add(7)
    optimizer._pre_step()
    assert optimizer._offload_boundary_param_ids == set()


def test_all_parameters_are_spread_over_the_same_ranks(optimizer, monkeypatch):
    optimizer.dp_process_group = "group"
    monkeypatch.setattr(releases.dist, "get_rank", lambda group: {"group": 3}[group])
    assert optimizer._get_param_partition_group("parameter") == "group"
    assert optimizer._get_param_partition_rank("parameter") == 3
    assert optimizer._autoep_expert_parallel_group(["parameter"]) is None


def test_a_release_that_has_the_methods_is_left_as_it_is():
    wanted = DeepSpeedZeroOptimizer_Stage3
    if not releases.has_methods_of_0_19():
        wanted = ZeroOptimizerBefore019
    assert StockZeroOptimizer is wanted
    assert InterleavedZeroOptimizer.__base__ is wanted
