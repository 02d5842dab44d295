import json
import os
import secrets
import subprocess
import sys
import types

import psutil
import pytest
from processes import wait_for

from launch.process import monitor as module
from launch.process.monitor import NO_GPU, Gpus, look_around, monitoring
from launch.process.supervise import TOKEN_VARIABLE, Members

BUSY = "while True: pass"
TOKEN = secrets.token_hex(16)


class NoDevices:
    closed = False

    def sample(self, own):
        return []

    def close(self):
        self.closed = True


@pytest.fixture
def members():
    """A run of one process that is busy on one core."""
    environment = {**os.environ, TOKEN_VARIABLE: TOKEN}
    process = subprocess.Popen([sys.executable, "-c", BUSY], env=environment)
    yield Members(TOKEN)
    process.kill()
    process.wait()


def wait_for_lines(path, count):
    """The rows of whole lines, as soon as there are so many."""
    wait_for(lambda: path.exists() and path.read_text().count("\n") >= count)
    return [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]


def test_a_busy_process_is_seen(members, tmp_path):
    def seen_busy(rows):
        """The rows, if the run got a turn on a core while they were written."""
        return rows if any(row["cpu_percent"] for row in rows) else None

    devices = NoDevices()
    with monitoring(members, tmp_path / "monitor.jsonl", 0.2, devices):
        rows = wait_for(lambda: seen_busy(wait_for_lines(tmp_path / "monitor.jsonl", 4)))
    assert devices.closed
    own = {"time_s", "host_used_bytes", "host_free_bytes", "cpu_percent", "machine_used_bytes"}
    for row in rows:
        assert set(row) == own | set(NO_GPU)
        assert row["device_id"] is None
    assert [row["time_s"] for row in rows] == sorted(row["time_s"] for row in rows)
    assert rows[-1]["host_used_bytes"] > 2**20
    assert rows[-1]["host_free_bytes"] > 2**20
    assert all(0 <= row["cpu_percent"] <= 100 for row in rows)
    assert all(row["machine_used_bytes"] > row["host_used_bytes"] for row in rows)


def test_each_device_has_a_line_of_each_sample_and_gets_the_runs_processes(members, tmp_path):
    class TwoDevices(NoDevices):
        def sample(self, own):
            return [{**NO_GPU, "device_id": n, "gpu_memory_run_bytes": len(own)} for n in (0, 1)]

    with monitoring(members, tmp_path / "monitor.jsonl", 0.1, TwoDevices()):
        rows = wait_for_lines(tmp_path / "monitor.jsonl", 4)[:4]
    assert [row["device_id"] for row in rows] == [0, 1, 0, 1]
    assert {row["gpu_memory_run_bytes"] for row in rows} == {1}
    assert rows[0]["time_s"] == rows[1]["time_s"] < rows[2]["time_s"]


class Broken(NoDevices):
    def sample(self, own):
        raise RuntimeError("driver")


@pytest.mark.parametrize(
    ("name", "devices", "words"),
    [("full", NoDevices, "No space left"), ("monitor.jsonl", Broken, "RuntimeError('driver')")],
)
def test_what_fails_ends_the_sampling_and_nothing_else(
    members, tmp_path, capfd, name, devices, words
):
    (tmp_path / "full").symlink_to("/dev/full")
    said, devices = [], devices()
    with monitoring(members, tmp_path / name, 0.05, devices):
        wait_for(lambda: said.append(capfd.readouterr().err) or "ended" in "".join(said))
    assert words in "".join(said)
    assert devices.closed


class NVMLError(Exception):
    pass


@pytest.fixture
def pynvml(monkeypatch):
    """Four GPUs as the library shows them; the last has no PCIe counter."""
    library = types.ModuleType("pynvml")
    library.NVMLError = NVMLError
    library.open = False

    def checked(answer, refused=(None,)):
        def ask(handle, *more):
            if handle in refused:
                raise NVMLError("not supported")
            return answer(handle, *more)

        return ask

    def held(handle):
        return [types.SimpleNamespace(pid=handle + 70, usedGpuMemory=2**20 * handle)]

    library.NVML_PCIE_UTIL_TX_BYTES, library.NVML_PCIE_UTIL_RX_BYTES = 10, 20
    library.nvmlInit = lambda: setattr(library, "open", True)
    library.nvmlShutdown = lambda: setattr(library, "open", False)
    library.nvmlDeviceGetCount = lambda: 4
    library.nvmlDeviceGetHandleByIndex = lambda index: index
    library.nvmlDeviceGetUtilizationRates = checked(lambda n: types.SimpleNamespace(gpu=90 + n))
    library.nvmlDeviceGetMemoryInfo = checked(lambda n: types.SimpleNamespace(used=2**30 * n))
    library.nvmlDeviceGetPcieThroughput = checked(lambda n, counter: counter + n, (3, None))
    library.nvmlDeviceGetComputeRunningProcesses = checked(held)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


def test_a_row_has_the_units_of_its_names(pynvml):
    gpus = Gpus(None, 2)
    assert gpus.sample({71})[1] == {
        "device_id": 1,
        "gpu_util_percent": 91,
        "gpu_memory_used_bytes": 2**30,
        "pcie_tx_bytes_per_s": 11_000,
        "pcie_rx_bytes_per_s": 21_000,
        "gpu_memory_run_bytes": 2**20,
    }
    # No process of the GPU is ours, or a container knows ours by other ids.
    assert [row["gpu_memory_run_bytes"] for row in gpus.sample(set())] == [None, None]
    gpus.close()
    assert not pynvml.open
    assert gpus.sample({71}) == []


@pytest.mark.parametrize(
    ("visible", "count", "utilisation"),
    [
        (None, 8, [90, 91, 92, 93]),
        ("2,0", 8, [92, 90]),
        ("3,2,1", 1, [93]),
        ("GPU-b,0", 2, []),
        ("1,9,0", 8, [91]),
        ("-1", 8, []),
        ("", 8, []),
        (None, 0, []),
    ],
)
def test_the_ranks_gpus_in_cudas_order(pynvml, visible, count, utilisation):
    rows = Gpus(visible, count).sample(set())
    assert [row["gpu_util_percent"] for row in rows] == utilisation
    assert [row["device_id"] for row in rows] == list(range(len(rows)))


def test_what_a_gpu_does_not_say_is_null(pynvml):
    (row,) = Gpus("3", 1).sample(set())
    assert row["pcie_tx_bytes_per_s"] is None
    assert row["gpu_util_percent"] == 93


def test_without_library_or_driver_there_are_no_gpus(pynvml, monkeypatch):
    def no_driver():
        raise NVMLError("driver not loaded")

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    assert Gpus(None, 1).sample(set()) == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    gpus = Gpus(None, 1)
    assert gpus.sample(set()) == []
    gpus.close()


@pytest.mark.parametrize(
    ("percent", "processes", "words"),
    [
        ((0.0, 0.0), ({}, {}), ""),
        ((90.0, 50.0, 100.0, 100.0), (), "others used 70% of its cores"),
        ((1.0, 2.0, 100.0, 100.0), (), ""),  # the run may use the first two cores alone
        (
            (0.0, 0.0),
            ({}, {4711: 3 * 2**30, 4712: None}),
            "process 4711 used GPU 1, 3.0 GiB; process 4712 used GPU 1",
        ),
    ],
)
def test_what_disturbs_a_measurement_is_said(monkeypatch, percent, processes, words):
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _pid: {0, 1})
    monkeypatch.setattr(psutil, "cpu_percent", lambda _seconds, percpu: list(percent))
    seen = look_around(types.SimpleNamespace(processes=lambda: processes))
    assert seen == {"cpu_percent": sum(percent[:2]) / 2, "busy": words}
