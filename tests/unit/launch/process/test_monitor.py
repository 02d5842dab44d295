import json
import os
import subprocess
import sys
import threading

import pytest
from processes import wait_for

from launch.process.members import Members, mark, new_token
from launch.process.monitor import NO_GPU, Monitor, run_bytes

BUSY = "while True: pass"


class NoDevices:
    closed = False

    def sample(self):
        return []

    def processes(self):
        return []

    def close(self):
        self.closed = True


class TwoDevices(NoDevices):
    own = ()

    def sample(self):
        return [{**NO_GPU, "device_id": number, "gpu_util_percent": 50} for number in (0, 1)]

    def processes(self):
        """The run's own on the second, somebody else's on both."""
        own = dict.fromkeys(self.own, 2**30)
        return [{os.getppid(): 5}, {os.getppid(): 5, **own}]


@pytest.fixture
def members():
    """A run of one process that is busy on one core."""
    token = new_token()
    process = subprocess.Popen([sys.executable, "-c", BUSY], env=mark(os.environ, token))
    yield Members(token)
    process.kill()
    process.wait()


def wait_for_lines(path, count):
    """The rows of whole lines, as soon as there are so many."""
    wait_for(lambda: path.exists() and path.read_text().count("\n") >= count)
    return [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]


def test_a_busy_process_is_seen(members, tmp_path):
    devices = NoDevices()
    with Monitor(members, tmp_path / "monitor.jsonl", 0.2, devices):
        rows = wait_for(lambda: seen_busy(wait_for_lines(tmp_path / "monitor.jsonl", 4)))
    assert devices.closed
    for row in rows:
        assert set(row) == {
            "time_s",
            "host_used_bytes",
            "host_free_bytes",
            "cpu_percent",
            "device_id",
            "gpu_util_percent",
            "gpu_memory_used_bytes",
            "pcie_tx_bytes_per_s",
            "pcie_rx_bytes_per_s",
            "host_pss_bytes",
            "machine_used_bytes",
            "gpu_memory_run_bytes",
        }
        assert row["device_id"] is None
    assert [row["time_s"] for row in rows] == sorted(row["time_s"] for row in rows)
    assert rows[-1]["host_used_bytes"] > 2**20
    assert rows[-1]["host_free_bytes"] > 2**20
    assert all(0 <= row["cpu_percent"] <= 100 for row in rows)
    assert all(row["machine_used_bytes"] > row["host_used_bytes"] for row in rows)


def seen_busy(rows):
    """The rows, if the run got a turn on a core while they were written."""
    return rows if any(row["cpu_percent"] for row in rows) else None


def test_each_device_has_a_line_of_each_sample(members, tmp_path):
    with Monitor(members, tmp_path / "monitor.jsonl", 0.1, TwoDevices()):
        rows = wait_for_lines(tmp_path / "monitor.jsonl", 4)[:4]
    assert [row["device_id"] for row in rows] == [0, 1, 0, 1]
    assert rows[0]["time_s"] == rows[1]["time_s"] < rows[2]["time_s"]


def test_the_runs_part_of_each_gpus_memory(members, tmp_path):
    devices = TwoDevices()
    devices.own = [process.pid for process in members.all()]
    with Monitor(members, tmp_path / "monitor.jsonl", 0.1, devices):
        rows = wait_for_lines(tmp_path / "monitor.jsonl", 2)[:2]
    assert [row["gpu_memory_run_bytes"] for row in rows] == [0, 2**30]


NOT_HERE = 2**22 + 1
"""Larger than any process id."""


@pytest.mark.parametrize(
    ("processes", "size_bytes"),
    [
        (None, None),  # the driver does not say
        ({}, 0),
        ({os.getpid(): 5}, 0),
        ({1: 10, 2: 20, os.getpid(): 5}, 30),
        ({1: 10, 2: None}, None),
        ({NOT_HERE: 10}, None),  # maybe ours, by its number outside of this container
        ({NOT_HERE: 10, 1: 10}, 10),
    ],
)
def test_what_the_runs_processes_hold_of_a_gpu(processes, size_bytes):
    assert run_bytes(processes, {1, 2}) == size_bytes


@pytest.fixture
def pair():
    """A run of two processes that share 64 MiB."""
    token = new_token()
    code = (
        "import mmap, os; shared = mmap.mmap(-1, 2**26); shared.write(b'x' * 2**26); os.fork();"
        "shared[:]; print(flush=True); import time; time.sleep(600)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=mark(os.environ, token), stdout=subprocess.PIPE
    )
    with process:
        for _ in range(2):
            process.stdout.readline()
        yield Members(token)
        for member in Members(token).all():
            member.kill()


def test_pages_that_processes_share_count_once(pair, tmp_path):
    with Monitor(pair, tmp_path / "monitor.jsonl", 0.05, NoDevices()):
        (row, *_) = wait_for_lines(tmp_path / "monitor.jsonl", 1)
    if row["host_pss_bytes"] is None:
        pytest.skip("this kernel does not show proportional memory")
    assert row["host_used_bytes"] > 2 * 2**26
    assert 2**26 < row["host_pss_bytes"] < row["host_used_bytes"] - 2**25


def test_a_costly_look_at_shared_pages_is_not_repeated_soon(members, tmp_path, monkeypatch):
    monkeypatch.setattr("launch.process.monitor.PSS_SHARE", 1e-9)
    with Monitor(members, tmp_path / "monitor.jsonl", 0.05, NoDevices()):
        rows = wait_for_lines(tmp_path / "monitor.jsonl", 3)
    assert [row["host_pss_bytes"] for row in rows[1:]] == [None] * len(rows[1:])
    assert all(row["host_used_bytes"] for row in rows)


def wait_for_words(capfd, words):
    """Wait until they were said on stderr."""
    said = []
    wait_for(lambda: said.append(capfd.readouterr().err) or words in "".join(said))


def test_a_full_disk_ends_the_sampling_and_nothing_else(members, tmp_path, capfd):
    (tmp_path / "full").symlink_to("/dev/full")
    with Monitor(members, tmp_path / "full", 0.05, NoDevices()):
        wait_for_words(capfd, "sampling ended")


def test_devices_that_fail_end_the_sampling_and_nothing_else(members, tmp_path, capfd):
    class Broken(NoDevices):
        def sample(self):
            raise RuntimeError("driver")

    with Monitor(members, tmp_path / "monitor.jsonl", 0.05, Broken()):
        wait_for_words(capfd, "RuntimeError('driver')")


def test_the_block_ends_at_once(members, tmp_path):
    """A sampler that slept through would be left behind, as the driver that hangs is."""
    with Monitor(members, tmp_path / "monitor.jsonl", 3600.0, NoDevices()):
        pass
    assert "monitor" not in {thread.name for thread in threading.enumerate()}
