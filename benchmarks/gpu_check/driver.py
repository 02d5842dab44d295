"""Runs the pieces: one after the other, each in time, none again that is done. Standard library."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.pieces import LEFT_OUT_STATUS, Piece, Setting
from benchmarks.process import SOURCE_FOLDER, explain_status, run

OK, FAILED, TIMEOUT, LEFT_OUT, INTERRUPTED = "ok", "failed", "timeout", "left-out", "interrupted"
STATE_FILE = "state.json"
BUILT = "built"
"""Folder of what pieces install and compile; it stays on the machine."""
_CODE = (
    "src",
    "benchmarks",
    "configs",
    "launch",
    "parse",
    "dataset",
    "requirements",
    "tests/gpu",
    "tests/integration/engine",
    "tests/support",
)
"""Folders whose files decide what a piece does."""
_CODE_ENDS = (".py", ".cpp", ".inc", ".toml", ".txt")
_GRACE_S = 10.0
_SMALL_SLACK = 5
"""Without a GPU limits are so many times longer: others may keep the cores that do everything."""
_END_S = 3.0
"""Of the time for everything, kept free for the summary."""
_MOST_LINES = 60


@dataclass(frozen=True)
class Record:
    """What became of a piece.

    Attributes:
        status: ``ok``, ``failed``, ``timeout``, ``left-out`` or ``interrupted``.
        reason: Why it is not ``ok``; empty when it is.
        seconds: How long it ran.
        key: Identifies code and machine of the run.
        lines: Of its log, for the summary.
    """

    status: str
    reason: str = ""
    seconds: float = 0.0
    key: str = ""
    lines: tuple[str, ...] = ()


class FolderError(ValueError):
    """The folder for results holds something else."""


class Check:
    """Pieces and what became of them, in a folder that outlasts the process.

    Args:
        folder: For logs, results and the state; made when it is not there.
        device: ``auto``, ``cuda`` or ``cpu``; ``auto`` takes the GPU that torch sees.
        wheels: Folder of wheels; None without one.
        seconds: For everything; infinite without a limit.
        memory_gib: Host memory to touch first; 0 for none.

    Raises:
        FolderError: The folder was not made by this command.
    """

    def __init__(
        self,
        folder: Path,
        device: str = "auto",
        wheels: Path | None = None,
        seconds: float = float("inf"),
        memory_gib: int = 0,
    ) -> None:
        self.folder = folder
        self.records: dict[str, Record] = {}
        self.now: list[str] = []
        self._state = folder / STATE_FILE
        if self._state.is_file():
            table = json.loads(self._state.read_text(encoding="utf-8"))
            self.records = {
                name: Record(**{**found, "lines": tuple(found["lines"])})
                for name, found in table.items()
                if found["status"] != LEFT_OUT  # its reason may be gone by now
            }
        elif folder.exists() and any(folder.iterdir()):
            raise FolderError(f"--folder {folder}: holds other files; give a new or empty folder")
        folder.mkdir(parents=True, exist_ok=True)
        self._device = device
        self._wheels = wheels
        self._memory_gib = memory_gib
        self._end_s = time.monotonic() + seconds - _END_S
        # The driver itself finds psutil there, once it is installed.
        sys.path.append(str(folder / BUILT / "site"))

    def run(
        self, pieces: Iterable[Piece], again: Sequence[str], after_each: Callable[[], None]
    ) -> None:
        """Run what is not done.

        Args:
            pieces: In their order.
            again: Names of pieces to run although they are done.
            after_each: Called when a piece is over, and when one is interrupted.
        """
        for piece in pieces:
            self.now.append(piece.name)
            if self._is_done(piece) and piece.name not in again:
                _say(f"{piece.name}: done before")
                continue
            try:
                self.records[piece.name] = self._run(piece)
            except KeyboardInterrupt:
                self.records[piece.name] = Record(INTERRUPTED, "interrupted")
                raise
            finally:
                self._write_state()
                after_each()

    @property
    def facts(self) -> dict[str, Any]:
        """What the piece ``facts`` found out about this machine; empty before it ran."""
        path = self.folder / "facts" / "facts.json"
        if not path.is_file():
            return {}
        table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return table

    @property
    def small(self) -> bool:
        """Whether the form for machines without a GPU is run."""
        if self._device == "auto":
            return not self.facts.get("cuda")
        return self._device == "cpu"

    @property
    def failed(self) -> list[str]:
        """Pieces of this call that failed or took too long."""
        return [n for n in self.now if self.records[n].status in (FAILED, TIMEOUT)]

    def _is_done(self, piece: Piece) -> bool:
        # The facts tell whether this is the machine that the other pieces ran on.
        if piece.name == "facts":
            return False
        record = self.records.get(piece.name)
        return record is not None and record.status == OK and record.key == self._key()

    def _run(self, piece: Piece) -> Record:
        lacking = [n for n in piece.needs if self.records.get(n, Record(LEFT_OUT)).status != OK]
        if lacking:
            return self._left_out(piece, f"{lacking[0]} did not succeed")
        left_s = self._end_s - time.monotonic()
        if left_s < piece.least_s:
            return self._left_out(piece, f"it needs {piece.least_s:.0f} s, {left_s:.0f} s are left")
        limit_s = min(piece.limit_s * (_SMALL_SLACK if self.small else 1), left_s)
        results = self._new_results(piece.name)
        site = self.folder / BUILT / "site"
        wheels = self._wheels.resolve() if self._wheels else None
        small = piece.name != "facts" and self.small
        setting = Setting(SOURCE_FOLDER, results, site, wheels, small, limit_s, self._memory_gib)
        command = [sys.executable, "-W", "ignore", *piece.arguments(setting)]
        _say(f"{piece.name}: {piece.what} (at most {limit_s:.0f} s) ...")
        log_path, begin = results / "log", time.monotonic()
        grace_s = min(_GRACE_S, limit_s / 4)
        environment = self._environment(small)
        status = run(
            command, log_path, limit_s - grace_s, environment, grace_s, folder=SOURCE_FOLDER
        )
        seconds = time.monotonic() - begin
        record = Record(
            *_judged(status, limit_s, log_path),
            round(seconds, 1),
            self._key(),
            _shown(log_path, piece.shows),
        )
        reason = f": {record.reason}" if record.reason else ""
        _say("\n".join((f"{piece.name}: {record.status}, {seconds:.0f} s{reason}", *record.lines)))
        return record

    def _left_out(self, piece: Piece, reason: str) -> Record:
        _say(f"{piece.name}: left out, {reason}")
        return Record(LEFT_OUT, reason)

    def _new_results(self, name: str) -> Path:
        """An empty folder for a piece; what an earlier run of it left there is kept beside it."""
        results = self.folder / name
        if results.exists():
            number = 1
            while (older := self.folder / f"{name}.{number}").exists():
                number += 1
            results.rename(older)
        results.mkdir()
        return results

    def _environment(self, small: bool) -> dict[str, str]:
        """Of a piece: this checkout's packages, those installed here, and no network."""
        built, environment = self.folder / BUILT, dict(os.environ)
        paths = [built / "site", *(SOURCE_FOLDER / name for name in ("src", ".", "tests/support"))]
        given = environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (*map(str, paths), given)))
        programs = (Path(sys.executable).parent, built / "site" / "bin", "/usr/local/cuda/bin")
        environment["PATH"] = os.pathsep.join((*map(str, programs), environment.get("PATH", "")))
        environment |= {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        environment["TRITON_CACHE_DIR"] = str(built / "triton")
        ready = Path(sys.prefix) / "torch_extensions"  # where `make setup` builds the ops
        extensions = ready if ready.is_dir() else built / "torch_extensions"
        environment["TORCH_EXTENSIONS_DIR"] = str(extensions)
        for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
            environment.setdefault(name, "lo")
        if small:
            environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        return environment

    def _key(self) -> str:
        """Identifies the code, the machine and the form of the run."""
        digest = hashlib.sha256(json.dumps([self.facts.get("key"), self.small]).encode())
        for path in _code_files():
            digest.update(str(path.relative_to(SOURCE_FOLDER)).encode() + b"\0")
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]

    def _write_state(self) -> None:
        table = {name: dataclasses.asdict(record) for name, record in self.records.items()}
        beside = self._state.with_suffix(".new")
        beside.write_text(json.dumps(table, indent=1), encoding="utf-8")
        beside.replace(self._state)


def _code_files() -> list[Path]:
    files = (path for name in _CODE for path in (SOURCE_FOLDER / name).rglob("*"))
    return sorted(path for path in files if path.suffix in _CODE_ENDS and path.is_file())


def _judged(status: int | None, limit_s: float, log_path: Path) -> tuple[str, str]:
    """Status and reason of a process that is over."""
    if status == 0:
        return OK, ""
    if status == LEFT_OUT_STATUS:
        lines = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return LEFT_OUT, lines[-1].removeprefix("* ") if lines else "it said nothing"
    return TIMEOUT if status is None else FAILED, explain_status(status, limit_s, log_path)


def _shown(log_path: Path, pattern: str) -> tuple[str, ...]:
    """Lines of a log for the summary, the last ones if there are many."""
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    found = [line.removeprefix("* ").rstrip() for line in lines if re.search(pattern, line)]
    return tuple(found[-_MOST_LINES:])


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
