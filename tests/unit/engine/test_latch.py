import sys
import threading
from threading import Event

import pytest

from deep_optimizer_states.core.device.base import Latch


def test_everybody_who_waits_is_let_through_and_whoever_comes_later_too():
    latch, through = Latch(), []
    threads = [threading.Thread(target=lambda: through.append(latch.wait(300))) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert not latch.wait(0.01)
    assert through == []
    latch.set()
    for thread in threads:
        thread.join()
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
