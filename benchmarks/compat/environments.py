"""An environment for a Python and releases of packages, made from the project's own set-up."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from benchmarks.process import SOURCE_FOLDER, explain_status, run

BUILT = Path(sys.prefix) / "compat"
"""Environments and results; ``make clean`` removes them with the environment they lie in."""
OWN_PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
_BUILD_LIMIT_S = 3600.0
_READY, _OPS = "compat-ready", "torch_extensions"
# What a Python finds packages in, its standard library left out.
_FOLDERS = (
    "import sys; own = set(sys.path); import site; site.main(); "
    "print(*[path for path in sys.path if path not in own], sep='\\n')"
)


class EnvironmentFailedError(RuntimeError):
    """An environment could not be made; the text says why."""


class IndexUnreachableError(EnvironmentFailedError):
    """Packages that it needs could not be fetched."""


@dataclass(frozen=True)
class Environment:
    """A folder with a Python and packages.

    Attributes:
        folder: A virtual environment.
        base: That whose packages it has besides its own; itself if it has them all.
        ops: Folder of compiled ops, of the DeepSpeed that it has.
    """

    folder: Path
    base: Path
    ops: Path

    @property
    def python(self) -> str:
        """The interpreter."""
        return str(self.folder / "bin" / "python")

    def variables(self) -> dict[str, str]:
        """All environment variables of a process in it."""
        programs = (self.folder / "bin", self.base / "bin", os.environ.get("PATH", ""))
        given = {
            name: text
            for name, text in os.environ.items()
            if name not in ("PYTHONPATH", "RANK", "LOCAL_RANK", "WORLD_SIZE")
        }
        return {
            **given,
            "PATH": os.pathsep.join(map(str, programs)),
            "TORCH_EXTENSIONS_DIR": str(self.ops),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
        }


def pins(python: str) -> dict[str, str]:
    """Package -> release that set-up installs for a Python.

    Args:
        python: For example ``3.12``.
    """
    files = [str(SOURCE_FOLDER / "requirements" / "run.txt")]
    script = str(SOURCE_FOLDER / "requirements" / "pins.py")
    command = [sys.executable, script, "--python", python, *files]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return dict(line.split("==") for line in lines)


def find_interpreter(python: str) -> str:
    """Path of an interpreter; empty where none is on ``PATH`` that runs.

    Args:
        python: For example ``3.12``.
    """
    path = shutil.which(f"python{python}")
    # A version manager puts programs there that say they are not installed.
    if path and not subprocess.run([path, "-c", ""], check=False, capture_output=True).returncode:
        return path
    return ""


def make(python: str, releases: dict[str, str]) -> Environment:
    """Make an environment, or take the one that was made before.

    One that was left half made by a process that was killed is made anew.

    Args:
        python: For example ``3.12``.
        releases: Package -> release; what set-up installs anyway is not laid over it.

    Raises:
        EnvironmentFailedError: A step failed; its log is named.
        IndexUnreachableError: It failed because packages could not be fetched.
    """
    BUILT.mkdir(exist_ok=True)
    with FileLock(BUILT / "lock"):
        base = _base(python)
        own = pins(python)
        others = {name: v for name, v in releases.items() if own.get(name) != v}
        if others:
            return _laid_over(base, python, others)
        return Environment(base, base, base / _OPS)


def _base(python: str) -> Path:
    """The project's own environment for a Python."""
    if python == OWN_PYTHON:
        return Path(sys.prefix)
    interpreter = find_interpreter(python)
    if not interpreter:
        raise EnvironmentFailedError(
            f"python{python} is not on PATH; install it, or add its folder"
        )
    folder = BUILT / f"python-{python}"
    relative = os.path.relpath(folder, SOURCE_FOLDER)
    command = ["make", "--no-print-directory", "setup", f"PYTHON={interpreter}"]
    _do([*command, f"VENV={relative}"], f"setup-{python}", None)
    return folder


def _laid_over(base: Path, python: str, releases: dict[str, str]) -> Environment:
    """An environment with releases of its own, and all else of another one's."""
    wanted = [f"{name}=={release}" for name, release in sorted(releases.items())]
    name = "-".join((f"python-{python}", *wanted)).replace("==", "-")
    folder = BUILT / name
    has_own_ops = "deepspeed" in releases
    made = Environment(folder, base, (folder if has_own_ops else base) / _OPS)
    ready = made.folder / _READY
    if not ready.exists():
        shutil.rmtree(made.folder, ignore_errors=True)
        program = str(base / "bin" / "python")
        _do([program, "-m", "venv", "--without-pip", str(made.folder)], f"venv-{name}", None)
        packages = next((made.folder / "lib").glob("python*/site-packages"))
        found = subprocess.run(
            [program, "-I", "-S", "-c", _FOLDERS], check=True, capture_output=True, text=True
        )
        # Not the paths alone: setuptools has a line of its own there, which brings distutils.
        lines = [f"import site; site.addsitedir({path!r})" for path in found.stdout.splitlines()]
        text = "\n".join((str(SOURCE_FOLDER / "src"), *lines, ""))
        (packages / "base.pth").write_text(text, encoding="utf-8")
        options = ("--no-deps", "--no-build-isolation", "--target", str(packages))
        pip = (program, "-m", "pip", "--disable-pip-version-check", "install", "-q", *options)
        _do([*pip, *wanted], f"pip-{name}", {**os.environ, "DS_BUILD_OPS": "0"})
        ready.touch()
    _build_ops(made, name)
    return made


def _build_ops(made: Environment, name: str) -> None:
    command = [made.python, "-m", "deep_optimizer_states.build"]
    _do(command, f"ops-{name}", made.variables())


def _do(command: list[str], name: str, variables: dict[str, str] | None) -> None:
    """Run a step; its output is kept in ``BUILT``.

    Raises:
        EnvironmentFailedError: It failed.
    """
    log = BUILT / f"{name}.log"
    status = run(command, log, _BUILD_LIMIT_S, variables or {**os.environ}, folder=SOURCE_FOLDER)
    if status != 0:
        text = log.read_text(encoding="utf-8", errors="replace")
        unreachable = re.search(
            r"No matching distribution|Failed to establish|ConnectionError", text
        )
        kind = IndexUnreachableError if unreachable else EnvironmentFailedError
        raise kind(f"{explain_status(status, _BUILD_LIMIT_S, log)} ({log})")
