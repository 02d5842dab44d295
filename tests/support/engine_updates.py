"""Updates of a few small subgroups on any device, without DeepSpeed's engine around them."""

import functools
import threading
from dataclasses import replace
from unittest import mock

import torch

from deep_optimizer_states.core import cache as core_cache
from deep_optimizer_states.core.cache import TileCache, Types
from deep_optimizer_states.core.device.base import Reached
from deep_optimizer_states.core.device.emulated import EmulatedDevice
from deep_optimizer_states.core.executor import Executor
from deep_optimizer_states.core.kernels.adam import AdamTensors, BetaPowers, adam_scalars
from deep_optimizer_states.core.kernels.host import HostAdam, Tail
from deep_optimizer_states.core.schedule import Schedule
from deep_optimizer_states.core.update import TileArgs, Update

TAIL = Tail(16, 1)
ADAM = HostAdam(TAIL.mode)
NUMELS = [700, 33, 1024, 5, 512, 900, 64, 333]
GROUP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def make_subgroups(numels=NUMELS):
    generator = torch.Generator().manual_seed(5)

    def draw(numel, dtype=torch.float32):
        return torch.randn(numel, generator=generator).to(dtype)

    return [
        AdamTensors(
            master=draw(n),
            exp_avg=draw(n),
            exp_avg_sq=draw(n).abs(),
            grad=torch.full((n,), torch.nan, dtype=torch.bfloat16),
            weights=torch.full((n,), torch.nan, dtype=torch.bfloat16),
        )
        for n in numels
    ]


def make_schedule(policy="all-host", stride=2, ratio=1.0, tile_numel=4096, numels=NUMELS):
    return Schedule.make(numels, policy, stride, ratio, tile_numel)


TYPES = Types(torch.bfloat16, torch.bfloat16)
ROOMY = 10**9


def make_cache(schedule, device, subgroups=(), limit=ROOMY):
    """A cache of a schedule's tiles, whose homes are in ``subgroups``."""

    def home_of(number):
        tile = schedule.tiles[number]
        return subgroups[tile.subgroup].narrow(tile.start, tile.numel)

    return TileCache(schedule, TYPES, device, limit, home_of)


def make_executor(schedule, device, host_adam=ADAM, cache=None):
    cache = cache or make_cache(schedule, device)
    return Executor(cache, host_adam, 2)


def make_work(schedule, subgroups, scalars, cache=None):
    work = []
    for number, tile in enumerate(schedule.tiles):
        tensors = subgroups[tile.subgroup]
        tail_start = TAIL.start(tensors.numel) - tile.start
        work.append(
            TileArgs(
                f"tile {number}",
                tensors.narrow(tile.start, tile.numel),
                scalars,
                min(max(tail_start, 0), tile.numel),
                cache and cache.claim(number),
            )
        )
    return work


def send_ahead(cache, tiles):
    """Send the state of all of some tiles ahead, but for those that have a place."""
    with mock.patch.object(core_cache, "MOST_UNDER_WAY", 1000):
        cache._num_looked_at = 0
        cache.send_ahead(tiles, lambda tile: False)


def make_scalars(step, powers):
    group = {**GROUP, "bias_correction": True}
    return adam_scalars(group, powers.at(step, GROUP["betas"]), 0.5, True)


def first_scalars():
    return make_scalars(1, BetaPowers(GROUP["betas"]))


def closed_update(num_tiles):
    """An update without tiles' work, which waits for no more of it."""
    update = Update(range(num_tiles), lambda tile: (), lambda after: None)
    update.give_rest({}, (Reached(), Reached()))
    return update


def make_update(executor, order):
    return Update(order, executor._cache.chain_of, executor.follow)


def run_update(executor, schedule, update):
    """Run an update, whose tiles may still come, on this thread."""
    executor.run(update, schedule.actions(update, executor.start_split, executor.has_room))


def run_once(executor, schedule, work, on_issued=lambda tile, event: None):
    """Run an update that has all its tiles."""
    update = make_update(executor, range(len(schedule.tiles)))
    update.issued = on_issued
    update.give_rest(dict(enumerate(work)), executor.caller_events())
    run_update(executor, schedule, update)


class Setup:
    """A schedule's executor on a device, and the work of its first update."""

    def __init__(self, schedule, device, subgroups=None, host_adam=ADAM):
        self.schedule, self.device = schedule, device
        self.subgroups = subgroups or make_subgroups()
        self.cache = make_cache(schedule, device, self.subgroups)
        self.executor = make_executor(schedule, device, host_adam, self.cache)
        self.work = make_work(schedule, self.subgroups, first_scalars())

    def update(self, *on_issued):
        """Run it; return its plan."""
        run_once(self.executor, self.schedule, self.work, *on_issued)
        return self.executor.last_plan

    def make_update(self, order):
        """An update without tiles yet."""
        return make_update(self.executor, order)

    def run(self, update):
        """Run it with tiles that come one by one."""
        run_update(self.executor, self.schedule, update)


def start_thread(work):
    """Run an update beside the caller; returns what waits for its end."""
    thread = threading.Thread(target=work)
    thread.start()
    return thread.join


def train(  # noqa: PLR0913 - each is a thing of its own
    schedule, faults=None, steps=3, parts=0, ahead=0, start=start_thread, stays=0, move=None
):
    """Some steps on the emulated device, with gradients that arrive on the gradient lane.

    Args:
        schedule: Who steps what.
        faults: Of the device.
        steps: How many.
        parts: In how many parts an update is given its tiles, the last first; 0 for all at once.
        ahead: How many tiles' state is sent ahead.
        start: How an update that gets parts is started.
        stays: How many tiles stay on the device, from the first step on.
        move: Called with the cache and the step's number before each update, and after gradients
            were submitted; state is brought home at the end.

    Returns:
        Every tensor at the end, in one, and the plan of each update.
    """
    subgroups, device, plans = make_subgroups(), EmulatedDevice(ADAM, faults), []
    try:
        cache, powers = make_cache(schedule, device, subgroups), BetaPowers(GROUP["betas"])
        executor = make_executor(schedule, device, cache=cache)
        generator = torch.Generator().manual_seed(9)
        candidates = sorted(cache._candidates)
        for step in range(1, steps + 1):
            scalars = make_scalars(step, powers)
            send_ahead(cache, candidates[:ahead])
            values = [torch.randn(s.numel, generator=generator).bfloat16() for s in subgroups]

            def flush(number, values=values):
                tile, place = schedule.tiles[number], cache.place(number)
                home = subgroups[tile.subgroup].grad.narrow(0, tile.start, tile.numel)
                home = place.grad if place is not None and place.keeps_grad else home
                value = values[tile.subgroup].narrow(0, tile.start, tile.numel)
                device.grads.submit("gradient", lambda: home.copy_(value))

            if not parts:
                for number in range(len(schedule.tiles)):
                    flush(number)
            if move:
                move(cache, step)
            cache.grow(candidates[:stays])
            work = make_work(schedule, subgroups, scalars, None if parts else cache)
            if parts:
                _hand_over(executor, schedule, work, flush, parts, start)
            else:
                run_once(executor, schedule, work)
            device.synchronize()
            plans.append(executor.last_plan)
        cache.release()
    finally:
        device.close()
    return torch.cat([t.float() for s in subgroups for t in vars(s).values()]), plans


def _hand_over(executor, schedule, work, flush, parts, start):
    count, cache = len(work), executor._cache
    update = make_update(executor, range(count))
    join = start(functools.partial(run_update, executor, schedule, update))
    order = [n for part in range(parts) for n in range(count)[::-1][part::parts]]
    for part in range(parts):
        mine = {}
        for number in order[part * count // parts : (part + 1) * count // parts]:
            flush(number)
            mine[number] = replace(work[number], place=cache.claim(number))
        give = update.give if part + 1 < parts else update.give_rest
        give(mine, executor.caller_events())
    join()


SCHEDULES = {
    "stride 1": make_schedule("stride", 1),
    "stride 3": make_schedule("stride", 3),
    "all-device": make_schedule("all-device"),
    "ratio": make_schedule("ratio", ratio=0.4),
    "stride and ratio": make_schedule("stride", 2, ratio=0.7),
    "dynamic": make_schedule("dynamic"),
    "all-host, tiles": make_schedule(tile_numel=48),
    "stride 2, tiles": make_schedule("stride", 2, tile_numel=64),
    "dynamic, tiles": make_schedule("dynamic", tile_numel=64),
    "dynamic and ratio, tiles": make_schedule("dynamic", ratio=0.5, tile_numel=128),
}
WEIGHTS_ON_HOST = {
    f"{name}, weights on the host": replace(SCHEDULES[name], weights_on_host=True)
    for name in ("stride 1", "all-host, tiles", "stride 2, tiles", "dynamic and ratio, tiles")
} | {
    "ratio, tiles, weights on the host": replace(
        make_schedule("ratio", ratio=0.4, tile_numel=64), weights_on_host=True
    )
}
"""As with ``offload_param``."""
SCHEDULES |= WEIGHTS_ON_HOST
