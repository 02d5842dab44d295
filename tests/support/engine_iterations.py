"""Whole iterations on any device: gradients flushed by the engine's own code, then an update.

The caller's own work (backward) is queued where the device queues it: it makes gradients in memory
that it overwrites right after, and reads the weights until the update may write them.
"""

from types import SimpleNamespace

import torch
from engine_updates import (
    GROUP,
    make_cache,
    make_executor,
    make_scalars,
    make_subgroups,
    make_update,
    make_work,
    run_update,
    send_ahead,
)

from deep_optimizer_states.adapter.zero3.gradients import GradientFlush
from deep_optimizer_states.adapter.zero3.stock import Layout
from deep_optimizer_states.core.device.base import Wait
from deep_optimizer_states.core.kernels.adam import AdamTensors, BetaPowers
from deep_optimizer_states.core.plan import Tile, subgroup_offsets
from deep_optimizer_states.core.update_worker import UpdateWorker

MICRO_STEPS = 2


class Flusher(GradientFlush):
    """Flushes of some parameters' gradients to ``homes``, without a model around them."""

    def __init__(self, device, homes, schedule, cache):
        self.stock = SimpleNamespace(
            reduce_bucket_size=1 << 17,
            gradient_accumulation_dtype=torch.bfloat16,
            master_weights_and_grads_dtype=torch.float32,
            micro_step_id=0,
            is_gradient_accumulation_boundary=lambda: False,
        )
        numels = [home.numel() for home in homes]
        slices = {number: Tile(number, 0, numel) for number, numel in enumerate(numels)}
        layout = Layout(numels, subgroup_offsets(numels), slices, frozenset(slices), [])
        self.barrier = SimpleNamespace(wait_for=lambda number, why: None)
        self.homes = homes
        super().__init__(self.stock, layout, schedule, device, self.barrier, False, cache)

    def beside_state(self, subgroup):
        return self.homes[subgroup]


def place(device, schedule, subgroups):
    """Every tensor where the engine keeps it."""

    def on_device(source):
        return device.empty_device(source.numel(), source.dtype).copy_(source)

    placed = []
    for index, tensors in enumerate(subgroups):
        home = on_device if index in schedule.resident_subgroups else device.host_home
        state = [home(tensor.clone()) for tensor in tensors.state]
        weights = tensors.master.bfloat16()
        weights = device.host_home(weights) if schedule.weights_on_host else on_device(weights)
        placed.append(AdamTensors(*state, home(tensors.grad.clone()), weights))
    return placed


def run_iterations(device, schedule, steps=2, stays=0, ahead=0, move=None):
    """What forward and backward read, and every tensor at the end, in one.

    Each update runs on a thread of its own while the next forward and backward begin. The first
    ``stays`` tiles stay on the device, with their gradients. State of the first ``ahead`` tiles is
    sent there while the last micro-step runs; then ``move`` is called with the cache.
    """
    placed, background = place(device, schedule, make_subgroups()), UpdateWorker(device)
    cache = make_cache(schedule, device, placed)
    candidates = sorted(cache._candidates)
    executor = make_executor(schedule, device, cache=cache)
    powers, generator = BetaPowers(GROUP["betas"]), torch.Generator().manual_seed(9)
    noise = [torch.randn(tensors.numel, generator=generator) for tensors in placed]
    noise = [device.empty_device(n.numel(), n.dtype).copy_(n) for n in noise]
    flusher, read = Flusher(device, [tensors.grad for tensors in placed], schedule, cache), []

    def gather(weights):
        """What a gather brings to the device, in the caller's own stream."""
        target = device.empty_device(weights.numel(), weights.dtype)
        return target.copy_(weights, non_blocking=True)

    for step in range(1, steps + 1):
        for number, tensors in enumerate(placed):
            flusher.barrier.wait_for(number, Wait.WEIGHTS_READY)
            read.append(gather(tensors.weights))
        for micro_step in range(MICRO_STEPS):
            flusher.stock.micro_step_id = micro_step
            if ahead and micro_step + 1 == MICRO_STEPS:
                background.wait()
                send_ahead(cache, candidates[:ahead])
            for number, source in enumerate(noise):
                bucket = source * float(step + micro_step)
                flusher.flush(number, bucket)
                bucket.fill_(torch.nan)  # the next reduction overwrites it
        read += [gather(tensors.weights) for tensors in placed]
        background.wait()
        if move:
            move(cache)
        cache.grow(candidates[:stays])
        work = make_work(schedule, placed, make_scalars(step, powers), cache)
        _launch(background, flusher, (executor, device, schedule, work))
    background.wait()
    background.close()
    cache.release()
    found = [tensor for tensors in placed for tensor in vars(tensors).values()]
    return torch.cat([tensor.cpu().float() for tensor in (*found, *read)])


def _launch(background, flusher, run):
    executor, device, schedule, work = run
    update = make_update(executor, range(len(work)))
    update.give_rest(dict(enumerate(work)), executor.caller_events())
    background.launch(update, lambda: run_update(executor, schedule, update))

    def wait_for(number, why):
        tiles = [idx for idx, tile in enumerate(schedule.tiles) if tile.subgroup == number]
        update.wait(tiles, device, why)

    flusher.barrier.wait_for = wait_for
