"""The device of a rank."""

import pytest
import torch

from launch.train_loop import runtime


class OnOneGpu:
    """A point that leaves the device open."""

    device = "auto"


class FirstRank:
    rank = local_rank = 0


@pytest.fixture
def one_gpu(monkeypatch):
    """Keep torch's settings as they were."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.backends.cuda.enable_cudnn_sdp(before[1])


def test_on_a_gpu_attention_too_gives_the_same_bits_in_every_run(one_gpu):
    """torch's attention adds in any order where deterministic algorithms are only warned about."""
    assert runtime.choose_device(OnOneGpu, FirstRank) == torch.device("cuda", 0)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
