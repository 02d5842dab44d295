"""Page-locked memory of the CUDA device, and where the device is: on the stand-in for CUDA."""

import ctypes
import gc
import mmap
import os
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from cuda_memory import stand_in
from engine_iterations import run_iterations
from engine_updates import ADAM, SCHEDULES, TAIL, make_schedule, start_thread

from deep_optimizer_states.core.device.base import Wait
from deep_optimizer_states.core.device.cuda import CudaDevice
from deep_optimizer_states.core.device.emulated import EmulatedDevice
from deep_optimizer_states.core.host import LaneCores

PAGE = mmap.PAGESIZE


@pytest.fixture
def runtime():
    with stand_in() as runtime:
        yield runtime
        assert runtime.page_locks.faults == []


@pytest.fixture
def device(runtime):
    """Memory is unlocked once it is closed."""
    device = CudaDevice(TAIL.mode)
    yield device
    device.close()
    assert sizes(runtime) == []


def sizes(runtime):
    return sorted(end - begin for begin, end in runtime.page_locks.ranges.items())


@pytest.mark.parametrize(
    ("numel", "dtype", "locked"),
    [
        (0, torch.float32, []),
        (1, torch.float32, [PAGE]),
        (PAGE // 4, torch.float32, [PAGE]),
        (PAGE // 4 + 1, torch.float32, [2 * PAGE]),
        (5 * PAGE // 2, torch.bfloat16, [5 * PAGE]),
    ],
)
def test_host_memory_is_page_locked_in_its_exact_size(runtime, device, numel, dtype, locked):
    home = device.empty_host(numel, dtype)
    assert sizes(runtime) == locked, "not rounded up to a power of two"
    assert (home.shape, home.dtype) == ((numel,), dtype)
    assert home.untyped_storage().nbytes() == numel * dtype.itemsize
    assert home.is_pinned() == bool(numel)
    home.fill_(3.0)
    device.close()
    assert home.eq(3.0).all(), "the memory stays, only the lock goes"
    assert not home.is_pinned()


@pytest.mark.parametrize(
    ("changes", "spare"),
    [({}, 30), ({"free": 0}, 0), ({"peak": 90}, -10), ({"total": 300}, 10)],
)
def test_memory_is_spare_that_no_iteration_has_needed_with_a_margin(
    runtime, device, changes, spare
):
    """What the allocator holds beyond the peak is spare; a tenth of the device is left alone."""
    runtime.memory |= changes
    assert device.spare_bytes() == spare


def test_no_page_is_locked_twice(runtime, device):
    homes = [device.empty_host(numel, torch.float32) for numel in range(1, 50)]
    assert sizes(runtime) == [PAGE] * 49, "each on pages of its own"
    del homes[::2]
    homes += [device.empty_host(numel, torch.float32) for numel in range(1, 50)]
    assert all(home.is_pinned() for home in homes)


def test_memory_is_unlocked_when_nothing_looks_at_it(runtime, device):
    """Without close(), and before it is unmapped: a later mapping may get the same address."""
    home = device.empty_host(100_000, torch.float32)
    view = home.data[10:20].fill_(3.0)  # as the master weights: not a view of the first tensor
    owner = SimpleNamespace(home=device.empty_host(100_000, torch.float32))
    owner.itself = owner
    del home, owner
    gc.collect()
    assert view.is_pinned(), "the pages live as long as anything looks at them"
    assert view.to(torch.device("cuda", 0)).sum().item() == 30.0
    del view
    gc.collect()
    assert sizes(runtime) == []


def test_close_waits_for_copies_in_flight():
    with stand_in() as runtime:
        device = CudaDevice(TAIL.mode)
        home = device.empty_host(64, torch.float32)
        source = torch.ones(64, device="cuda")
        runtime.world.late.add(device.d2h._stream)
        device.d2h.wait(device.record_caller(), Wait.GRAD_READY)
        device.d2h.submit("state flush", lambda: home.copy_(source, non_blocking=True))
        device.close()
        assert torch.equal(home, torch.ones(64))


ENDS_WITHOUT_CLOSE = """
import torch
from cuda_memory import stand_in
from cuda_runtime import Point
from deep_optimizer_states.core.device.cuda import CudaDevice
stood_in = stand_in()
runtime, device = stood_in.__enter__(), CudaDevice(1)
source, home = torch.ones(64, device="cuda"), device.empty_host(64, torch.float32)
runtime.current_stream().wait_for(Point())
home.copy_(source, non_blocking=True)
"""


def test_a_script_that_ends_does_not_wait_for_a_gpu_that_hangs():
    """It has failed, and says so by ending: nobody calls close() then."""
    command = [sys.executable, "-W", "ignore", "-c", ENDS_WITHOUT_CLOSE]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def one_on_the_device():
    return torch.ones(1, device="cuda").item()


def test_memory_that_cannot_be_locked_is_pageable_and_fails_no_later_kernel(runtime, device):
    runtime.page_locks.limit_bytes = 2 * PAGE
    locked = device.empty_host(PAGE // 2, torch.float32)
    words = rf"could not page-lock {PAGE} bytes .*\(error 2\).*how much memory is free"
    with pytest.warns(UserWarning, match=words) as warned:
        pageable = device.empty_host(1, torch.float32)
    assert [re.search("test_cuda_memory", w.filename) is not None for w in warned] == [True]
    assert locked.is_pinned()
    assert not pageable.is_pinned()
    assert one_on_the_device() == 1.0, "the refusal's error is taken back"
    with pytest.raises(UserWarning, match="could not page-lock"):  # here a warning is an error
        device.empty_host(1, torch.float32)
    assert one_on_the_device() == 1.0


@pytest.mark.filterwarnings("ignore:CUDA could not page-lock")
def test_pageable_memory_gives_the_same_bits(runtime, device):
    reference = EmulatedDevice(ADAM)
    expected = run_iterations(reference, make_schedule())
    reference.close()
    runtime.page_locks.limit_bytes = 7 * PAGE
    assert torch.equal(run_iterations(device, SCHEDULES["stride 2, tiles"]), expected)


def test_memory_is_not_locked_where_that_is_not_wanted(runtime, device):
    device.locks_pages = False
    home = device.empty_host(100, torch.float32)
    assert (home.is_pinned(), home.shape, sizes(runtime)) == (False, (100,), [])


def test_pages_are_in_place_before_they_are_locked(runtime, device, monkeypatch):
    """By threads on the cores that are near; locking them itself is left to the caller."""
    near, seen = [], []
    register = runtime.page_locks.cudaHostRegister

    class Near(LaneCores):
        def bind_this_thread(self):
            near.append(threading.get_ident())

    def watch(address, size, flags):
        in_place = (ctypes.c_ubyte * (size // PAGE))()
        ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), in_place)
        seen.append((bytes(in_place), threading.get_ident(), len(near)))
        return register(address, size, flags)

    monkeypatch.setattr(runtime.page_locks, "cudaHostRegister", watch)
    device.near = Near(2, ())
    device.empty_host(3 * PAGE // 4 + 1, torch.float32)
    assert seen == [(bytes([1] * 4), threading.get_ident(), 1)]


@pytest.mark.parametrize(
    ("index", "bare", "address"),
    [(0, False, "0000:3b:02.0"), (1, False, "0000:3c:02.0"), (0, True, None)],
)
def test_the_address_on_the_bus_is_as_the_system_writes_it(
    runtime, monkeypatch, index, bare, address
):
    """A torch without addresses gives none."""
    torch.cuda.set_device(index)
    device = CudaDevice(TAIL.mode)
    if bare:
        properties = SimpleNamespace(name="a GPU of another maker", pci_bus_id=1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    assert device.pci_address == address


def test_a_thread_that_enters_works_on_the_devices_own_gpu(runtime):
    torch.cuda.set_device(1)
    device, seen = CudaDevice(TAIL.mode), []

    def work():
        seen.append(torch.cuda.current_device())
        device.enter_thread()
        seen.append(torch.cuda.current_device())
        seen.append(torch.zeros(1, device="cuda").device.index)

    start_thread(work)()
    assert seen == [0, 1, 1]
    device.close()
