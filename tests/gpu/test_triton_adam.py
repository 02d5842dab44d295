"""The device kernel against the host kernel: the same bits."""

import pytest
import torch

from deep_optimizer_states.core.kernels.adam import AdamTensors, BetaPowers, adam_scalars
from deep_optimizer_states.core.kernels.host import HostAdam, Tail

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 15, 16, 1023, 1_000_003])
def test_device_kernel_has_the_bits_of_the_host_kernel(numel, grad_dtype, decoupled, mode):
    from deep_optimizer_states.core.kernels.triton_adam import TritonAdam

    tail, generator = Tail(16, mode), torch.Generator().manual_seed(numel)
    host = [torch.randn(numel, generator=generator), torch.zeros(numel), torch.zeros(numel)]
    device = [tensor.cuda() for tensor in host]
    weights = torch.empty(numel, dtype=torch.bfloat16)
    device_weights = weights.cuda()
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    group["bias_correction"] = True
    powers = BetaPowers(group["betas"])
    for step in range(1, 30):
        grad = torch.randn(numel, generator=generator).to(grad_dtype)
        scalars = adam_scalars(group, powers.at(step, group["betas"]), 0.37, decoupled)
        tail_start = tail.start(numel)
        HostAdam(mode).step(AdamTensors(*host, grad, weights), scalars, tail_start, num_threads=4)
        on_device = AdamTensors(*device, grad.cuda(), device_weights)
        TritonAdam(mode).step(on_device, scalars, tail_start)
    for ours, theirs in zip([*device, device_weights], [*host, weights], strict=True):
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_subnormal_numbers_are_kept(eps):
    from deep_optimizer_states.core.kernels.triton_adam import TritonAdam

    numel = 64
    host = [torch.zeros(numel), torch.full((numel,), 1e-39), torch.full((numel,), 1e-40)]
    device = [tensor.cuda() for tensor in host]
    weights = torch.empty(numel, dtype=torch.bfloat16)
    device_weights = weights.cuda()
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": eps, "weight_decay": 0.0}
    group["bias_correction"] = True
    scalars = adam_scalars(group, BetaPowers(group["betas"]).at(1, group["betas"]), 1.0, True)
    grad = torch.zeros(numel, dtype=torch.bfloat16)
    HostAdam(0).step(AdamTensors(*host, grad, weights), scalars, numel, num_threads=1)
    TritonAdam(0).step(AdamTensors(*device, grad.cuda(), device_weights), scalars, numel)
    assert host[0].any()
    for ours, theirs in zip([*device, device_weights], [*host, weights], strict=True):
        assert torch.equal(ours.cpu(), theirs)
