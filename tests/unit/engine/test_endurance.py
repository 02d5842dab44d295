"""Hundreds of updates take no more memory, objects or threads than a few."""

import gc
import sys
import threading

import pytest
from engine_updates import (
    SCHEDULES,
    first_scalars,
    make_executor,
    make_subgroups,
    make_work,
    run_once,
)

UPDATES = 500


def things_held(executor):
    """Objects that Python's collector knows, threads, and allocated blocks."""
    gc.collect()
    return len(gc.get_objects()), threading.active_count(), sys.getallocatedblocks()


FEW = {"stride 2, tiles", "dynamic and ratio, tiles, weights on the host"}
"""Every kind of action is in one of these; the others repeat them in other proportions."""


@pytest.mark.parametrize(
    "name",
    [n if n in FEW else pytest.param(n, marks=pytest.mark.exhaustive) for n in SCHEDULES],
)
def test_five_hundred_updates_keep_nothing_that_fifty_do_not(device, name):
    schedule = SCHEDULES[name]
    executor = make_executor(schedule, device)
    work = make_work(schedule, make_subgroups(), first_scalars())
    for _ in range(UPDATES // 10):
        run_once(executor, schedule, work)
    objects, threads, blocks = things_held(executor)
    for _ in range(UPDATES):
        run_once(executor, schedule, work)
    now = things_held(executor)
    # One event kept for each device tile would be thousands of objects.
    assert now[0] - objects < UPDATES / 2
    assert now[1] == threads
    assert now[2] - blocks < UPDATES
