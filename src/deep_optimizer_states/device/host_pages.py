"""Host memory that is about to be page-locked: private huge pages, written to by several threads.

Registering memory with CUDA needs every page in place. Left to CUDA, one thread faults them in, and
a shared mapping has small pages only.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from deep_optimizer_states.cores import LaneCores

PIECE_BYTES = 2**25
"""What a thread touches before it asks for more; a multiple of every page size in use."""
Pages = ctypes.Array[ctypes.c_char]
_taken: weakref.WeakValueDictionary[int, Pages] = weakref.WeakValueDictionary()
_kept_by_child: list[Pages] = []


def take_pages(num_bytes: int, near: LaneCores) -> Pages:
    """Map fresh memory and put every page of it in place, next to the cores of ``near``.

    A process that forks (workers of a data loader) keeps the memory to itself: a child may hold
    tensors of it, and crashes only if it reads or writes them.

    Args:
        num_bytes: At least 1; rounded up to whole pages.
        near: Whose threads touch the pages: Linux puts a page next to the core that first does.

    Returns:
        The pages, zeroed. They are unmapped when nothing refers to them any more.
    """
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # After a fork, whoever writes first to a private page gets a copy of it. That may be this
    # process, whose GPU would then go on copying from and to the old page.
    mapping.madvise(mmap.MADV_DONTFORK)
    with contextlib.suppress(OSError):  # a kernel without huge pages does with small ones
        mapping.madvise(mmap.MADV_HUGEPAGE)
    # An array around the mapping: a mapping is gone before its own weak references are called, and
    # its pages must be unlocked while they are there.
    pages = (ctypes.c_char * size).from_buffer(mapping)
    _touch(pages, near)
    _taken[ctypes.addressof(pages)] = pages
    return pages


def _touch(pages: Pages, near: LaneCores) -> None:
    """Write to one byte of each page; threads end afterwards, so they can be bound to cores."""
    view = np.frombuffer(memoryview(pages), dtype=np.uint8)

    def touch(first: int) -> None:
        view[first : first + PIECE_BYTES : mmap.PAGESIZE] = 0

    starts = range(0, len(pages), PIECE_BYTES)
    num_threads = min(near.num_threads, len(starts))
    with ThreadPoolExecutor(num_threads, initializer=near.bind_this_thread) as pool:
        list(pool.map(touch, starts))  # the list raises what a thread raised


# A forked child has none of this memory mapped. Were its copies of the objects collected, they
# would unmap whatever the child has mapped at these addresses since.
os.register_at_fork(after_in_child=lambda: _kept_by_child.extend(_taken.values()))
