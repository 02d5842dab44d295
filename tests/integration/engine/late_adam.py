"""Updates that last until somebody waits for them, however long they take."""

import contextlib
import threading
import time
from unittest import mock

from signals import main_thread_callers

from deep_optimizer_states.core.kernels.host import HostAdam
from deep_optimizer_states.core.update import Background

WAITS = {"check_device_adam", "before_gather", "wait_for_end", "_shutdown"}
"""Functions in which the main thread waits for steps; in the last one Python ends."""


class LateAdam(HostAdam):
    """Steps tiles only while the main thread waits for an update, and none while it is held.

    An engine with it has no persistent parameters, for which ``step()`` itself would wait.
    """

    is_held = False

    def step(self, *args, **kwargs):
        if threading.current_thread() is not threading.main_thread():
            while LateAdam.is_held or WAITS.isdisjoint(main_thread_callers()):
                time.sleep(0.002)
        super().step(*args, **kwargs)


@contextlib.contextmanager
def updates_end_when_waited_for():
    """All tiles of an update are stepped at once, but it is in flight until it is waited for."""
    launch, wait_for_end = Background.launch, Background.wait_for_end

    def launch_and_last(self, update, run):
        self.is_asked_for = threading.Event()

        def run_and_last():
            run()
            self.is_asked_for.wait()

        launch(self, update, run_and_last)

    def ask(self):
        if self.is_running:
            self.is_asked_for.set()
        wait_for_end(self)

    with (
        mock.patch.object(Background, "launch", launch_and_last),
        mock.patch.object(Background, "wait_for_end", ask),
    ):
        yield
