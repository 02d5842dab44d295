"""The device kernel against the host kernel: the same bits."""

import pytest
import torch

from deep_optimizer_states.core.kernels.adam import AdamTensors, BetaPowers, adam_scalars
from deep_optimizer_states.core.kernels.host import HostAdam, Tail

pytestmark = pytest.mark.gpu


def are_equal(host, grads, mode, decoupled, grad_scale, **hyperparameters):
    """Step copies of a state on both sides, and compare every bit of it and of the weights."""
    from deep_optimizer_states.core.kernels.triton_adam import TritonAdam

    numel, device = len(host[0]), [tensor.cuda() for tensor in host]
    weights = torch.empty(numel, dtype=torch.bfloat16)
    device_weights, tail_start = weights.cuda(), Tail(16, mode).start(numel)
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "bias_correction": True, **hyperparameters}
    powers = BetaPowers(group["betas"])
    for step, grad in enumerate(grads, start=1):
        scalars = adam_scalars(group, powers.at(step, group["betas"]), grad_scale, decoupled)
        HostAdam(mode).step(AdamTensors(*host, grad, weights), scalars, tail_start, num_threads=4)
        on_device = AdamTensors(*device, grad.cuda(), device_weights)
        TritonAdam(mode).step(on_device, scalars, tail_start)
    pairs = zip([*device, device_weights], [*host, weights], strict=True)
    return all(torch.equal(ours.cpu(), theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 15, 16, 1023, 1_000_003])
def test_device_kernel_has_the_bits_of_the_host_kernel(numel, grad_dtype, decoupled, mode):
    generator = torch.Generator().manual_seed(numel)
    host = [torch.randn(numel, generator=generator), torch.zeros(numel), torch.zeros(numel)]
    grads = (torch.randn(numel, generator=generator).to(grad_dtype) for _ in range(29))
    assert are_equal(host, grads, mode, decoupled, 0.37, eps=1e-8, weight_decay=0.1)


@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_subnormal_numbers_are_kept(eps):
    host = [torch.zeros(64), torch.full((64,), 1e-39), torch.full((64,), 1e-40)]
    grads = [torch.zeros(64, dtype=torch.bfloat16)]
    assert are_equal(host, grads, 0, True, 1.0, eps=eps, weight_decay=0.0)
    assert host[0].any()
