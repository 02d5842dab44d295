"""Whether a DeepSpeed release that is not known gives stock's bits: a trial training decides.

The trial runs once for each release, state of this package and torch on a machine; its verdict is
kept in the user's cache folder. It runs in a process of its own, on the CPU and as the only rank:
the process that asks may be a rank of a job and hold a GPU already.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from deep_optimizer_states.deepspeed_guard import fingerprints_of_installed
from deep_optimizer_states.errors import UnsupportedDeepSpeedError
from deep_optimizer_states.files import write_whole

DEADLINE_S = 900.0
"""How long a trial may take, in seconds; nearly all of it is compiling DeepSpeed's cpu_adam."""

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from deep_optimizer_states.zero3.trial import main; main(sys.argv[2])"
)
_OF_A_JOB = (
    *("RANK", "LOCAL_", "WORLD_SIZE", "NODE_RANK", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_"),
    *("TORCH_NCCL_", "NCCL_", "OMPI_", "PMI", "MPI", "MV2_", "SLURM_"),
)
"""How variables begin by which a process knows that it is a rank of a job."""


@dataclass(frozen=True)
class Verdict:
    """What came out of a trial.

    Attributes:
        differences: What was not stock's; empty where all bits were.
        failure: Why the trial did not come to an end; empty where it did.
        ended_s: When that was, in seconds since 1970.
    """

    differences: list[str]
    failure: str
    ended_s: float


def check_release(version: str, problem: str, way_out: str) -> None:
    """Refuse the installed DeepSpeed unless a trial under it, made now or earlier, equals stock.

    Of the processes that ask at once, one makes the trial and the others wait for its verdict.

    Args:
        version: The installed release.
        problem: Why it is doubted.
        way_out: What else can be done.

    Raises:
        UnsupportedDeepSpeedError: Bits differ, or the trial failed, which is tried again next time.
    """
    verdict = _verdict(version)
    if verdict.failure:
        raise UnsupportedDeepSpeedError(
            f"{problem}; whether bits are stock's all the same could not be found out: "
            f"{verdict.failure}; {way_out}"
        )
    if verdict.differences:
        raise UnsupportedDeepSpeedError(
            f"{problem}; in a trial training the bits were not stock's: "
            f"{'; '.join(verdict.differences)}; {way_out}"
        )


def _verdict(version: str) -> Verdict:
    asked_s, folder = time.time(), _cache_folder()
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            return _try_release(version, Path(temporary))
    place = folder / f"release-{_key(version)}.json"
    with _one_at_a_time(place.with_suffix(".lock")) as is_alone:
        if not is_alone:
            failure = f"another process has held {place.with_suffix('.lock')} for {DEADLINE_S:g} s"
            return Verdict([], failure, time.time())
        known = _read(place)
        # A failure counts for those who waited for it, and not for the next job.
        if known is not None and (not known.failure or known.ended_s >= asked_s):
            return known
        verdict = _try_release(version, folder)
        write_whole(place, json.dumps(asdict(verdict)), overwrite=True)
        return verdict


def _read(place: Path) -> Verdict | None:
    try:
        return Verdict(**json.loads(place.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # none yet, or not one of ours
        return None


def _cache_folder() -> Path | None:
    """Where verdicts are kept; None where nothing can be written there."""
    said = os.environ.get("XDG_CACHE_HOME")
    try:
        folder = (Path(said) if said else Path.home() / ".cache") / "deep_optimizer_states"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    return folder if os.access(folder, os.W_OK) else None


def _key(version: str) -> str:
    """What a verdict holds for: DeepSpeed, this package, torch and Python."""
    import torch

    package = Path(__file__).parent
    sources = sorted(
        path for path in package.rglob("*") if path.suffix != ".pyc" and path.is_file()
    )
    own = hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()
    parts = (version, fingerprints_of_installed(), own, torch.__version__, sys.version)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _one_at_a_time(lock: Path) -> Iterator[bool]:
    """Hold a lock of this machine's processes; False if another one does not let go of it."""
    deadline_s = time.monotonic() + DEADLINE_S
    with lock.open("w") as file:
        while not (is_alone := _try_to_hold(file.fileno())) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        yield is_alone


def _try_to_hold(number: int) -> bool:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: each process makes its own trial
        return True
    return True


def _try_release(version: str, folder: Path) -> Verdict:
    from deepspeed.utils import logger

    logger.warning(
        f"deep_optimizer_states: DeepSpeed {version} is not known. A toy model is trained on the "
        "CPU to see whether bits are stock's: seconds, and some minutes before that where "
        "DeepSpeed's cpu_adam has to be compiled first"
    )
    with tempfile.TemporaryDirectory() as temporary:
        out, log = Path(temporary, "differences.json"), Path(temporary, "log")
        command = [sys.executable, "-W", "ignore", "-c", _START, json.dumps(sys.path), str(out)]
        with log.open("wb") as output:
            failure = _run(command, environment(folder), output.fileno())
        if failure:
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
            return Verdict([], f"{failure}: {' '.join(last)}", time.time())
        differences = json.loads(out.read_text(encoding="utf-8"))
    if not differences:
        logger.warning(f"deep_optimizer_states: DeepSpeed {version}: all bits were stock's")
    return Verdict(differences, "", time.time())


def environment(folder: Path) -> dict[str, str]:
    """This process's environment for a process that is the only rank of its job, on the CPU.

    Args:
        folder: Where ops may be compiled that are not a GPU job's.
    """
    from deepspeed.accelerator import get_accelerator

    kept = {key: text for key, text in os.environ.items() if not key.startswith(_OF_A_JOB)}
    kept |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    kept |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if get_accelerator().device_name() != "cpu":
        # For the CPU an op is compiled with other flags, over the one that this job needs.
        kept["TORCH_EXTENSIONS_DIR"] = str(folder / "torch_extensions")
    return kept


def _run(command: list[str], variables: dict[str, str], output: int) -> str:
    """Run a process and all that it starts; says what went wrong, or nothing."""
    process = subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        code = process.wait(DEADLINE_S)
    except BaseException as error:  # an interrupt as well: compilers must not live on
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            return f"the trial did not end within {DEADLINE_S:g} s"
        raise
    return f"the trial ended with exit code {code}" if code else ""
