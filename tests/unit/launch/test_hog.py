import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from processes import is_alive, wait_for

from launch import hog

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def start(tmp_path):
    started = []

    def begin(share, out=tmp_path / "hog.json"):
        options = ["--share", str(share), "--device", "cpu", "--out", str(out)]
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.hog", *options], cwd=ROOT, stderr=subprocess.PIPE
        )
        started.append(process)
        return process, out

    yield begin
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()


def processor_s(processes):
    return sum(sum(process.cpu_times()[:2]) for process in processes)


class Clocks:
    """A core that others use as well: while a process works for 1 s, ``stretch`` seconds pass."""

    def __init__(self, stretch):
        self.stretch, self.now_s, self.used_s = stretch, 0.0, 0.0

    def monotonic(self):
        return self.now_s

    def process_time(self):
        """Looking at the clock is the work."""
        self.used_s += 1e-4
        self.now_s += 1e-4 * self.stretch
        return self.used_s

    def sleep(self, seconds):
        self.now_s += seconds


@pytest.mark.parametrize(
    ("share", "stretch", "held"), [(0.1, 1, 0.1), (0.5, 1, 0.5), (0.5, 1.8, 0.5), (0.5, 4, 0.25)]
)
def test_a_worker_uses_its_share_as_far_as_others_leave_it(monkeypatch, share, stretch, held):
    clocks, parent, seconds = Clocks(stretch), 4711, 20.0
    monkeypatch.setattr(hog, "time", clocks)
    monkeypatch.setattr(signal, "signal", lambda *_arguments: None)  # the test's own stay
    monkeypatch.setattr(os, "setsid", lambda: None)
    monkeypatch.setattr(os, "getppid", lambda: parent if clocks.now_s < seconds else 1)
    hog._spin(share, parent)
    assert clocks.used_s / clocks.now_s == pytest.approx(held, rel=0.02)


def test_the_share_held_is_that_of_all_workers_over_the_cores(start):
    process, out = start(0.5)
    wait_for(out.exists)
    first = json.loads(out.read_text())
    assert first == {"device": "cpu", "share_asked": 0.5, "share_held": None, "seconds": 0.0}
    workers = psutil.Process(process.pid).children()
    for worker in workers:  # the whole run is told to end, and the last report still counts them
        worker.terminate()
    before_s = processor_s(workers)
    wait_for(lambda: processor_s(workers) > before_s + 1.0)
    least_s = processor_s(workers) - before_s
    process.terminate()
    assert process.wait() == 0
    last = json.loads(out.read_text())
    cores = len(psutil.Process().cpu_affinity())
    slack_s = 0.02 * len(workers)  # the kernel counts in hundredths
    assert last["share_held"] * last["seconds"] * cores > least_s - slack_s
    assert last["share_held"] < 1
    assert not any(is_alive(worker.pid) for worker in workers)


def test_a_lost_worker_ends_the_hog_by_name(start):
    process, out = start(0.05)
    wait_for(out.exists)
    psutil.Process(process.pid).children()[0].kill()
    assert process.wait() == 1
    assert b"[launch] hog of cpu: error: one of its workers ended" in process.stderr.read()


def test_workers_end_when_the_hog_is_killed(start):
    process, out = start(0.05)
    wait_for(out.exists)
    workers = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    wait_for(lambda: not any(is_alive(worker.pid) for worker in workers))


def test_a_full_disk_is_said_and_the_share_still_held(start, tmp_path):
    process, _ = start(0.05, tmp_path / "missing" / "hog.json")
    assert b"could not be written" in process.stderr.readline()
    process.terminate()
    assert process.wait() == 0
