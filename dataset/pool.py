"""Work shared out over processes, results in order, little in memory."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from typing import TypeVar

from dataset.files import DatasetError

Item = TypeVar("Item")
Result = TypeVar("Result")

# Items under way for each worker: one being worked on, one waiting, so that nobody idles.
ITEMS_PER_WORKER = 2


def ordered(
    work: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Generator[Result, None, None]:
    """Do ``work`` on every item in ``workers`` processes and yield results in the items' order.

    ``items`` is drawn from only as fast as results come out: not more than two items a worker are
    alive. Closing the iterator ends the processes once they are through with their item; they also
    end when this process dies.

    Raises:
        DatasetError: A worker died.
    """
    # Spawned: a fork would copy this process's threads' locks and all its memory.
    executor = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker)
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            # This may start a worker. Ctrl-C would end it with a traceback as long as it only
            # imports; it inherits what is blocked here, and here Ctrl-C arrives a moment later.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                waiting.append(executor.submit(work, item))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if len(waiting) >= ITEMS_PER_WORKER * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DatasetError(
            "a worker process died, perhaps killed for want of memory: "
            "run the same command again with fewer --workers"
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    # Ctrl-C reaches the whole group of processes; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    # Without this a worker whose parent was killed waits for work for ever: it holds the other end
    # of its queue itself.
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
