import json
import os
import subprocess
import sys
import threading

import pytest
from processes import wait_for

from launch.process.members import Members, mark, new_token
from launch.process.monitor import NO_GPU, Monitor

BUSY = "while True: pass"


class NoDevices:
    closed = False

    def sample(self):
        return []

    def close(self):
        self.closed = True


class TwoDevices(NoDevices):
    def sample(self):
        return [{**NO_GPU, "device_id": number, "gpu_util_percent": 50} for number in (0, 1)]


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
        }
        assert row["device_id"] is None
    assert [row["time_s"] for row in rows] == sorted(row["time_s"] for row in rows)
    assert rows[-1]["host_used_bytes"] > 2**20
    assert rows[-1]["host_free_bytes"] > 2**20
    assert all(0 <= row["cpu_percent"] <= 100 for row in rows)


def seen_busy(rows):
    """The rows, if the run got a turn on a core while they were written."""
    return rows if any(row["cpu_percent"] for row in rows) else None


def test_each_device_has_a_line_of_each_sample(members, tmp_path):
    with Monitor(members, tmp_path / "monitor.jsonl", 0.1, TwoDevices()):
        rows = wait_for_lines(tmp_path / "monitor.jsonl", 4)[:4]
    assert [row["device_id"] for row in rows] == [0, 1, 0, 1]
    assert rows[0]["time_s"] == rows[1]["time_s"] < rows[2]["time_s"]


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
