"""Queues that are as late as the waits allow, in one thread: races that are lost every time.

A negative control leaves a wait out and must see another result. With threads and random delays it
does so nearly always, and on a busy machine now and then the race is won. Here nothing is left to
chance. Lanes and streams are queues without threads: each does its work as soon as it is queued,
but for those that are named late, which do theirs only when the host waits and nothing else can go
on. The thread of updates is late as well: an update runs once somebody waits for it. So whatever is
not waited for has not happened yet. A wait for what cannot happen ends at once, as one that took
too long.
"""

import collections
import contextlib
from types import SimpleNamespace
from unittest import mock

from deep_optimizer_states.core import update_worker as core_update
from deep_optimizer_states.core.device import cuda, emulated
from deep_optimizer_states.core.device.emulated import WAIT
from deep_optimizer_states.core.threads import Latch


class World:
    """All queues, and who of them is late: names of lanes, or queues that are added to ``late``."""

    def __init__(self, late=()):
        self.late = set(late)
        self.now_s = 0.0
        self._queues, self._updates = [], collections.deque()
        self._is_working = False

    def add(self, queue):
        """Work a queue off from now on: ``name``, ``can_go()`` and ``go()``."""
        self._queues.append(queue)

    def add_update(self, work):
        """Do this once the host waits; returns a call that waits for it."""
        done = []
        self._updates.append(lambda: done.append(work()))

        def join():
            assert self.until(lambda: done), "the update waits for what nothing can bring about"
            return done[0]

        return join

    def hasten(self):
        """Something was queued: do all that can be done without those who are late."""
        while not self._is_working and self._go_on(is_late=False):
            pass

    def until(self, is_done):
        """The host waits; returns whether in vain, since nothing can go on."""
        while not is_done():
            if not self.step():
                return False
        return True

    def finish(self):
        """Do all that is left."""
        self.until(lambda: False)

    def sleep(self, _seconds):
        """The host looks again later: time passes, and fast, only if nothing can go on."""
        if not self.step():
            self.now_s += 1.0

    def step(self):
        """Do one thing, of those who are late only when nobody else can go on; False for none."""
        if self._go_on(is_late=False):
            return True
        if self._updates:
            self._updates.popleft()()
            return True
        return self._go_on(is_late=True)

    def _go_on(self, is_late):
        for queue in self._queues:
            if (queue in self.late or queue.name in self.late) == is_late and queue.can_go():
                was_working, self._is_working = self._is_working, True
                try:
                    queue.go()
                finally:
                    self._is_working = was_working
                return True
        return False


def _lane_of(world):
    class LateLane(emulated._ThreadLane):
        """A lane of the emulated device whose thread has nothing to do."""

        def __init__(self, *args):
            super().__init__(*args)
            self._items, self._queue = collections.deque(), SimpleNamespace(put=self._put)
            world.add(self)

        def _run(self):
            return

        is_alive = staticmethod(lambda: True)

        def _put(self, item):
            if item is None:
                world.until(lambda: not self._items)
                return
            self._items.append(item)
            world.hasten()

        def can_go(self):
            if not self._items:
                return False
            what, work = self._items[0]
            return not what.startswith(WAIT) or work.__self__.reached()

        def go(self):
            what, work = self._items.popleft()
            if not what:
                work()
            elif self._failure is None:
                self._attempt(what, work)

    return LateLane


def _pool_of(world):
    class LatePool:
        """The one thread of updates, which is the host's own."""

        def __init__(self, *_args, **_kwargs):
            return

        def submit(self, work, *args):
            join = world.add_update(lambda: work(*args))
            return SimpleNamespace(result=lambda _timeout_s: join(), done=lambda: False)

        def shutdown(self, wait=True):
            return

    return LatePool


@contextlib.contextmanager
def late(*names):
    """Let engines and devices made here run without threads, some lanes late; yields the world."""
    world = World(names)

    def wait(latch, timeout_s):
        return world.until(lambda: latch.is_set)

    clock = SimpleNamespace(monotonic=lambda: world.now_s, sleep=world.sleep)
    clock.perf_counter = cuda.time.perf_counter
    with (
        mock.patch.object(emulated, "_ThreadLane", _lane_of(world)),
        mock.patch.object(core_update, "ThreadPoolExecutor", _pool_of(world)),
        mock.patch.object(Latch, "wait", wait),
        mock.patch.object(cuda, "time", clock),  # whoever waits for an event of CUDA's sleeps
    ):
        yield world
