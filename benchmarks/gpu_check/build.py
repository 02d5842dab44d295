"""Piece ``build``: compile DeepSpeed's CPUAdam and this engine's kernel, and compare their bits."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from deep_optimizer_states import build


def remove_locks(folder: Path) -> None:
    """Remove what a build that was ended left; the next one would wait for it without end."""
    for path in folder.rglob("lock"):
        path.unlink()


def main() -> int:
    """Build; returns the exit status."""
    remove_locks(Path(os.environ["TORCH_EXTENSIONS_DIR"]))
    return build.main()


if __name__ == "__main__":
    sys.exit(main())
