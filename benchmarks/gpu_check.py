"""Run first on a machine with a GPU: ``make gpu-check ARGS="[PART ...]"``.

Each part is a process group of its own with a time limit, and one that fails costs no other. Their
logs, and one summary of all calls, lie in a folder. Without a GPU every part runs as far as a CPU
can take it, and the summary says so. Standard library alone: packages that lack are installed from
a folder of wheels, without a network.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path

from benchmarks.process import SOURCE_FOLDER, explain_status, run
from configs.cli import Parser, complain, duration, run_command, say
from configs.errors import ConfigError

BUILT = SOURCE_FOLDER / "build" / "gpu-check"
"""Folder of what is compiled and, in ``SITE``, installed where `make setup` did neither."""
SITE = BUILT / "site"
NEEDED = (
    *("torch", "deepspeed", "megatron-core", "numpy", "psutil", "pydantic", "tokenizers"),
    "tiktoken",
)
"""Packages that every part needs."""
FOR_TESTS = ("pytest", "pytest-timeout", "hypothesis")
"""Those that a part of tests needs too, which `make setup-tests` installs."""
_FOR_REPORTS = ("pandas", "matplotlib", "scipy")
MINUTES = 7.5
EXIT_FAILED = 1
GRACE_S = 10.0
_SLOWER_ON_A_CPU = 4
_MOST_LINES = 40
FACTS = """
import json, os, platform, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
words = [f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU", f"{os.cpu_count()} CPUs"]
words += [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
print(json.dumps([bool(gpus), ", ".join(words)]))
"""


@dataclass(frozen=True)
class Part:
    """One thing to run.

    Attributes:
        limit_s: seconds after which it is ended, four times as many on a CPU.
        words: Python's arguments, in which ``{folder}`` is filled in.
        without_gpu: what a machine without a GPU shows.
        shows: matches the lines of the log that belong in the summary.
    """

    limit_s: float
    words: Sequence[str]
    without_gpu: str
    shows: str


# Other packages than the pinned ones may warn, which is no fault of what is tested.
_PYTEST = ("-m", "pytest", "-q", "-o", "filterwarnings=default", "-p", "no:cacheprovider")
_BUILD = ("-m", "deep_optimizer_states.build")
_CALIBRATE = ("-m", "deep_optimizer_states", "calibrate", "--force")
_SWEEP = ("-m", "launch.sweep", "--study", "peers", "--sweep", "gpu")
PARTS = {
    "build": Part(300, _BUILD, "the CPU's kernels", "equal to DeepSpeedCPUAdam"),
    "tests": Part(
        500,
        (*_PYTEST, "-rs", "--timeout", "400", "tests/gpu"),
        "every test needs a GPU and was skipped",
        r"^(FAILED|ERROR)|\d (passed|failed|skipped|error)",
    ),
    "calibrate": Part(
        150,
        (*_CALIBRATE, "-o", "{folder}/machine.toml"),
        "rates of the CPU and its memory alone",
        r"^  \S+_per_s: |^  \d+ thread|rates in|^warning: ",
    ),
    "equality": Part(
        570,
        (*_PYTEST, "-s", "tests/integration/engine/test_release.py"),
        "the emulated device in place of a GPU",
        r"^DeepSpeed |^  refused|^(FAILED|ERROR)|^E  |\d (passed|failed)",
    ),
    "peers": Part(
        580,
        (*_SWEEP, "--results-dir", "{folder}/results"),
        "the sweep's small form, without the rows that need a GPU",
        r"^\[\d+/\d+\] (?!.*: start)|equal to|differ|not compared|^report ",
    ),
}


@dataclass(frozen=True)
class Outcome:
    """Why a part failed, if it did, how long it took, when it ended, and lines of its log."""

    on_gpu: bool
    reason: str
    seconds: float
    ended: str
    lines: Sequence[str]


def run_part(
    name: str, folder: Path, on_gpu: bool, minutes: float = MINUTES, model: str = ""
) -> Outcome:
    """Run a part within its time, into ``folder/NAME.log``; the last two are the sweep's."""
    part, log = PARTS[name], folder / f"{name}.log"
    words, limit_s = [word.format(folder=folder) for word in part.words], part.limit_s
    if name == "peers":
        limit_s += 60 * (minutes - MINUTES)
        words += ["--minutes", f"{minutes:g}", *(["--model", model] if model else [])]
        words += [] if all(map(importlib.util.find_spec, _FOR_REPORTS)) else ["--no-report"]
    limit_s *= 1 if on_gpu else _SLOWER_ON_A_CPU
    _say(f"{name}: at most {limit_s:.0f} s ...")
    begin = time.monotonic()
    command = [sys.executable, "-W", "ignore", *words]
    variables, within_s = _environment(on_gpu), limit_s - GRACE_S
    status = run(command, log, within_s, variables, GRACE_S, folder=SOURCE_FOLDER)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    shown = [line.rstrip() for line in lines if re.search(part.shows, line)][-_MOST_LINES:]
    if reason := "" if status == 0 else explain_status(status, limit_s, log):
        shown += [f"| {line}" for line in lines[-12:]]
    ended = datetime.now(UTC).isoformat(sep=" ", timespec="seconds")
    return Outcome(on_gpu, reason, round(time.monotonic() - begin), ended, shown)


def _environment(on_gpu: bool) -> dict[str, str]:
    """Return the environment of a part: this checkout's packages, and no network."""
    environment = dict(os.environ)
    folders = (SITE, *(SOURCE_FOLDER / name for name in ("src", ".", "tests/support")))
    given = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (*map(str, folders), given)))
    programs = (Path(sys.executable).parent, SITE / "bin", "/usr/local/cuda/bin")
    environment["PATH"] = os.pathsep.join((*map(str, programs), environment.get("PATH", "")))
    ready = Path(sys.prefix) / "torch_extensions"  # where `make setup` builds the ops
    extensions = ready if ready.is_dir() else BUILT / "torch_extensions"
    environment |= {"TORCH_EXTENSIONS_DIR": str(extensions), "HF_HUB_OFFLINE": "1"}
    environment |= {"TRITON_CACHE_DIR": str(BUILT / "triton"), "PYTHONUNBUFFERED": "1"}
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        environment.setdefault(name, "lo")
    if not on_gpu:
        environment |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    return environment


def needed_by(names: Sequence[str]) -> tuple[str, ...]:
    """Return the packages that some parts need."""
    has_tests = any("pytest" in PARTS[name].words for name in names)
    return (*NEEDED, *(FOR_TESTS if has_tests else ()))


def install_what_lacks(needed: Sequence[str], wheels: Path) -> list[str]:
    """Install from a folder of wheels, beside the packages there are; returns what still lacks.

    What the machine has is kept as it is, since whoever put it there matched it to its torch.
    """
    if not _lacking(needed):
        return []
    # A wheel's name begins with its package's, in which dashes have become underscores.
    found = {path: path.name.split("-")[0].replace("_", "-") for path in wheels.glob("*.whl")}
    missing = [str(path) for path, name in sorted(found.items()) if _lacking([name])]
    if missing:
        _say(f"installing {len(missing)} packages from {wheels}")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        options = ["--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(SITE)]
        subprocess.run([*pip, *options, *missing], check=True)
    return _lacking(needed)


def _lacking(packages: Sequence[str]) -> list[str]:
    names = {each.name.lower().replace("_", "-") for each in metadata.distributions()}
    return [package for package in packages if package.lower() not in names]


def write_summary(folder: Path, machine: str, on_gpu: bool, outcomes: dict[str, Outcome]) -> None:
    """Write all outcomes as ``summary.json``, and as ``summary.txt`` for people."""
    lines = [f"gpu-check: {machine}"]
    if not on_gpu:
        lines.append("NO GPU HERE: what runs on the CPU says nothing of a GPU")
    for name in [name for name in PARTS if name in outcomes]:
        found = outcomes[name]
        note = "" if found.on_gpu else f" (without a GPU: {PARTS[name].without_gpu})"
        word = f"FAILED: {found.reason}" if found.reason else "ok"
        lines += ["", f"{name}: {word}, {found.seconds:.0f} s, {found.ended}{note}"]
        lines += [f"    {line}" for line in found.lines]
    if not_run := [name for name in PARTS if name not in outcomes]:
        lines += ["", f"not run: {', '.join(not_run)}"]
    table = {name: asdict(found) for name, found in outcomes.items()}
    (folder / "summary.json").write_text(json.dumps(table, indent=1), encoding="utf-8")
    (folder / "summary.txt").write_text("\n".join((*lines, "")), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run parts; returns 0, or 1 when one failed.

    Raises:
        ConfigError: There is no such part, or a package lacks.
    """
    given = _parser().read(argv)
    if unknown := [name for name in given.parts if name not in PARTS]:
        raise ConfigError(f"unknown part '{unknown[0]}'; known: {', '.join(PARTS)}")
    names = [name for name in PARTS if name in ("build", *given.parts) or not given.parts]
    folder = given.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    sys.path.append(str(SITE))
    if lacking := install_what_lacks(needed_by(names), given.wheels):
        target = "setup" if set(lacking).isdisjoint(FOR_TESTS) else "setup-tests"
        raise ConfigError(
            f"not installed: {', '.join(lacking)}; run `make {target}`, or, on a machine without a "
            f"network, copy a folder of wheels to {given.wheels} "
            '(`make wheelhouse ARGS="wheelhouse --lean"` fills one where there is a network)'
        )
    on_gpu, machine = json.loads(subprocess.check_output([sys.executable, "-c", FACTS]))
    kept = folder / "summary.json"
    table = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    outcomes = {name: Outcome(**found) for name, found in table.items()}
    for name in names:
        outcomes[name] = run_part(name, folder, on_gpu, given.minutes, given.model)
        _say(f"{name}: {outcomes[name].reason or 'ok'}")
        write_summary(folder, machine, on_gpu, outcomes)
        if given.out:
            _copy(folder, given.out)
    say("\n" + (folder / "summary.txt").read_text(encoding="utf-8").rstrip())
    return EXIT_FAILED if any(outcomes[name].reason for name in names) else 0


def _copy(folder: Path, out: Path) -> None:
    """Copy what a person reads, eight files at most, into a folder that outlasts the machine."""
    out.mkdir(parents=True, exist_ok=True)
    for pattern in ("summary.txt", "machine.toml", "*.log", "results/*/*/report.html"):
        for path in folder.glob(pattern):
            shutil.copy(path, out)


def _say(text: str) -> None:
    complain(f"gpu-check: {text}")


def _parser() -> Parser:
    text = "Run what only a machine with a GPU can show, and sum it up."
    parser = Parser("python -m benchmarks.gpu_check", text)
    add, names = parser.add_argument, ", ".join(PARTS)
    add("parts", nargs="*", metavar="PART", help=f"{names} [all of them]")
    add("--folder", type=Path, default=Path("gpu-check"), help="logs and results [gpu-check]")
    add("--wheels", type=Path, default=Path("wheelhouse"), help="what lacks [wheelhouse]")
    largest = "what the sweep trains [the largest that stock can]"
    add("--model", default="", metavar="NAME", help=largest)
    last = f"start no run of the sweep after so many [{MINUTES:g}]"
    minutes = partial(duration, "minutes")
    add("--minutes", type=minutes, default=MINUTES, metavar="N", help=last)
    add("--out", type=Path, help="copy summary, logs, rates and report there as well")
    return parser


if __name__ == "__main__":
    raise SystemExit(run_command(main))
