"""Page-locked memory of the CUDA device."""

import os

import pytest
import torch

from deep_optimizer_states.core.device import cuda

pytestmark = pytest.mark.gpu


def test_host_memory_is_page_locked_in_its_exact_size():
    device = cuda.CudaDevice(0)
    home = device.empty_host(100_000, torch.float32)
    assert home.is_pinned()
    assert home.untyped_storage().nbytes() == 400_000
    view = home[10:20].fill_(3.0)
    del home
    assert view.is_pinned()  # the pages live as long as anything looks at them
    assert view.cuda().sum().item() == 30.0
    device.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks beside other threads
def test_after_a_fork_gpu_and_process_still_see_the_same_pages():
    device = cuda.CudaDevice(0)
    home = device.empty_host(2**20, torch.float32).fill_(1.0)
    copied = home.cuda()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # lives as long as the parent writes
        os._exit(0)
    home.fill_(2.0)  # gets copies of the pages, were they shared with the child
    copied.copy_(home, non_blocking=True)
    torch.cuda.synchronize()
    os.close(write)
    os.waitpid(child, 0)
    os.close(read)
    assert copied.eq(2.0).all()
    device.close()


def test_memory_that_cannot_be_locked_is_pageable_and_fails_no_later_kernel(monkeypatch):
    device, real = cuda.CudaDevice(0), torch.cuda.cudart()
    locked = device.empty_host(1024, torch.float32)

    class LocksTwice:
        """Asks for pages that are locked already, which CUDA refuses."""

        cudaHostUnregister = staticmethod(real.cudaHostUnregister)

        @staticmethod
        def cudaHostRegister(address, size, flags):
            return real.cudaHostRegister(locked.data_ptr(), size, flags)

    monkeypatch.setattr(cuda, "_cudart", lambda: LocksTwice)
    with pytest.warns(UserWarning, match="could not page-lock"):
        pageable = device.empty_host(1024, torch.float32)
    assert not pageable.is_pinned()
    assert torch.ones(4, device="cuda").sum().item() == 4.0
    monkeypatch.undo()
    device.close()
