"""``python -m benchmarks.memory``: measure peaks of memory and print them beside predicted ones.

measure FILE   every case that FILE has no result of, each in a process of its own; goes on
               where it was stopped
table [FILE]   predicted beside measured, case by case
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.process import SOURCE_FOLDER
from configs.cli import Parser, run_command, say
from configs.errors import ConfigError
from deep_optimizer_states.predict.huggingface import model_of_config
from deep_optimizer_states.predict.memory import CPU_PROCESS_BYTES, peaks_of
from deep_optimizer_states.predict.model import Model
from deep_optimizer_states.predict.workload import workload_of_json
from deep_optimizer_states.units import MIB
from launch.launchers import free_port

FOLDER = Path(__file__).parent
MEASURED = FOLDER / "measured.jsonl"
"""Results that the figures of docs/prediction.md come from."""
PHASES = ("load", "train", "save")
LIMIT_S = 600
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_TOP_PAD_": "65536",
}
"""glibc gives every array back to the kernel when it is freed, as a GPU's allocator counts them.

By itself it keeps arrays of up to 32 MiB in a heap that is hardly ever given back.
"""
Case = dict[str, Any]


@functools.cache
def load_cases() -> dict[str, list[Case]]:
    """Return the cases of ``cases.toml`` by set (``fitted``, ``judged``), every field filled."""
    table = tomllib.loads((FOLDER / "cases.toml").read_text(encoding="utf-8"))
    found = {}
    for name in ("fitted", "judged"):
        cases = [{**table["defaults"], **case} for case in table[name]]
        found[name] = [{**case, "sizes": table["models"][case["model"]]} for case in cases]
    return found


def key_of(case: Case) -> str:
    """Return what names a case among results; it changes with anything of the case."""
    return hashlib.sha256(json.dumps(case, sort_keys=True).encode()).hexdigest()[:16]


def name_of(case: Case) -> str:
    """Return a case in words, as the table shows it."""
    parts = [case["model"], f"zero{case['stage']}"]
    parts += [] if case["offload"] == "none" else [f"offload {case['offload']}"]
    parts += [f"{case['engine']} {case['policy']}"] if case["engine"] != "stock" else []
    parts += [case["dtype"], f"{case['micro_batch']} x {case['sequence']}"]
    parts += ["checkpointing"] if case["checkpointing"] else []
    parts += ["eager"] if case["attention"] == "eager" else []
    parts += [f"accumulation {case['accumulation']}"] if case["accumulation"] > 1 else []
    parts += [f"{case['ranks']} ranks"] if case["ranks"] > 1 else []
    return ", ".join([*parts, *(f"{name} {value:,}" for name, value in case["zero"].items())])


def ds_config_of(case: Case) -> dict[str, Any]:
    """Return DeepSpeed's JSON of a case."""
    zero: dict[str, Any] = {"stage": case["stage"], **case["zero"]}
    if case["offload"] in ("optimizer", "both"):
        zero["offload_optimizer"] = {"device": "cpu"}
    if case["offload"] == "both":
        zero["offload_param"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case["micro_batch"],
        "gradient_accumulation_steps": case["accumulation"],
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": zero,
    }
    if case["dtype"] != "fp32":
        config[case["dtype"]] = {"enabled": True}
    if case["engine"] == "ours":
        config["deep_optimizer_states"] = {"enabled": True, "policy": case["policy"]}
    return config


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Return the results so far by the key of their case."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {found["key"]: found for found in map(json.loads, lines)}


def measure(cases: Sequence[Case], path: Path, allocator: Mapping[str, str] = ALLOCATOR) -> int:
    """Measure the cases that have no result yet; returns how many failed.

    Args:
        cases: What to measure.
        path: Where results are, one a line.
        allocator: Environment variables of glibc's allocator; none for its own ways.
    """
    failed = 0
    for case in cases:
        if key_of(case) in read_results(path):
            continue
        result = run(case, allocator)
        say(f"{name_of(case)}: {result.get('error', 'ok')}")
        if "error" in result:
            failed += 1
            continue
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key_of(case), "name": name_of(case), **result}) + "\n")
    return failed


def run(case: Case, allocator: Mapping[str, str]) -> dict[str, Any]:
    """Return the peaks of a case, of the rank that needed most; or ``error``, its last line."""
    case = {**case, "ds_config": ds_config_of(case)}
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        processes = [
            _start(case, folder, rank, {**allocator, "MASTER_PORT": str(port)})
            for rank in range(case["ranks"])
        ]
        try:
            for process in processes:
                process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {LIMIT_S} s"}
        finally:
            for process in processes:
                process.kill()
                process.wait()
        found = [json.loads(path.read_text()) for path in folder.glob("peaks-*")]
        if len(found) < case["ranks"]:
            log = (folder / "log-0").read_text(encoding="utf-8", errors="replace")
            return {"error": (log.strip().splitlines() or ["no output"])[-1][-300:]}
        return max(found, key=lambda item: int(item["train_bytes"]))


def _start(
    case: Case, folder: Path, rank: int, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    environment = {
        "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions"),
        **os.environ,
        **variables,
        "PATH": os.pathsep.join((str(Path(sys.prefix) / "bin"), os.environ["PATH"])),
        "PYTHONPATH": str(SOURCE_FOLDER),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": str(case["ranks"]),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
    }
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.memory.rank", json.dumps(case)]
    with (folder / f"log-{rank}").open("wb") as log:
        return subprocess.Popen(
            [*command, str(folder / f"peaks-{rank}")],
            env=environment,
            cwd=SOURCE_FOLDER,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


@dataclass(frozen=True)
class Row:
    """A case that was measured: bytes above the process's own, by phase."""

    name: str
    measured: Mapping[str, float]
    predicted: Mapping[str, float]

    def error(self, phase: str) -> float:
        """Return the relative error of a prediction; below 0 where it was too little."""
        return self.predicted[phase] / self.measured[phase] - 1


@functools.cache
def _model(name: str, sizes: str) -> Model:
    return model_of_config(json.loads(sizes), name)


def rows_of(name: str, path: Path) -> list[Row]:
    """Return the cases of a set (``fitted``, ``judged``) that have a result, in their order."""
    results, found = read_results(path), []
    for case in load_cases()[name]:
        result = results.get(key_of(case))
        if result is None:
            continue
        workload = workload_of_json(
            ds_config_of(case),
            _model(case["model"], json.dumps(case["sizes"])),
            dp=case["ranks"],
            sequence_length=case["sequence"],
            activation_checkpointing=case["checkpointing"],
            materialized_attention=case["attention"] != "sdpa",
        )
        peaks = peaks_of(workload, has_gpu=False)
        measured = {phase: float(result[f"{phase}_bytes"]) for phase in PHASES}
        predicted = {
            phase: getattr(peaks, phase).host_bytes - CPU_PROCESS_BYTES for phase in PHASES
        }
        found.append(Row(name_of(case), measured, predicted))
    return found


def as_markdown(rows: Sequence[Row]) -> str:
    """Return a table of errors by phase, and one of MiB by case."""
    lines = ["| phase | cases | median error | most under | most over |"]
    lines += ["|---|---:|---:|---:|---:|"]
    for phase in PHASES if rows else ():
        errors = [row.error(phase) for row in rows]
        lines.append(
            f"| {phase} | {len(errors)} | {median(map(abs, errors)):.1%} | "
            f"{min(*errors, 0.0):+.1%} | {max(*errors, 0.0):+.1%} |"
        )
    lines += ["", "| case | load | train | save |", "|---|---:|---:|---:|"]
    for row in rows:
        cells = (
            f"{row.predicted[phase] / MIB:.0f} / {row.measured[phase] / MIB:.0f} "
            f"({row.error(phase):+.1%})"
            for phase in PHASES
        )
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def has_models() -> bool:
    """Return whether the package is installed whose models are measured."""
    return importlib.util.find_spec("transformers") is not None


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns 1 if a case could not be measured.

    Raises:
        ConfigError: The package lacks that has the models.
    """
    parser = Parser("python -m benchmarks.memory", __doc__ or "")
    parser.add_argument("command", choices=("measure", "table"))
    parser.add_argument("file", type=Path, nargs="?", default=MEASURED)
    text = "measure with the C library's allocator as it is by itself"
    parser.add_argument("--own-allocator", action="store_true", help=text)
    given = parser.read(argv)
    if not has_models():
        raise ConfigError("needs transformers, which is not installed: run `make setup-tests`")
    if given.command == "measure":
        cases = [case for cases in load_cases().values() for case in cases]
        return int(bool(measure(cases, given.file, {} if given.own_allocator else ALLOCATOR)))
    for name in ("judged", "fitted"):
        rows = rows_of(name, given.file)
        say(f"## {name}: {len(rows)} cases\n\n{as_markdown(rows)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_command(main))
