import json
import os
import subprocess
import sys
import threading
import types

import psutil
import pytest
from processes import wait_for

from launch.process import monitor as module
from launch.process.members import Members, mark, new_token
from launch.process.monitor import NO_GPU, Gpus, Monitor, look_around, run_bytes

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


class NVMLError(Exception):
    pass


@pytest.fixture
def pynvml(monkeypatch):
    """Four GPUs as the library shows them; the last has no PCIe counter."""
    library = types.ModuleType("pynvml")
    library.NVMLError = NVMLError
    library.open = False

    def init():
        library.open = True

    def shutdown():
        library.open = False

    def by_uuid(name):
        if name not in ("GPU-b", "MIG-c"):
            raise NVMLError("not found")
        return {"GPU-b": 1, "MIG-c": 2}[name]

    def throughput(handle, counter):
        if handle in (3, None):
            raise NVMLError("not supported")
        return {"tx": 10, "rx": 20}[counter] + handle

    def checked(answer):
        def ask(handle):
            if handle is None:
                raise NVMLError("invalid argument")
            return answer(handle)

        return ask

    library.NVML_PCIE_UTIL_TX_BYTES, library.NVML_PCIE_UTIL_RX_BYTES = "tx", "rx"
    library.nvmlInit, library.nvmlShutdown = init, shutdown
    library.nvmlDeviceGetCount = lambda: 4
    library.nvmlDeviceGetHandleByIndex = lambda index: index
    library.nvmlDeviceGetHandleByUUID = by_uuid
    library.nvmlDeviceGetUtilizationRates = checked(
        lambda handle: types.SimpleNamespace(gpu=90 + handle)
    )
    library.nvmlDeviceGetMemoryInfo = checked(
        lambda handle: types.SimpleNamespace(used=2**30 * handle)
    )
    library.nvmlDeviceGetPcieThroughput = throughput
    library.nvmlDeviceGetComputeRunningProcesses = checked(
        lambda handle: [types.SimpleNamespace(pid=handle + 70, usedGpuMemory=2**20 * handle)]
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


def test_a_row_has_the_units_of_its_names(pynvml):
    gpus = Gpus(None, 2)
    assert gpus.sample()[1] == {
        "device_id": 1,
        "gpu_util_percent": 91,
        "gpu_memory_used_bytes": 2**30,
        "pcie_tx_bytes_per_s": 11_000,
        "pcie_rx_bytes_per_s": 21_000,
    }
    gpus.close()
    assert not pynvml.open
    assert gpus.sample() == []


@pytest.mark.parametrize(
    ("visible", "count", "utilisation"),
    [
        (None, 8, [90, 91, 92, 93]),
        ("2,0", 8, [92, 90]),
        ("3,2,1", 1, [93]),
        ("GPU-b, MIG-c", 2, [91, 92]),
        ("GPU-zzz,0", 2, [None, 90]),
        ("1,9,0", 8, [91]),
        ("-1", 8, []),
        ("", 8, []),
        (None, 0, []),
    ],
)
def test_the_ranks_gpus_in_cudas_order(pynvml, visible, count, utilisation):
    rows = Gpus(visible, count).sample()
    assert [row["gpu_util_percent"] for row in rows] == utilisation
    assert [row["device_id"] for row in rows] == list(range(len(rows)))


def test_processes_of_each_gpu_with_what_they_hold(pynvml):
    gpus = Gpus("2,GPU-zzz,1", 3)
    assert gpus.processes() == [{72: 2**21}, None, {71: 2**20}]
    del pynvml.nvmlDeviceGetComputeRunningProcesses  # an old library
    assert gpus.processes() == [None, None, None]


def test_what_a_gpu_does_not_say_is_null(pynvml):
    (row,) = Gpus("3", 1).sample()
    assert row["pcie_tx_bytes_per_s"] is None
    assert row["gpu_util_percent"] == 93


def test_without_library_or_driver_there_are_no_gpus(pynvml, monkeypatch):
    def no_driver():
        raise NVMLError("driver not loaded")

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    assert Gpus(None, 1).sample() == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    gpus = Gpus(None, 1)
    assert gpus.sample() == []
    gpus.close()


@pytest.mark.parametrize(
    ("has_driver", "count", "said"), [(True, 1, module.MISSING), (True, 0, ""), (False, 1, "")]
)
def test_a_missing_package_is_named_once_and_only_beside_a_gpu(
    has_driver, count, said, monkeypatch, tmp_path, capsys
):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(module, "DRIVER", tmp_path if has_driver else tmp_path / "none")
    module._say_missing.cache_clear()
    assert [Gpus(None, count).sample() for _ in range(3)] == [[], [], []]
    assert capsys.readouterr().err == said
    module._say_missing.cache_clear()


def test_a_driver_that_does_not_answer_is_no_missing_package(pynvml, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(module, "DRIVER", tmp_path)
    monkeypatch.delattr(pynvml, "nvmlInit")
    assert Gpus(None, 1).sample() == []
    assert capsys.readouterr().err == ""


class Devices:
    def __init__(self, *processes):
        self._processes = processes

    def processes(self):
        return list(self._processes)


@pytest.fixture
def cores(monkeypatch):
    """``cores(90, 10)`` says how busy each core is; the run may use the first two."""
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _pid: {0, 1})

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
