import sys
import threading
from threading import Event

import pytest
from engine_updates import closed_update, start_thread

from deep_optimizer_states.core.device.base import Wait
from deep_optimizer_states.core.threads import Latch
from deep_optimizer_states.core.update import Update
from deep_optimizer_states.core.update_worker import UpdateWorker
from deep_optimizer_states.errors import UpdateError

WHY = Wait.WEIGHTS_READY


class Reached:
    def reached(self):
        return True

    def synchronize(self):
        return


@pytest.fixture
def background(device):
    background = UpdateWorker(device)
    yield background
    background.close()


def test_a_gate_opens_with_its_own_tile_not_with_the_whole_update(device, background):
    update, more = closed_update(2), threading.Event()

    def run():
        update.issued(0, Reached())
        assert more.wait(3600)
        update.issued(1, Reached())

    background.launch(update, run)
    update.wait([0], device, WHY)
    assert not more.is_set()
    more.set()
    update.wait([0, 1], device, WHY)
    background.wait()


@pytest.mark.parametrize(
    "failure",
    [UpdateError("lane GPU, step of tile 1: out of luck"), SystemExit("of tile 1's thread")],
)
def test_whatever_ends_an_update_opens_every_gate_and_surfaces(device, background, failure):
    update = closed_update(2)
    background.launch(update, lambda: None)
    update.wait([0, 1], device, WHY)
    background.wait()
    update = closed_update(3)

    def run():
        raise failure

    background.launch(update, run)
    with pytest.raises(UpdateError, match="tile 1") as failed:
        update.wait([2], device, WHY)
    assert failed.value.__cause__ is failure
    for _ in range(2):  # it stays
        with pytest.raises(UpdateError, match=r"tile 1.*load_checkpoint"):
            background.wait()
    background.forget_failure()
    background.wait()


def test_waiting_is_bounded(device, background, monkeypatch):
    monkeypatch.setattr("deep_optimizer_states.core.update.WAIT_TIMEOUT_S", 0.1)
    update, release = closed_update(1), threading.Event()
    background.launch(update, lambda: release.wait(3600))
    with pytest.raises(UpdateError, match=r"0\.1 s for the update to reach tile 0"):
        update.wait([0], device, WHY)
    for _ in range(2):  # it is in flight still
        with pytest.raises(UpdateError, match=r"0\.1 s for the update to end"):
            background.wait()
    release.set()
    monkeypatch.undo()
    background.wait()


def test_the_update_runs_on_a_thread_that_is_ready_for_the_device_and_ends(device, monkeypatch):
    """CUDA's current device belongs to a thread."""
    ready, ran, before = [], [], set(threading.enumerate())
    monkeypatch.setattr(device, "enter_thread", lambda: ready.append(threading.get_ident()))
    background = UpdateWorker(device)
    background.launch(closed_update(0), lambda: ran.append(threading.get_ident()))
    background.wait()
    background.close()
    assert ready == ran
    assert ran != [threading.get_ident()]
    assert set(threading.enumerate()) - before == set()


def test_everybody_who_waits_is_let_through_and_whoever_comes_later_too():
    latch, through = Latch(), []
    assert not latch.wait(0)
    joins = [start_thread(lambda: through.append(latch.wait(300))) for _ in range(5)]
    latch.set()
    for join in joins:
        join()
    assert through == [True] * 5
    assert latch.wait(0)


def wait_within_waits(make, num_lines):
    """Wait once more, as a signal handler may, at each line in turn of a first wait.

    Meanwhile another thread sets the event.
    """
    here = threading.current_thread()
    for number in range(num_lines):
        event, lines = make(), []

        def trace(frame, what, argument, event=event, lines=lines, number=number):
            if what == "line" and threading.current_thread() is here:
                lines.append(frame.f_lineno)
                if len(lines) == number + 1:
                    sys.settrace(None)
                    threading.Thread(target=event.set, daemon=True).start()
                    event.wait(300)
            return trace

        sys.settrace(trace)
        try:
            event.wait(300)
        finally:
            sys.settrace(None)


@pytest.mark.parametrize(("make", "seconds", "ends"), [(Latch, 300, True), (Event, 2, False)])
def test_a_signal_handler_may_wait_in_the_middle_of_a_wait(make, seconds, ends):
    """Which ``threading.Event`` does not bear: the negative control, and why there is a latch."""
    thread = threading.Thread(target=wait_within_waits, args=(make, 5), daemon=True)
    thread.start()
    thread.join(seconds)
    assert thread.is_alive() != ends


def test_an_update_that_has_ended_keeps_no_tile_s_memory(device, background):
    """Whoever keeps the update does not keep what its tiles had on the device."""
    update = Update(range(1), lambda tile: (), lambda after: None)
    update.give_rest({0: object()}, (Reached(), Reached()))
    background.launch(update, lambda: None)
    background.wait_for_end()
    assert background.update is update
    assert not update.work


def test_an_open_update_that_has_failed_still_says_what_it_was_handed(device, background):
    """Or whoever reads a weight before ``step()`` would be let through."""
    update = Update(range(1), lambda tile: (), lambda after: None)
    update.give({0: object()}, (Reached(), Reached()))

    def run():
        raise UpdateError("out of luck")

    background.launch(update, run)
    background.wait_for_end()
    assert 0 in update.work
