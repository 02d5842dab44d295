"""Memory that is about to be page-locked: how it is mapped, who touches it, and what forks do."""

import ctypes
import errno
import mmap
import re
import threading
from pathlib import Path

import pytest

from deep_optimizer_states.core.device import cuda as host_pages
from deep_optimizer_states.core.device.cuda import PIECE_BYTES, take_pages
from deep_optimizer_states.core.host import ANYWHERE, LaneCores

PAGE = mmap.PAGESIZE


def mapping_of(address):
    """Permissions and flags of the mapping around an address, as the kernel says them."""
    for entry in re.split(r"\n(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text()):
        first, last = (int(end, 16) for end in entry.split(maxsplit=1)[0].split("-"))
        if first <= address < last:
            flags = re.search(r"^VmFlags: (.*)$", entry, re.MULTILINE)
            return entry.split()[1], flags[1].split()
    raise AssertionError(f"{address:#x} is not mapped")


def pages_in_place(pages):
    found = (ctypes.c_ubyte * (len(pages) // PAGE))()
    where = ctypes.c_void_p(ctypes.addressof(pages)), ctypes.c_size_t(len(pages))
    assert ctypes.CDLL(None).mincore(*where, found) == 0
    return sum(page & 1 for page in found)


def test_pages_are_private_huge_and_not_forked():
    pages = take_pages(2**22, ANYWHERE)
    permissions, flags = mapping_of(ctypes.addressof(pages))
    assert permissions == "rw-p"
    assert "dc" in flags, "MADV_DONTFORK"
    assert "hg" in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists()


@pytest.mark.parametrize("num_bytes", [1, PAGE, 5 * PAGE, PIECE_BYTES, 2 * PIECE_BYTES + PAGE + 1])
@pytest.mark.parametrize("advised", [True, False])
def test_every_page_is_whole_and_in_place(num_bytes, advised, monkeypatch):
    if not advised:  # or one touch brings the whole of a huge page
        monkeypatch.setattr(host_pages.mmap, "MADV_HUGEPAGE", mmap.MADV_NORMAL)
    pages = take_pages(num_bytes, LaneCores(2, ()))
    assert pages_in_place(pages) == len(pages) // PAGE
    assert ctypes.addressof(pages) % PAGE == 0
    assert bytes(pages) == bytes(-(-num_bytes // PAGE) * PAGE), "zeros"


def test_a_kernel_without_huge_pages_does_without(monkeypatch):
    class Refuses(mmap.mmap):
        def madvise(self, option, *span):
            if option == mmap.MADV_HUGEPAGE:
                raise OSError(errno.EINVAL, "Invalid argument")
            super().madvise(option, *span)

    monkeypatch.setattr(host_pages.mmap, "mmap", Refuses)
    pages = take_pages(2**22, ANYWHERE)
    assert pages_in_place(pages) == len(pages) // PAGE
    assert "hg" not in mapping_of(ctypes.addressof(pages))[1]


def test_as_many_threads_touch_as_the_lane_has():
    """Each waits for another one: a single thread would never get on, nor would a third."""
    both = threading.Barrier(2, timeout=3600)

    class Meets(LaneCores):
        def bind_this_thread(self):
            both.wait()

    take_pages(3 * PIECE_BYTES, Meets(2, ()))


def test_what_a_thread_that_touches_raises_is_raised(monkeypatch):
    def fail(array, dtype):
        return None

    monkeypatch.setattr(host_pages.np, "frombuffer", fail)
    with pytest.raises(TypeError):
        take_pages(1, ANYWHERE)
