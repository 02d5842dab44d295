"""Locks of compiled ops, named for the user; nothing here removes one.

While a process builds or loads an op, torch keeps an empty file ``lock`` in the op's folder.
Whoever finds it waits until it is gone, silently and without a limit. A build that is killed leaves
it, and nothing tells it from one that is held: its process may be in another container or on
another machine.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

OLD_S = 900.0
"""Age from which no build is expected to hold a lock: DeepSpeed's op takes a minute or two."""


@dataclass(frozen=True)
class OpLock:
    """The lock of an op.

    Attributes:
        path: The file.
        age_s: Since it was made, in seconds.
    """

    path: Path
    age_s: float

    @property
    def is_old(self) -> bool:
        """Whether it has been there for longer than any build is expected to take."""
        return self.age_s >= OLD_S

    def __str__(self) -> str:
        """Name the lock, its age and the command that removes it."""
        op, age = self.path.parent.name, self.age_s
        since = f"{age / 60:.0f} min" if age >= 90 else f"{age:.0f} s"
        return (
            f"{self.path}: {op} has been locked for {since}, and what needs it waits until this "
            f"file is gone; if nobody builds {op} any more: rm {shlex.quote(str(self.path))}"
        )


def locks_of_ops(root: Path) -> list[OpLock]:
    """Return the locks in a folder of ops, or in one folder for each Python as torch has it.

    Args:
        root: The folder of all ops (``TORCH_EXTENSIONS_DIR``); it need not be there.
    """
    found, now = [], time.time()
    for path in sorted((*root.glob("*/lock"), *root.glob("*/*/lock"))):
        with contextlib.suppress(OSError):  # it has gone meanwhile
            found.append(OpLock(path, max(0.0, now - path.stat().st_mtime)))
    return found
