"""Where 16-bit weights live, as read off DeepSpeed's optimizer."""

from types import SimpleNamespace

import pytest
import torch

from deep_optimizer_states.zero3 import stock
from deep_optimizer_states.zero3.stock import Layout


def layout_of(flats, host_memory):
    optimizer = SimpleNamespace(
        fp16_groups=[],
        fp16_partitioned_groups_flat=flats,
        fp16_partitioned_groups_flat_numel=[flat.numel() for flat in flats],
        param_groups_fp16_flat_cpu_memory=host_memory,
        persistent_parameters=[],
    )
    return Layout.of(optimizer)


@pytest.mark.parametrize(
    ("device", "offloads", "on_host"),
    [
        ("meta", False, False),  # which stands for the accelerator's
        ("cpu", True, True),
        ("cpu", False, True),  # zero.Init(remote_device="cpu") alone
    ],
)
def test_beside_a_gpu_the_tensors_say_where_weights_live(monkeypatch, device, offloads, on_host):
    gpu = SimpleNamespace(on_accelerator=lambda tensor: tensor.device.type == "meta")
    monkeypatch.setattr(stock, "get_accelerator", lambda: gpu)
    flats = [torch.empty(4, device=device), torch.empty(2, device=device)]
    assert layout_of(flats, flats if offloads else []).weights_on_host is on_host


@pytest.mark.parametrize("offloads", [False, True])
def test_without_a_gpu_the_setting_says_it(offloads):
    flats = [torch.empty(4)]
    assert layout_of(flats, flats if offloads else []).weights_on_host is offloads
