"""What is read of an engine's state: every element once, padding never."""

from types import SimpleNamespace

import pytest
import torch

from deep_optimizer_states import state_reader
from deep_optimizer_states.state_reader import read_state


@pytest.fixture
def ranks_are_groups(monkeypatch):
    monkeypatch.setattr(state_reader.dist, "get_rank", lambda group: group)


def parameter(numel, partition_numel, rank):
    held = torch.arange(partition_numel) + 100.0 * numel
    held[max(0, numel - partition_numel * rank) :] = torch.nan
    return SimpleNamespace(
        ds_numel=numel,
        ds_tensor=held,
        ds_process_group=rank,
        partition_numel=lambda: partition_numel,
    )


def make_engine(rank, backup=None):
    """Two parameters, of 5 and 2 elements, on one of two ranks; the padding is NaN."""
    params = [parameter(5, 3, rank), parameter(2, 1, rank)]
    master = torch.cat([param.ds_tensor for param in params])
    state = {master: {"exp_avg": master + 1, "exp_avg_sq": master + 2, "step": 1}}
    empty = SimpleNamespace(state={})
    holder = SimpleNamespace(state=state)
    optimizer = SimpleNamespace(
        fp16_groups=[params],
        fp32_partitioned_groups_flat=[master],
        optimizer=empty if backup else holder,
        backup_optimizer=holder if backup else None,
    )
    return SimpleNamespace(optimizer=optimizer, zero_optimization_stage=lambda: 3)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("backup", [False, True], ids=["own", "stock's second optimizer"])
def test_state_is_read_by_parameter_and_without_padding(ranks_are_groups, rank, backup):
    engine = make_engine(rank, backup)
    (found,) = read_state(engine)
    whole = [torch.tensor([500.0, 501.0, 502.0][: 3 - rank]), torch.tensor([200.0])]
    for kind, expected in (
        ("weights", whole),
        ("masters", whole),
        ("moments", [piece + more for more in (1, 2) for piece in whole]),
    ):
        pieces = getattr(found, kind)
        assert [piece.tolist() for piece in pieces] == [piece.tolist() for piece in expected], kind
    for holder in filter(None, (engine.optimizer.optimizer, engine.optimizer.backup_optimizer)):
        holder.state.clear()  # as before stock's first step
    (found,) = read_state(engine)
    assert (len(found.masters), found.moments) == (2, [])


@pytest.mark.parametrize("wrapped", [False, True], ids=["fp32", "half precision"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_the_optimizers_own_tensors_are_the_state(stage, wrapped):
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.AdamW(model.parameters())
    optimizer = SimpleNamespace(optimizer=inner) if wrapped else inner
    engine = SimpleNamespace(
        module=model, optimizer=optimizer, zero_optimization_stage=lambda: stage
    )
    (before,) = read_state(engine)
    assert (len(before.weights), len(before.masters), before.moments) == (2, 2, [])
    model(torch.ones(2)).sum().backward()
    inner.step()
    (after,) = read_state(engine)
    expected = [inner.state[p][key] for key in state_reader.MOMENTS for p in model.parameters()]
    assert [a is b for a, b in zip(after.moments, expected, strict=True)] == [True] * 4
