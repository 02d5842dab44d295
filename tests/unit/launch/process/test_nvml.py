import sys
import types

import pytest

from launch.process import nvml
from launch.process.nvml import Gpus


class NVMLError(Exception):
    pass


@pytest.fixture
def pynvml(monkeypatch):
    """Four GPUs as the library shows them; the last has no PCIe counter."""
    module = types.ModuleType("pynvml")
    module.NVMLError = NVMLError
    module.open = False

    def init():
        module.open = True

    def shutdown():
        module.open = False

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

    module.NVML_PCIE_UTIL_TX_BYTES, module.NVML_PCIE_UTIL_RX_BYTES = "tx", "rx"
    module.nvmlInit, module.nvmlShutdown = init, shutdown
    module.nvmlDeviceGetCount = lambda: 4
    module.nvmlDeviceGetHandleByIndex = lambda index: index
    module.nvmlDeviceGetHandleByUUID = by_uuid
    module.nvmlDeviceGetUtilizationRates = checked(
        lambda handle: types.SimpleNamespace(gpu=90 + handle)
    )
    module.nvmlDeviceGetMemoryInfo = checked(
        lambda handle: types.SimpleNamespace(used=2**30 * handle)
    )
    module.nvmlDeviceGetPcieThroughput = throughput
    module.nvmlDeviceGetComputeRunningProcesses = checked(
        lambda handle: [types.SimpleNamespace(pid=handle + 70, usedGpuMemory=2**20 * handle)]
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


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
    ("has_driver", "count", "said"), [(True, 1, nvml.MISSING), (True, 0, ""), (False, 1, "")]
)
def test_a_missing_package_is_named_once_and_only_beside_a_gpu(
    has_driver, count, said, monkeypatch, tmp_path, capsys
):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(nvml, "DRIVER", tmp_path if has_driver else tmp_path / "none")
    nvml._say_missing.cache_clear()
    assert [Gpus(None, count).sample() for _ in range(3)] == [[], [], []]
    assert capsys.readouterr().err == said
    nvml._say_missing.cache_clear()


def test_a_driver_that_does_not_answer_is_no_missing_package(pynvml, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(nvml, "DRIVER", tmp_path)
    monkeypatch.delattr(pynvml, "nvmlInit")
    assert Gpus(None, 1).sample() == []
    assert capsys.readouterr().err == ""
