"""Ordering rules on the emulated device: equal with every wait, different without one."""

import threading

import pytest
import torch

from deep_optimizer_states.device.base import Wait
from deep_optimizer_states.device.emulated import EmulatedDevice, Faults
from deep_optimizer_states.errors import UpdateError
from deep_optimizer_states.executor import Executor, Subgroup
from deep_optimizer_states.kernels.host import HostAdam, Tail
from deep_optimizer_states.kernels.scalars import BetaPowers, adam_scalars
from deep_optimizer_states.plan import build_plan

ADAM = HostAdam(Tail(16, 1))
NUMELS = [700, 33, 1024, 5, 512, 900, 64, 333]
GROUP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEPS = 3


def make_subgroups(numels=NUMELS):
    generator = torch.Generator().manual_seed(5)

    def draw(numel, dtype=torch.float32):
        return torch.randn(numel, generator=generator).to(dtype)

    return [
        Subgroup(
            master=draw(n),
            exp_avg=draw(n),
            exp_avg_sq=draw(n).abs(),
            grad=torch.full((n,), torch.nan, dtype=torch.bfloat16),
            weights=torch.full((n,), torch.nan, dtype=torch.bfloat16),
        )
        for n in numels
    ]


def run(device_subgroups, faults=None, steps=STEPS):
    """Some steps with gradients that arrive on the gradient lane; every tensor at the end."""
    subgroups = make_subgroups()
    device = EmulatedDevice(ADAM, faults)
    dtypes = (torch.bfloat16, torch.bfloat16)
    try:
        executor = Executor(build_plan(len(NUMELS), device_subgroups), NUMELS, dtypes, device, ADAM)
        powers = BetaPowers(GROUP["betas"])
        generator = torch.Generator().manual_seed(9)
        for step in range(1, steps + 1):
            for subgroup in subgroups:
                value = torch.randn(subgroup.grad.numel(), generator=generator).bfloat16()
                home = subgroup.grad
                device.grads.submit("gradient", lambda h=home, v=value: h.copy_(v))
            group = {**GROUP, "bias_correction": True}
            scalars = adam_scalars(group, powers.at(step, GROUP["betas"]), 0.5, True)
            executor.run(subgroups, [scalars] * len(NUMELS))
        device.synchronize()
    finally:
        device.close()
    return torch.cat([t.float() for s in subgroups for t in vars(s).values()])


REFERENCE = run(())


@pytest.mark.parametrize("chosen", [range(8), (1, 3, 5, 7), (0,), (2, 3, 4), (7,)])
def test_any_split_gives_the_all_host_result(chosen):
    assert torch.equal(run(chosen), REFERENCE)


@pytest.mark.parametrize("seed", range(25))
def test_random_delays_change_nothing(seed):
    faults = Faults(jitter_s=0.001, seed=seed)
    assert torch.equal(run((0, 1, 3, 5, 6), faults), REFERENCE)


@pytest.mark.parametrize(
    "wait",
    [Wait.SLOT_FREE, Wait.PREFETCHED, Wait.STEPPED, Wait.STAGING_FREE, Wait.GRADS_FLUSHED],
)
def test_without_a_wait_the_result_differs(wait):
    """Negative control of every ordering rule inside the update phase."""
    chosen = (0, 1, 2, 3, 4, 5) if wait is not Wait.STAGING_FREE else ()
    results = [
        run(chosen, Faults(jitter_s=0.004, seed=seed, without=frozenset({wait})))
        for seed in range(3)
    ]
    assert any(not torch.equal(result, REFERENCE) for result in results)


def test_slots_are_bounded_and_reported():
    device = EmulatedDevice(ADAM)
    executor = Executor(
        build_plan(8, range(8)), NUMELS, (torch.bfloat16, torch.bfloat16), device, ADAM
    )
    assert executor.slot_bytes == 3 * 1024 * (4 + 4 + 4 + 2)
    device.close()


class FailingAdam(HostAdam):
    def step(self, *args, **kwargs):
        raise RuntimeError("out of luck")


def test_failure_on_a_lane_names_lane_and_work():
    device = EmulatedDevice(FailingAdam(Tail(16, 1)))
    executor = Executor(
        build_plan(8, range(8)), NUMELS, (torch.bfloat16, torch.bfloat16), device, ADAM
    )
    group = {**GROUP, "bias_correction": True}
    scalars = adam_scalars(group, BetaPowers(GROUP["betas"]).at(1, GROUP["betas"]), 1.0, True)
    with pytest.raises(UpdateError, match=r"lane GPU, step of subgroup 0.*out of luck"):
        executor.run(make_subgroups(), [scalars] * 8)
    device.close()


def test_waits_are_bounded():
    device = EmulatedDevice(ADAM, Faults(timeout_s=0.2))
    release = threading.Event()
    device.h2d.submit("a copy that hangs", lambda: release.wait(30))
    with pytest.raises(UpdateError, match=r"0.2 s for lane H2D \(a copy that hangs\)"):
        device.synchronize()
    release.set()
    device.close()


def test_close_ends_every_thread():
    before = set(threading.enumerate())
    device = EmulatedDevice(ADAM)
    assert len(set(threading.enumerate()) - before) == 5
    device.close()
    assert set(threading.enumerate()) - before == set()
