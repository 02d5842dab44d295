"""Pieces ``smoke`` and ``equality``: policies beside stock on this device, bit by bit.

``python -m benchmarks.gpu_check.equality {few,all} OUT.json [--small]``. What is trained and
compared is the tests' own (tests/integration/engine/equality_worker.py). ``few`` runs the first
case in two sizes, the second large enough that copies and kernels really overlap; ``all`` runs
every case.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.process import SOURCE_FOLDER
from launch.hosts.ranks import free_port

LARGE_WIDTH, SMALL_WIDTH = 2048, 256
"""Of the model's six layers in the second size; 25 and 0.4 million parameters."""
ALL_POLICIES = ("stride 2", "all-device", "ratio 0.5", "dynamic", "all-host")
SMALL_CASES, SMALL_POLICIES = 3, 2
_SHOWN_ERROR = 300


def few_policies(policies: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Six policies, that whose waits are the most delicate first.

    Args:
        policies: The tests' own blocks by their names.
    """
    jit = {"enabled": True, "policy": "stride", "stride": 2, "verify_every": 0}
    return {
        "stride 2, just in time": jit,
        "stride 2": {**jit, "just_in_time_forward": False},
        "dynamic": {"enabled": True, "policy": "dynamic", "verify_every": 0},
        "all-host": dict(policies["all-host"]),
        "all-device": {"enabled": True, "policy": "all-device", "verify_every": 0},
        "ratio 0.5": dict(policies["ratio 0.5"]),
    }


class Comparison:
    """Trains cases under policies and stock, and keeps what differs in a file.

    Args:
        worker: The tests' module.
        out: File that is written anew after each comparison.
    """

    def __init__(self, worker: Any, out: Path) -> None:  # noqa: ANN401 - a module of tests
        self.found: dict[str, list[str]] = {}
        self._worker = worker
        self._out = out

    def compare(self, label: str, case: Any, blocks: Mapping[str, Mapping[str, Any]]) -> None:  # noqa: ANN401
        """Train stock once and every policy once."""
        *stock, _ = self._worker.run(case, None)
        for name, block in blocks.items():
            begin = time.monotonic()
            try:
                *ours, _ = self._worker.run(case, block)
                differ = self._worker.differences(ours, stock)
            except Exception as error:  # noqa: BLE001 - the other policies go on
                differ = [f"{type(error).__name__}: {error}"[:_SHOWN_ERROR]]
            self.found[f"{label} | {name}"] = differ
            verdict = f"DIFFERS {differ[:3]}" if differ else "equal"
            _say(f"{label} | {name}: {verdict}, {time.monotonic() - begin:.1f} s")
            self._out.write_text(json.dumps(self.found, indent=1), encoding="utf-8")


def compare_few(comparison: Comparison, worker: Any, small: bool) -> None:  # noqa: ANN401
    """The first case in two sizes; in the larger one a policy repeats each update on the host."""
    blocks = few_policies(worker.POLICIES)
    case = worker.CASES[worker.FIRST_CASE]
    comparison.compare("small", case, blocks)
    cases: Any = importlib.import_module("equality_cases")
    cases.WIDTH = width = SMALL_WIDTH if small else LARGE_WIDTH
    zero = {"sub_group_size": 3 * width**2 // 2, "reduce_bucket_size": 2 * width**2}
    tiles = {name: {**block, "tile_numel": width**2 // 4} for name, block in blocks.items()}
    tiles["stride 2"]["verify_every"] = 1
    comparison.compare("large", cases.Case(zero=zero), tiles)


def compare_all(comparison: Comparison, worker: Any, small: bool) -> None:  # noqa: ANN401
    """Every case under five policies; in the small form a few of both."""
    cases = list(worker.CASES.items())[: SMALL_CASES if small else None]
    names = ALL_POLICIES[: SMALL_POLICIES if small else None]
    for label, case in cases:
        comparison.compare(label, case, {name: worker.POLICIES[name] for name in names})


def load_worker() -> Any:  # noqa: ANN401
    """The tests' module, ready to train on this device in this process alone."""
    alone = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(alone, MASTER_PORT=str(free_port()))
    sys.path.insert(0, str(SOURCE_FOLDER / "tests" / "integration" / "engine"))
    worker: Any = importlib.import_module("equality_worker")
    worker.prepare()
    return worker


def _say(line: str) -> None:
    sys.stdout.write(f"* {line}\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """Compare; returns 1 when anything differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check.equality")
    parser.add_argument("which", choices=("few", "all"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args(argv)
    worker = load_worker()
    comparison = Comparison(worker, given.out)
    with contextlib.redirect_stderr(sys.stdout):
        compare = compare_few if given.which == "few" else compare_all
        compare(comparison, worker, given.small)
    different = [key for key, found in comparison.found.items() if found]
    _say(f"{len(comparison.found)} comparisons with stock, {len(different)} differ")
    return 1 if different else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # threads of DeepSpeed's would keep the process, gloo may abort it
