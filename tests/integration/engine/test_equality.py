"""Bitwise equality with stock DeepSpeed: losses, norms, master weights, moments, 16-bit weights.

`docs/equality.md` holds the table that these runs produce; `make golden` rewrites it.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = Path(__file__).with_name("equality_worker.py")
TABLE = Path(__file__).resolve().parents[3] / "docs" / "equality.md"
ON_CUDA = torch.cuda.is_available()
RANKS = [n for n in (1, 2, 4) if not ON_CUDA or n <= torch.cuda.device_count()]
WAITS = ["GRADS_FLUSHED", "GRAD_HOME", "PREFETCHED", "STEPPED", "WEIGHTS_READY", "GRAD_READ"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """``[ranks][rank]`` -> report of that rank: ``"feature | policy"`` -> what differs."""
    return {ranks: _run(ranks, tmp_path_factory.mktemp(f"ranks{ranks}")) for ranks in RANKS}


def _run(ranks, folder):
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), str(WORKER), str(folder / "report"), str(folder)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads((folder / f"report.{rank}.json").read_text()) for rank in range(ranks)]


def comparisons(report):
    return {key: found for key, found in report.items() if not key.startswith("without | ")}


@pytest.mark.parametrize("ranks", RANKS)
def test_every_feature_under_every_policy_equals_stock(reports, ranks):
    different = {
        f"{key}, rank {rank}": found
        for rank, report in enumerate(reports[ranks])
        for key, found in comparisons(report).items()
        if found
    }
    assert different == {}


def test_nothing_was_left_out(reports):
    """Eight policies on 26 features, two engines at once, eight resumes; fewer on more ranks."""
    assert len(comparisons(reports[1][0])) == 8 + 8 * 25 + 2 + 8
    if 4 in RANKS:
        assert len(comparisons(reports[2][0])) == 8 + 3 * 24 + 2 + 8
        assert len(comparisons(reports[4][0])) == 8 + 2 + 8


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.skipif(ON_CUDA, reason="waits are left out of the emulated device")
def test_without_a_wait_the_result_differs(reports, wait):
    """Negative control: the comparison sees what it is there to see."""
    assert reports[1][0][f"without | {wait}"] != []


@pytest.mark.skipif(ON_CUDA, reason="the table in docs is of the emulated device")
def test_the_table_in_docs_is_what_the_runs_gave(reports):
    table = _table(reports)
    if os.environ.get("GOLDEN_REWRITE"):
        TABLE.write_text(table)
    assert TABLE.read_text() == table


def _table(reports):
    rows = {}
    for ranks, of_rank in reports.items():
        for key in comparisons(of_rank[0]):
            found = any(report[key] for report in of_rank)
            feature, _, policy = key.partition(" | ")
            rows.setdefault(feature, {}).setdefault(policy, []).append(
                f"**{ranks}: differs**" if found else str(ranks)
            )
    resumes = rows.pop("resume")
    policies = list(rows[next(iter(rows))])
    lines = [
        "# What equals stock DeepSpeed, bit for bit",
        "",
        "Written by `tests/integration/engine/test_equality.py` (`make golden`), on the emulated",
        "device. A number is a number of ranks on which losses, gradient norms, master weights,",
        "moments and 16-bit weights were all bitwise equal to stock ZeRO-3 offload; an empty cell",
        "was not run.",
        "",
        f"| feature | {' | '.join(policies)} |",
        f"|---|{'---|' * len(policies)}",
    ]
    for feature, cells in rows.items():
        row = " | ".join(", ".join(cells.get(policy, [])) for policy in policies)
        lines.append(f"| {feature} | {row} |")
    lines += ["", "| saved and loaded | ranks |", "|---|---|"]
    lines += [f"| {way} | {', '.join(cells)} |" for way, cells in resumes.items()]
    return "\n".join(lines) + "\n"
