"""Page-locked memory of the CUDA device, on the stand-in for CUDA; and the stand-in itself."""

import ctypes
import gc
import inspect
import mmap
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cuda_memory import _REPLACED
from cuda_runtime import Event, Status, Stream
from engine_updates import TAIL, start_thread

from deep_optimizer_states.core.device import cuda
from deep_optimizer_states.core.device.base import Wait
from deep_optimizer_states.core.device.cuda import CudaDevice
from deep_optimizer_states.core.host import LaneCores

PAGE = mmap.PAGESIZE


@pytest.fixture
def device(cuda_device):
    return cuda_device


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
    [({}, 40), ({"free": 0}, 10), ({"allocated": 90}, -10), ({"total": 300}, 20)],
)
def test_memory_is_free_that_nobody_has_taken_with_a_margin(runtime, device, changes, spare):
    """What the allocator holds and nobody uses is free; a tenth of the device is left alone."""
    runtime.memory |= changes
    assert device.free_bytes() == spare


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


def test_close_waits_for_copies_in_flight(runtime, device):
    home, source = device.empty_host(64, torch.float32), torch.ones(64, device="cuda")
    runtime.world.late.add(device.d2h._stream)
    device.d2h.wait(device.record_caller(), Wait.GRAD_READY)
    device.d2h.submit("state flush", lambda: home.copy_(source, non_blocking=True))
    device.close()
    assert torch.equal(home, torch.ones(64))


def test_close_waits_for_work_that_is_nobodys_lane(runtime, device):
    """Another stream of the caller may still copy from page-locked memory."""
    home, other = device.empty_host(64, torch.float32).fill_(1.0), torch.cuda.Stream()
    runtime.world.late.add(other)
    with torch.cuda.stream(other):
        copied = home.to(torch.device("cuda", 0), copy=True, non_blocking=True)
    device.close()
    assert torch.equal(copied.cpu(), torch.ones(64))


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
    device.cpu_affinity = Near(2, ())
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


# The stand-in is as strict as CUDA. That it orders nothing that CUDA does not order is seen by the
# negative controls that run on it.

GPU = torch.device("cuda", 0)
REAL = {name: getattr(torch.cuda, name) for name in _REPLACED}


def parameters(function):
    found = inspect.signature(function).parameters.values()
    return [p.name for p in found if p.kind is not p.VAR_KEYWORD and p.name not in ("self", "cls")]


def test_functions_and_methods_are_torchs_own_and_all_that_the_device_uses_is_there(runtime):
    for name in _REPLACED:
        real = REAL[name]
        if inspect.isclass(real):
            real = real.__init__ if name == "device" else real.__new__
        assert parameters(getattr(runtime, name)) == parameters(real), name
    for ours, names in (
        (Stream, ("wait_event", "synchronize")),
        (Event, ("record", "wait", "query", "synchronize", "elapsed_time")),
    ):
        for name in names:
            real = getattr(REAL[ours.__name__], name)
            assert parameters(getattr(ours, name)) == parameters(real), name
    used = set(re.findall(r"torch\.cuda\.(\w+)", Path(cuda.__file__).read_text()))
    assert used
    assert used <= set(_REPLACED)


def test_host_tensors_are_refused(runtime):
    on_device = torch.ones(8, device=GPU)
    for operation in (
        lambda: on_device.add_(torch.ones(8)),
        lambda: torch.equal(on_device, torch.ones(8)),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            operation()


def test_the_book_has_cudas_own_errors(runtime):
    book, memory = torch.cuda.cudart(), torch.zeros(4096)
    address = memory.data_ptr()
    assert book.cudaHostRegister(address, 0, 0) == Status.INVALID_VALUE
    assert book.cudaHostRegister(address - address % 4096, 4096, 0) == 0
    assert book.cudaHostRegister(address, 8, 0) == Status.ALREADY_REGISTERED == 712
    with pytest.raises(torch.AcceleratorError, match="ALREADY_REGISTERED"):
        torch.ones(1, device=GPU)
    assert torch.ones(1, device=GPU).item() == 1.0, "an error is raised once"
    assert book.cudaHostUnregister(address - address % 4096) == 0
    assert book.cudaHostUnregister(address - address % 4096) == Status.NOT_REGISTERED == 713
    assert book.faults
    book.faults.clear()
