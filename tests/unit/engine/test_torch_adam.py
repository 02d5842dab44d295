"""The slow host Adam has the compiled one's bits."""

import ctypes
import logging
import math

import pytest
import torch

from deep_optimizer_states.kernels import host
from deep_optimizer_states.kernels.host import HostAdam
from deep_optimizer_states.kernels.scalars import BetaPowers, adam_scalars
from deep_optimizer_states.kernels.tensors import AdamTensors
from deep_optimizer_states.kernels.torch_adam import (
    TorchAdam,
    fused_multiply_add,
    make_host_adam,
)


def libm_fma(a, b, c):
    fmaf = ctypes.CDLL("libm.so.6").fmaf
    fmaf.restype, fmaf.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    triples = zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    return torch.tensor([fmaf(*triple) for triple in triples], dtype=torch.float32)


def any_floats(generator, numel):
    bits = torch.randint(-(2**31), 2**31, (numel,), generator=generator)
    return bits.to(torch.int32).view(torch.float32)


def test_the_multiply_add_is_the_c_librarys_on_any_bits():
    generator = torch.Generator().manual_seed(0)
    a, b, c = (any_floats(generator, 20_000) for _ in range(3))
    found, expected = fused_multiply_add(a, b, c), libm_fma(a, b, c)
    assert torch.equal(found.isnan(), expected.isnan())
    kept = ~expected.isnan()
    assert torch.equal(found.view(torch.int32)[kept], expected.view(torch.int32)[kept])


@pytest.mark.parametrize("tiny", [1e-20, -1e-20])
@pytest.mark.parametrize("factor", [4097.0, -4097.0, 4099.0])
def test_a_sum_beside_a_tie_is_rounded_once(tiny, factor):
    """fp64 alone would round to the tie first, and then to even."""
    a, c = torch.tensor([4097.0]), torch.tensor([tiny])
    b = torch.tensor([factor])
    assert torch.equal(fused_multiply_add(a, b, c), libm_fma(a, b, c))


def test_fp64_alone_would_not_do():
    """Negative control of the case above."""
    a, c = torch.tensor([4097.0]), torch.tensor([1e-20])
    twice = (a.double() * a.double() + c.double()).float()
    assert not torch.equal(twice, libm_fma(a, a, c))


@pytest.mark.parametrize("tail_mode", [0, 1, 2])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_repeats_the_compiled_kernel_over_many_steps(tail_mode, decoupled, weight_decay, dtype):
    numel, tail_start, betas = 1003, 992, (0.9, 0.95)
    generator = torch.Generator().manual_seed(3)
    master = torch.randn(numel, generator=generator)
    sides = [
        AdamTensors(
            master.clone(),
            torch.zeros(numel),
            torch.zeros(numel),
            torch.empty(numel, dtype=dtype),
            torch.empty(numel, dtype=dtype),
        )
        for _ in range(2)
    ]
    powers = BetaPowers(betas)
    group = {"betas": betas, "eps": 1e-8, "weight_decay": weight_decay, "bias_correction": True}
    for step in range(1, 12):
        grad = torch.randn(numel, generator=generator) * math.exp(step - 6)
        scalars = adam_scalars({**group, "lr": 1e-3}, powers.at(step, betas), 0.37, decoupled)
        for adam, tensors in zip((TorchAdam(tail_mode), HostAdam(tail_mode)), sides, strict=True):
            tensors.grad.copy_(grad)
            adam.step(tensors, scalars, tail_start, num_threads=1)
    for name, tensor in vars(sides[0]).items():
        assert torch.equal(tensor, getattr(sides[1], name)), name


def test_chunks_change_nothing(monkeypatch):
    numel = 5000
    results = []
    for chunk in (10_000, 64):
        monkeypatch.setattr("deep_optimizer_states.kernels.torch_adam.CHUNK_NUMEL", chunk)
        generator = torch.Generator().manual_seed(5)
        state = [torch.randn(numel, generator=generator) for _ in range(2)]
        tensors = AdamTensors(state[0], *torch.zeros(2, numel), state[1], torch.empty(numel))
        group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        group["bias_correction"] = True
        scalars = adam_scalars(group, BetaPowers((0.9, 0.95)).at(1, (0.9, 0.95)), 1.0, True)
        TorchAdam(1).step(tensors, scalars, 4992, num_threads=1)
        results.append(tensors.master)
    assert torch.equal(*results)


def test_without_a_compiler_the_slow_one_is_taken_and_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    host._load.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert isinstance(make_host_adam(1), TorchAdam)
        assert "no-such-compiler" in caplog.text
        assert "slower" in caplog.text
    finally:
        host._load.cache_clear()
    monkeypatch.undo()
    assert isinstance(make_host_adam(1), HostAdam)
