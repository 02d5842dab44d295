"""Signals that come when the main thread is where a test wants it, however busy the machine is."""

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path


@contextlib.contextmanager
def when_within(function, action):
    """Do ``action``, once, on another thread as soon as the main thread is within ``function``.

    The function, given by its name, must not return before ``action`` lets it.
    """
    is_over = threading.Event()
    thread = once_within(function, action, is_over)
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def once_within(function, action, is_over=None):
    """Do the same without a block, until ``is_over`` is set; returns the thread."""
    is_over = is_over or threading.Event()

    def watch():
        while not is_over.wait(0.002):
            if function in main_thread_callers():
                return action()
        return None

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def main_thread_callers():
    """Names of the functions that the main thread is in, the innermost first."""
    # Between the program and its end the main thread runs nothing of Python.
    return names_of(sys._current_frames().get(threading.main_thread().ident))


def names_of(frame):
    """Names of the functions of a frame and of all that called it."""
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


def interrupt(number=signal.SIGINT, after=None):
    """Send the main thread of this process a signal when it is asleep.

    Python would handle one that comes just before a thread falls asleep when it wakes up, which is
    never if the signal was to wake it. Returns how often the main thread has gone to sleep; with
    ``after``, what the call before returned, it must have woken and slept again.
    """
    seen = found = None
    while found is None or found != seen or found == after:
        seen = found
        time.sleep(0.002)  # this thread does not hold Python's lock, so nobody sleeps for that
        found = _sleeps_of_main_thread()
    signal.pthread_kill(threading.main_thread().ident, number)
    return found


def _sleeps_of_main_thread():
    """Return how often it has gone to sleep, or None if it is awake."""
    text = Path(f"/proc/self/task/{os.getpid()}/status").read_text()
    fields = dict(line.split(":\t", 1) for line in text.splitlines())
    is_asleep = fields["State"].startswith("S")
    return int(fields["voluntary_ctxt_switches"]) if is_asleep else None
