"""A pytest plugin: no process outlives the test that started it, however the test ends.

The kernel hands this process whatever its descendants leave behind, in their own sessions as well,
so that nothing a test started can be missed.

A test marked ``own_process`` runs in a fork of this process, so that a signal which it sends to
itself, and which what it tests does not handle, fails that test and does not end the whole run.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import psutil
import pytest

DEADLINE_S = 240.0
"""A wait for what must come may take so long on the busiest machine."""
_PR_SET_CHILD_SUBREAPER = 36
kept = set()
"""Numbers of processes that serve tests of all workers (``prepared.py``) or all of this process
(``_TRACKER``); they end with the session, and so do their children, which belong to other tests."""
_TRACKER = "multiprocessing.resource_tracker"
"""A helper that Python starts once for all that follows, and warns about when it is gone."""


def python_path(*folders):
    """A ``PYTHONPATH`` of these folders, with what every process of a test begins with."""
    first = Path(__file__).with_name("every_process")
    return os.pathsep.join(str(folder) for folder in (first, *folders) if folder)


def wait_for(find, deadline_s=DEADLINE_S):
    """Return what ``find`` returns, as soon as that is true."""
    deadline = time.monotonic() + deadline_s
    while not (found := find()):
        assert time.monotonic() < deadline, f"waited {deadline_s:.0f} s in vain"
        time.sleep(0.02)
    return found


def is_alive(pid):
    """Return whether a process runs; one that has ended and whose status nobody took does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main():
    """For the whole session, its workers and all that they start (see ``sitecustomize.py``)."""
    if "TESTS_CPU_INFO" in os.environ:  # a worker, or a pytest that a test started
        return (yield)
    folder = tempfile.mkdtemp(prefix=f"tests-{os.getpid()}-")
    os.environ["TESTS_CPU_INFO"] = str(Path(folder) / "cpu-info.json")
    os.environ["PYTHONPATH"] = python_path(os.environ.get("PYTHONPATH", ""))
    try:
        return (yield)
    finally:
        shutil.rmtree(folder)


def pytest_configure(config):
    config.addinivalue_line("markers", "own_process: runs in a fork of its own; it sends signals")
    adopt_orphans()
    # In a shell's background SIGINT is ignored, and what tests start would ignore it as well.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure(config):
    """End what an interrupted test leaves, after the teardown of its fixtures."""
    if not hasattr(config, "workerinput"):  # a worker leaves what others still use to its session
        kept.clear()
    end_all()


def adopt_orphans():
    """From now on the kernel hands this process what its descendants leave behind."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_all():
    """End all descendants but those that are kept, and their own."""
    _end_all_but(set())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    before = _descendants()
    result = yield
    _end_all_but(before)
    return result


def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is marked ``own_process``, and hand its failure on."""
    if pyfuncitem.get_closest_marker("own_process") is None:
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    with tempfile.TemporaryFile() as report:
        with warnings.catch_warnings():
            # Python warns of other threads. None of those holds a lock that a test here takes.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            _run_and_leave(lambda: pyfuncitem.obj(**given), report)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        report.seek(0)
        if status:
            pytest.fail(report.read().decode() or f"ended with status {status}", pytrace=False)
    return True


def _run_and_leave(test, report):
    status = 1
    try:
        test()
        status = 0
    except BaseException:  # noqa: BLE001 - this process must not go on as a second pytest
        report.write(traceback.format_exc().encode())
        report.flush()
    finally:
        os._exit(status)


def _end_all_but(spared):
    while left := _descendants() - spared:
        _kill(left)


def _descendants():
    with contextlib.suppress(ChildProcessError):
        # Fails where there is no child at all, which costs far less than to look for them.
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        known = _children()
        if not known or not known <= kept:
            children = [p for p in psutil.Process().children() if p.pid not in kept]
            found = [p for child in children for p in (child, *_children_of(child))]
            trackers = {p for p in found if _is_tracker(p)}
            kept.update(p.pid for p in trackers.intersection(children))
            return set(found) - trackers
    return set()


def _children():
    """Numbers of the children of this process, or none where the kernel does not list them."""
    found = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has ended
            found |= set(map(int, (thread / "children").read_text().split()))
    return found


def _children_of(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def _is_tracker(process):
    with contextlib.suppress(psutil.Error):
        return any(_TRACKER in word for word in process.cmdline())
    return False


def _kill(processes):
    """Kill them all and take the status of those that are children of this process by now."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for process in processes:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, 0)
