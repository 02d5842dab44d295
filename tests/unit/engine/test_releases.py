"""What a release before 0.19 gets beside its own methods; equality under it is another test's."""

import pytest
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from deep_optimizer_states.adapter import zero12
from deep_optimizer_states.adapter.zero3 import stock as releases
from deep_optimizer_states.adapter.zero3.stock import ZeroOptimizerBefore019
from deep_optimizer_states.adapter.zero12 import InterleavedFlatOptimizer


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


def test_sizes_that_a_release_has_as_floats_are_cut_as_whole_numbers(monkeypatch):
    """Those of stages 1 and 2 up to 0.19.6."""

    class EnoughError(Exception):
        pass

    def settle(_settings, numels):
        raise EnoughError(numels)

    ours = object.__new__(InterleavedFlatOptimizer)
    ours.partition_size, ours._subgroup_numel, ours._settings = [5000.0, 1.0], 4096, None
    monkeypatch.setattr(InterleavedFlatOptimizer, "_refuse_other_types", lambda _optimizer: None)
    monkeypatch.setattr(zero12, "settle_schedule", settle)
    with pytest.raises(EnoughError) as cut:
        ours.initialize_optimizer_states()
    assert [repr(numel) for numel in cut.value.args[0]] == ["4096", "904", "1"]
