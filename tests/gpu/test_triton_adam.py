"""The device kernel against the host kernel: the same bits."""

import pytest
import torch

from deep_optimizer_states.kernels.host import HostAdam, Tail
from deep_optimizer_states.kernels.scalars import BetaPowers, adam_scalars

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 15, 16, 1023, 1_000_003])
def test_device_kernel_has_the_bits_of_the_host_kernel(numel, grad_dtype, decoupled, mode):
    from deep_optimizer_states.kernels.triton_adam import TritonAdam

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
        HostAdam(tail).step(host[0], (host[1], host[2]), grad, weights, scalars, num_threads=4)
        TritonAdam(tail).step(
            device[0], (device[1], device[2]), grad.cuda(), device_weights, scalars
        )
    for ours, theirs in zip([*device, device_weights], [*host, weights], strict=True):
        assert torch.equal(ours.cpu(), theirs)
