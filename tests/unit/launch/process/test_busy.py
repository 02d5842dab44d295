"""What else the machine does before a run is timed."""

import psutil
import pytest

from launch.process import busy
from launch.process.busy import look_around


class Devices:
    def __init__(self, *processes):
        self._processes = processes

    def processes(self):
        return list(self._processes)


@pytest.fixture
def cores(monkeypatch):
    """``cores(90, 10)`` says how busy each core is; the run may use the first two."""
    monkeypatch.setattr(busy.os, "sched_getaffinity", lambda _pid: {0, 1})

    def set_percent(*percent):
        monkeypatch.setattr(psutil, "cpu_percent", lambda _seconds, percpu: list(percent))

    set_percent(0.0, 0.0)
    return set_percent


def test_a_quiet_machine_has_nothing_to_say(cores):
    seen = look_around(Devices({}, {}))
    assert (seen["cpu_percent"], seen["gpu_processes"], seen["busy"]) == (0.0, [], "")
    assert seen["load_1min"] >= 0


def test_processors_that_others_use_are_said(cores):
    cores(90.0, 50.0, 100.0, 100.0)
    assert look_around(Devices())["busy"] == "others used 70% of its cores"


def test_what_the_run_may_not_use_does_not_count(cores):
    cores(1.0, 2.0, 100.0, 100.0)
    assert look_around(Devices())["busy"] == ""


def test_processes_on_the_runs_gpus_are_said(cores):
    seen = look_around(Devices({}, {4711: 3 * 2**30, 4712: None}))
    assert seen["gpu_processes"] == [
        {"device_id": 1, "pid": 4711, "memory_bytes": 3 * 2**30},
        {"device_id": 1, "pid": 4712, "memory_bytes": None},
    ]
    assert seen["busy"] == "process 4711 used GPU 1, 3.0 GiB; process 4712 used GPU 1"
