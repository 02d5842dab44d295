"""Where 16-bit weights live, and what a rank has of them, as read off DeepSpeed's optimizer."""

from types import SimpleNamespace

import pytest
import torch

from deep_optimizer_states.adapter.zero3 import stock
from deep_optimizer_states.adapter.zero3.gradients import GradientFlush
from deep_optimizer_states.adapter.zero3.stock import Layout


def layout_of(flats, host_memory, groups=(), rank=0):
    optimizer = SimpleNamespace(
        fp16_groups=groups,
        _get_param_partition_rank=lambda _param: rank,
        fp16_partitioned_groups_flat=flats,
        fp16_partitioned_groups_flat_numel=[flat.numel() for flat in flats],
        param_groups_fp16_flat_cpu_memory=host_memory,
        persistent_parameters=[],
    )
    return Layout.of(optimizer)


@pytest.mark.parametrize(
    ("has_gpu", "device", "offloads", "on_host"),
    [
        (True, "meta", False, False),  # which stands for the accelerator's
        (True, "cpu", True, True),
        (True, "cpu", False, True),  # zero.Init(remote_device="cpu") alone
        # Without a GPU the setting says it.
        (False, "cpu", True, True),
        (False, "cpu", False, False),
    ],
)
def test_beside_a_gpu_the_tensors_say_where_weights_live(
    monkeypatch, has_gpu, device, offloads, on_host
):
    gpu = SimpleNamespace(on_accelerator=lambda tensor: tensor.device.type == "meta")
    if has_gpu:
        monkeypatch.setattr(stock, "get_accelerator", lambda: gpu)
    flats = [torch.empty(4, device=device), torch.empty(2, device=device)]
    assert layout_of(flats, flats if offloads else []).weights_on_host is on_host


@pytest.mark.parametrize(("rank", "owned"), [(0, {0, 1, 2, 3}), (2, {1, 2, 3}), (3, {2, 3})])
def test_a_rank_owns_the_slices_in_which_something_is_not_padding(rank, owned):
    """Of four ranks."""
    params = [
        SimpleNamespace(ds_id=idx, ds_numel=numel, partition_numel=lambda n=numel: -(-n // 4))
        for idx, numel in enumerate((1, 3, 17, 16))
    ]
    found = layout_of([torch.empty(11)], [], [params], rank)
    assert found.owned == owned
    assert [(tile.start, tile.numel) for tile in found.slices.values()] == [
        *((0, 1), (1, 1), (2, 5), (7, 4))
    ]


def test_a_rank_of_padding_alone_looks_at_the_gradients_themselves():
    """It has no norm that says whether they are finite."""
    gradients = object.__new__(GradientFlush)
    gradients._stock = SimpleNamespace(norm_for_param_grads={})
    gradients._layout = SimpleNamespace(owned=frozenset(), numels=[3])
    gradients._partial, gradients._flushes = set(), SimpleNamespace(drain=lambda: None)
    gradients._cache = SimpleNamespace(copy_grads_home=lambda: None)
    gradients._schedule = SimpleNamespace(resident_subgroups={0})
    gradients._on_device = {0: torch.zeros(3)}
    assert gradients.are_finite()
    gradients._on_device[0][1] = torch.inf
    assert not gradients.are_finite()
