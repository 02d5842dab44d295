"""What the comparisons compare, on the stand-in for CUDA: the state of engines on any device."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cuda_memory import stand_in

RESULTS = ([1.0], [0.5])
"""Losses and gradient norms."""


@pytest.fixture
def states(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return importlib.import_module("engine_states")


class Master:
    def __init__(self, data):
        self.data = data


def engine_whose_state(place, first=0.0):
    """Two subgroups of two partitions each; ``place`` puts a tensor where the engine has it."""
    numbers = [torch.arange(6.0) + first, torch.arange(4.0)]
    masters = [Master(place(tensor)) for tensor in numbers]
    moments = [{"exp_avg": place(n + 1), "exp_avg_sq": place(n + 2)} for n in numbers]
    return SimpleNamespace(
        optimizer=SimpleNamespace(
            fp32_partitioned_groups_flat=masters,
            optimizer=SimpleNamespace(state=dict(zip(masters, moments, strict=True))),
            fp16_partitioned_groups_flat=[place(tensor + 3) for tensor in numbers],
            fp16_partitioned_groups=[[torch.empty(4), torch.empty(2)], [torch.empty(2)] * 2],
            groups_padding=[[0, 1], [0, 0]],
        )
    )


def on_gpu(tensor):
    return torch.empty(tensor.numel(), device="cuda").copy_(tensor)


def test_state_on_a_gpu_is_compared_with_stocks_on_the_host(states):
    with stand_in():
        ours = states.state_of(engine_whose_state(on_gpu))
        stock = states.state_of(engine_whose_state(lambda tensor: tensor))
        other = states.state_of(engine_whose_state(on_gpu, first=1.0))
        assert {tensor.device.type for tensor in ours.values()} == {"cpu"}
        assert states.differences((RESULTS, ours), (RESULTS, stock)) == []
        found = states.differences((RESULTS, other), (RESULTS, stock))
    assert len(found) == 8
    assert "master/0/0" in found
    assert not any("/1/" in name for name in found)


def test_state_is_a_copy_without_padding(states):
    engine = engine_whose_state(lambda tensor: tensor)
    state = states.state_of(engine)
    engine.optimizer.fp32_partitioned_groups_flat[0].data.zero_()
    assert state["master/0/0"].tolist() == [0, 1, 2, 3]
    assert state["master/0/1"].tolist() == [4]
