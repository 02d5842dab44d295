"""Signals that come when the main thread is where a test wants it, however busy the machine is."""

import contextlib
import signal
import sys
import threading


@contextlib.contextmanager
def when_within(function, action):
    """Do ``action`` on another thread as soon as the main thread is within ``function``.

    Args:
        function: Its name. It must not return before ``action`` lets it.
        action: What to do, once; never, if the block ends without the function.
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
    return names_of(sys._current_frames()[threading.main_thread().ident])


def names_of(frame):
    """Names of the functions of a frame and of all that called it."""
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return names


def interrupt(number=signal.SIGINT):
    """Send the main thread of this process a signal."""
    signal.pthread_kill(threading.main_thread().ident, number)
