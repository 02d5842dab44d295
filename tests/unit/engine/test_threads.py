"""Threads that die, wherever they are: who waits for them hears of it."""

import threading
from unittest import mock

import pytest
from engine_updates import closed_update

from deep_optimizer_states.core.device import emulated
from deep_optimizer_states.core.device.base import Wait
from deep_optimizer_states.core.device.emulated import EmulatedDevice, Faults, _ThreadEvent
from deep_optimizer_states.core.threads import Latch, run_guarded
from deep_optimizer_states.core.update import Update
from deep_optimizer_states.core.update_worker import UpdateWorker
from deep_optimizer_states.errors import UpdateError

ENDS = [MemoryError("no memory"), SystemExit("the thread ends")]


def once(function, error):
    """``function``, but that its first call raises."""
    errors = [error]

    def call(*args, **kwargs):
        if errors:
            raise errors.pop()
        return function(*args, **kwargs)

    return call


@pytest.fixture
def lane():
    lane = emulated._ThreadLane("GPU", Faults(timeout_s=3600))
    yield lane
    lane.close()


def test_what_ends_the_work_is_told_and_told_again_where_that_failed():
    told = []
    run_guarded(lambda: None, told.append)
    error, failed = SystemExit("over"), MemoryError()
    with pytest.raises(RuntimeError, match="MemoryError"):
        run_guarded(mock.Mock(side_effect=error), once(told.append, failed))
    with pytest.raises(RuntimeError, match="MemoryError"):
        run_guarded(lambda: None, once(told.append, failed))
    assert told == [None, error, failed]


def test_nobody_waits_for_what_cannot_come():
    latch = Latch(lambda: False)
    assert not latch.wait(3600)
    latch.set()
    assert latch.wait(3600)


@pytest.mark.parametrize("error", ENDS)
def test_a_lane_reaches_its_event_though_its_bookkeeping_fails(lane, error):
    reach, errors = _ThreadEvent.reach, [error]

    def fail_once(event, failure):
        if errors:
            raise errors.pop()
        reach(event, failure)

    done = []
    with mock.patch.object(_ThreadEvent, "reach", fail_once):
        event = lane.record()
        lane.submit("a step", lambda: done.append("in spite of it"))
        with pytest.raises(UpdateError, match="lane GPU, its bookkeeping"):
            event.synchronize()
        with pytest.raises(UpdateError, match="lane GPU"):
            lane.record().synchronize()
    assert done == []
    lane.forget_failure()
    lane.record().synchronize()


@pytest.mark.parametrize("error", ENDS)
def test_a_lane_whose_thread_has_ended_is_named_and_begins_anew_with_a_load(error, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with mock.patch.object(emulated, "run_guarded", mock.Mock(side_effect=error)):
        lane = emulated._ThreadLane("GPU", Faults(timeout_s=3600))
    done = []
    lane.submit("a step", lambda: done.append("stale"))
    with pytest.raises(UpdateError, match=r"the thread of lane GPU \(a step\) has ended"):
        lane.record().synchronize()
    lane.forget_failure()
    lane.submit("a step", lambda: done.append("fresh"))
    lane.record().synchronize()
    assert done == ["fresh"]
    lane.close()


def test_a_lane_that_was_closed_ends_whatever_fails_at_its_end(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    go_on, errors = emulated._ThreadLane._go_on_after, [MemoryError()]

    def fail_once(*args):
        if errors:
            raise errors.pop()
        go_on(*args)

    with mock.patch.object(emulated._ThreadLane, "_go_on_after", fail_once):
        lane = emulated._ThreadLane("GPU", Faults(timeout_s=3600))
        lane.close()
    assert not lane.is_alive()


@pytest.mark.parametrize("number", range(5))
def test_a_device_that_cannot_be_made_leaves_no_thread(number):
    before, made = set(threading.enumerate()), []

    def make(*args):
        made.append(args)
        if len(made) > number:
            raise MemoryError
        return lane_class(*args)

    lane_class = emulated._ThreadLane
    with mock.patch.object(emulated, "_ThreadLane", make), pytest.raises(MemoryError):
        EmulatedDevice(None)
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("error", ENDS)
@pytest.mark.parametrize(("place", "times"), [("_end", 1), ("_end", 2), ("_begin", 1)])
def test_an_update_ends_though_its_bookkeeping_fails(device, error, place, times):
    """Where its thread could not end it the second time either, who waits does so."""
    background, update = UpdateWorker(device), closed_update(1)
    method, errors = getattr(Update, place), [error] * times

    def fail_once(*args):
        if errors:
            raise errors.pop()
        method(*args)

    with mock.patch.object(Update, place, fail_once):
        background.launch(update, lambda: None)
        with pytest.raises(UpdateError, match=r"no memory|the thread ends"):
            background.wait()
    with pytest.raises(UpdateError):
        update.wait([0], device, Wait.WEIGHTS_READY)
    background.close()


def test_a_failure_is_untold_until_it_is_raised(device):
    background = UpdateWorker(device)
    for error in ENDS:
        background.launch(closed_update(1), mock.Mock(side_effect=error))
        background.wait_for_end()
        assert background.untold_failure is error
        with pytest.raises(UpdateError):
            background.check()
        assert background.untold_failure is None
        background.forget_failure()
    background.close()


@pytest.mark.parametrize("place", [Update, "the pool"])
def test_an_update_that_no_thread_takes_has_ended(device, place):
    background, update = UpdateWorker(device), closed_update(1)
    where = (Update, "start") if place is Update else (background._pool, "submit")
    with (
        mock.patch.object(*where, side_effect=RuntimeError("no thread")),
        pytest.raises(RuntimeError, match="no thread"),
    ):
        background.launch(update, lambda: None)
    with pytest.raises(UpdateError, match="no thread"):
        background.wait()
    background.forget_failure()
    background.launch(closed_update(0), lambda: None)
    background.wait()
    background.close()


def test_an_update_that_has_ended_without_its_thread_is_not_run_by_it_later(device):
    """A pool may have queued work when it raises, as where no thread can be started."""
    background, ran, gate = UpdateWorker(device), [], threading.Event()
    background._pool.submit(gate.wait, 3600)
    submit = background._pool.submit

    def queue_and_raise(*args):
        submit(*args)
        raise RuntimeError("no thread")

    with (
        mock.patch.object(background._pool, "submit", queue_and_raise),
        pytest.raises(RuntimeError, match="no thread"),
    ):
        background.launch(closed_update(1), lambda: ran.append(1))
    gate.set()
    background.prepare(lambda: None)  # behind what is queued
    assert ran == []
    background.close()
