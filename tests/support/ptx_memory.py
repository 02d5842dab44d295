"""Memory that a PTX kernel may touch, and nothing besides.

Threads run in lockstep here and not on a GPU. So accesses whose order nothing fixes are faults:
by threads of two blocks, or of one block without a barrier between, one of the two a store.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_GRAIN = 2
"""Bytes of the smallest access."""


class MemoryFault(Exception):
    """An access that a GPU would refuse, or whose outcome it would leave to chance."""


class Access(NamedTuple):
    """What threads do at once.

    Attributes:
        addresses: One a thread, in bytes.
        size: Bytes a thread.
        threads: Their numbers in the grid.
        block_size: Threads of a block.
        barriers: That the blocks passed before.
    """

    addresses: Array
    size: int
    threads: Array
    block_size: int
    barriers: int


class Region:
    """One array of bytes behind an address, and who touched it since the kernel started.

    Of several threads that read an element after a store, only the last is remembered.

    Args:
        base: Address of the first byte.
        data: The bytes, of dtype uint8; stores land here.
    """

    def __init__(self, base: int, data: Array) -> None:
        self._base, self._data = base, data
        grains = -(-data.size // _GRAIN)
        self._thread = np.full(grains, -1)
        self._barriers = np.zeros(grains, dtype=np.int64)
        self._is_stored = np.zeros(grains, dtype=bool)

    def holds(self, access: Access) -> bool:
        """Whether every byte is one of this array."""
        first = self._offsets(access)
        return bool(((first >= 0) & (first + access.size <= self._data.size)).all())

    def load(self, access: Access) -> Array:
        """Bytes, shape (threads, size)."""
        self._note(access, is_store=False)
        return self._data[self._offsets(access)[:, None] + np.arange(access.size)]

    def store(self, access: Access, values: Array) -> None:
        """Write ``values``, shape (threads, size)."""
        self._note(access, is_store=True)
        self._data[self._offsets(access)[:, None] + np.arange(access.size)] = values

    def _offsets(self, access: Access) -> Array:
        return access.addresses.astype(np.int64) - self._base

    def _note(self, access: Access, is_store: bool) -> None:
        at = self._offsets(access)[:, None] // _GRAIN + np.arange(access.size // _GRAIN)
        thread, before = access.threads[:, None], self._thread[at]
        same_block = before // access.block_size == thread // access.block_size
        is_ordered = same_block & (self._barriers[at] < access.barriers)
        is_stored = self._is_stored[at]
        race = (before >= 0) & (before != thread) & ~is_ordered & (is_stored | is_store)
        if race.any() or (is_store and len(np.unique(at)) < at.size):
            raise MemoryFault("threads race for an address")
        self._is_stored[at] = is_store | (is_stored & (self._barriers[at] == access.barriers))
        self._thread[at], self._barriers[at] = thread, access.barriers


def find(regions: list[Region], access: Access) -> Region:
    """The array that the access is in.

    Raises:
        MemoryFault: It is in none, or an address is no multiple of the size.
    """
    if (access.addresses % access.size != 0).any():
        raise MemoryFault(f"misaligned access of {access.size} bytes")
    for region in regions:
        if region.holds(access):
            return region
    raise MemoryFault("access outside of every array")
