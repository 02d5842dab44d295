"""A line now and then from a step that cannot tell how far it is."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL_S = 10.0


@contextmanager
def alive(label: str) -> Iterator[None]:
    """Say on stderr, every ten seconds, that a step goes on; a short one says nothing."""
    begun_s, is_over = time.monotonic(), threading.Event()

    def tell() -> None:
        while not is_over.wait(INTERVAL_S):
            sys.stderr.write(f"{label}: {time.monotonic() - begun_s:.0f} s so far\n")
            sys.stderr.flush()

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        is_over.set()
        teller.join()
