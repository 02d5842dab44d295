"""Fail one call of what is tested, whichever it is, and see what becomes of it; not a test itself.

A *place* is the entry of a function of ours, or a call that a function of ours makes to one written
in C (``os.close``, a tensor's ``clone``), on one kind of thread. A *point* is the k-th time that a
run passes a place, with the error that is raised there instead of the call; or, for Ctrl-C, once
the call is done as well, since that is when Python looks for signals. A parent that has imported
everything forks a child for each point.

What is raised is seen by Python's profiler, and so are the calls. Calls that C code makes of C code
are not, nor what is between two calls: there nothing can be made to fail.
"""

import atexit
import collections
import contextlib
import faulthandler
import functools
import hashlib
import itertools
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NamedTuple

MARK = "injected by a test"
ERRORS = {
    "MemoryError": MemoryError,
    "OSError": functools.partial(OSError, 5),
    "RuntimeError": RuntimeError,
    "KeyboardInterrupt": KeyboardInterrupt,
    "SystemExit": SystemExit,
}
"""Python ends a thread without a word in which the last one is raised."""
ENTRY = "its entry"
BEFORE, AFTER = "before ", "after "


class Place(NamedTuple):
    """A kind of thread; file and function; the entry, or what is called, before or after it."""

    thread: str
    function: str
    what: str


class Point(NamedTuple):
    place: Place
    number: int
    """How often the place is passed before, from 0."""
    error: str

    def __str__(self):
        thread, function, what = self.place
        return f"{self.error} at {function}, {what}, time {self.number + 1}, thread {thread}"


class Watch:
    """Counts the times that each place is passed, in all threads, and fails one of them.

    Args:
        root: The folder of the code whose places they are.
        kind_of: Names the kind of a thread by the thread's name.
        point: What is made to fail; None for nothing.
        leaves_out: Files below ``root`` that have no places.
    """

    def __init__(self, root, kind_of, point=None, leaves_out=()):
        self.counts = collections.Counter()
        self.is_fired = False
        self._root, self._kind_of, self._leaves_out = (
            f"{Path(root).resolve()}/",
            kind_of,
            leaves_out,
        )
        self._point, self._passed = point, itertools.count()
        self._names = {}

    def __enter__(self):
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        threading.setprofile(None)

    def _see(self, frame, event, called):
        if event == "return":
            return
        code = frame.f_code
        name = self._names.get(code)
        if name is None:
            name = self._names[code] = self._name_of(code)
        if not name:
            return
        if event == "call":
            self._pass(name, ENTRY)
        elif event == "c_call" and not is_release(called):
            self._pass(name, BEFORE + called.__name__)
        elif event == "c_return" and threading.current_thread() is threading.main_thread():
            self._pass(name, AFTER + called.__name__)

    def _name_of(self, code):
        if not code.co_filename.startswith(self._root):
            return ""
        file = code.co_filename.removeprefix(self._root)
        return "" if file in self._leaves_out else f"{file}:{code.co_qualname}"

    def _pass(self, function, what):
        if what.endswith(("setprofile", "getprofile")):
            return
        point = self._point
        if point is None:
            thread = self._kind_of(threading.current_thread().name)
            self.counts[Place(thread, function, what)] += 1
            return
        place = point.place
        if self.is_fired or function != place.function or what != place.what:
            return
        if self._kind_of(threading.current_thread().name) != place.thread:
            return
        if next(self._passed) == point.number:
            self.is_fired = True
            raise ERRORS[point.error](MARK)


def is_release(called):
    """Whether a lock is given back, which cannot fail."""
    is_lock = type(getattr(called, "__self__", None)).__module__ == "_thread"
    return is_lock and called.__name__ in ("__exit__", "release")


def points_of(counts, errors=tuple(ERRORS)):
    """Return the first, a middle and the last time of each place, with each error that fits it."""
    found = []
    for place, count in sorted(counts.items()):
        place = Place(*place)
        numbers = {0, count // 2, count - 1}
        if place.function.endswith("<genexpr>"):
            numbers = {0}  # later it may be closed half read, and Python drops errors of that
        for number in sorted(numbers):
            for error in errors:
                is_main = place.thread == "main"
                if error == "KeyboardInterrupt" and not is_main:
                    continue  # Python raises it in the main thread alone
                if place.what.startswith(AFTER) and error != "KeyboardInterrupt":
                    continue
                if error == "SystemExit" and is_main:
                    continue
                found.append(Point(place, number, error))
    return found


def draw(points, number, seed=0):
    """Draw some points, each of another place as long as there are others.

    Runs differ in the places that they pass; what else is drawn stays the same nevertheless.
    """
    times = collections.Counter()
    keys = {}
    for point in points:
        kind = point.place, point.error
        keys[point] = hashlib.sha256(repr((seed, *kind, times[kind])).encode()).digest()
        times[kind] += 1
    drawn, waiting = [], sorted(keys, key=keys.get)
    while waiting and len(drawn) < number:
        seen, later = set(), []
        for point in waiting:
            if point.place in seen:
                later.append(point)
            else:
                seen.add(point.place)
                drawn.append(point)
        waiting = later
    return drawn[:number]


def fork_each(jobs, play, folder, deadline_s, at_once=2, num_ranks=1):
    """Run ``play(job, rank, folder of all ranks)`` in a forked child for each rank of each job.

    Args:
        jobs: What is played.
        play: The function; what it returns is any JSON.
        folder: Under which each job has one, and in it the ``output`` and what was ``found``.
        deadline_s: A child that takes longer hangs.
        at_once: Jobs that run side by side.
        num_ranks: Children of a job.

    Returns:
        For each job a list of how each child ended (``""`` for well) and what it found.
    """
    waiting, running, found = collections.deque(enumerate(jobs)), {}, {}
    while waiting or running:
        while waiting and len(running) < at_once * num_ranks:
            number, job = waiting.popleft()
            own, found[number] = Path(folder) / f"{number}", [None] * num_ranks
            own.mkdir(parents=True)
            for rank in range(num_ranks):
                pid = os.fork()
                if pid == 0:
                    _play_and_leave(functools.partial(play, job, rank, own), rank, own, deadline_s)
                running[pid] = number, rank, own, time.monotonic() + deadline_s
        for pid, (number, rank, own, deadline) in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended and time.monotonic() < deadline:
                continue
            how = "hang"
            if ended:
                code = os.waitstatus_to_exitcode(status)
                how = f"status {code}" if code else ""
            else:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            del running[pid]
            path = own / f"found{rank}"
            found[number][rank] = [how, json.loads(path.read_text()) if path.exists() else None]
        time.sleep(0.01)
    return [found[number] for number in sorted(found)]


def output_of(folder, rank=0):
    return (Path(folder) / f"output{rank}").read_text(errors="replace")


def _play_and_leave(play, rank, folder, deadline_s):
    """Play, and end as Python does, but for what C libraries do when they are unloaded."""
    status = 1
    try:
        file = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        faulthandler.dump_traceback_later(0.95 * deadline_s, file=sys.__stderr__)
        found = play()
        draft = folder / f"found{rank}.draft"
        draft.write_text(json.dumps(found))
        draft.replace(folder / f"found{rank}")
        threading._shutdown()
        atexit._run_exitfuncs()
        status = 0
    except BaseException:  # noqa: BLE001 - this process must not go on as a second parent
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
