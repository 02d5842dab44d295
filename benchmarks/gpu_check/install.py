"""Piece ``install``: the packages that lack, from a folder of wheels, into a folder of their own.

``python -m benchmarks.gpu_check.install SITE [--wheels DIR]``. No virtual environment, no network:
what the machine has is kept as it is, since whoever put it there matched it to its torch.
Standard library alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

NEEDED = (
    *("deepspeed", "megatron-core", "numpy", "psutil", "pydantic", "tokenizers"),
    *("pytest", "pytest-timeout"),
)
"""What the other pieces import, and what brings the rest along."""
_IMPORTS = "import deepspeed, megatron.core, psutil, pydantic, tokenizers, pytest, pytest_timeout"


def is_installed(package: str) -> bool:
    """Whether this Python has a package, in any version."""
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def wheels_that_lack(folder: Path) -> list[Path]:
    """Wheels of a folder whose packages this Python does not have."""
    # A wheel's name begins with its package's, in which dashes have become underscores.
    wheels = sorted(folder.glob("*.whl"))
    return [path for path in wheels if not is_installed(path.name.split("-")[0].replace("_", "-"))]


def install(site: Path, wheels: Path | None) -> int:
    """Install what lacks into ``site``; returns the exit status."""
    lacking = wheels_that_lack(wheels) if wheels else []
    if lacking:
        options = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade"]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        done = subprocess.run(
            [*pip, *options, "--target", str(site), *map(str, lacking)], check=False
        )
        if done.returncode:
            return done.returncode
    sys.stdout.write(f"* {len(lacking)} packages installed\n")
    # In a process of its own, which finds what has just been installed.
    check = f"from benchmarks.gpu_check import install; install.report(); {_IMPORTS}"
    return subprocess.run([sys.executable, "-W", "ignore", "-c", check], check=False).returncode


def report() -> None:
    """End this process with a sentence when a package lacks."""
    lacking = [name for name in NEEDED if not is_installed(name)]
    if lacking:
        sys.exit(
            f"not installed: {', '.join(lacking)}. Run `make setup` first, or, without a network, "
            "give --wheels DIR, a folder that requirements/wheelhouse.sh filled elsewhere"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Install; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check.install")
    parser.add_argument("site", type=Path)
    parser.add_argument("--wheels", default="")
    given = parser.parse_args(argv)
    return install(given.site, Path(given.wheels) if given.wheels else None)


if __name__ == "__main__":
    sys.exit(main())
