"""Every feature beside stock of the DeepSpeed that is installed, each under one policy.

``make compat`` runs this with every release, and ``make gpu-check`` on a GPU.
"""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from equality_table import read

from deep_optimizer_states.adapter.guard import NEWEST
from launch.launchers import free_port

WORKER = Path(__file__).with_name("worker.py")
RANKS = [int(number) for number in os.environ.get("RELEASE_RANKS", "1").split(",")]
RELEASE = metadata.version("deepspeed")  # older ones warn while they are imported
NOT_FEATURES = {"resume", "two engines at once"}
pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(3600)]


def run_worker(num_ranks, folder):
    """Return the report of each rank; processes of their own, since a GPU allows no fork."""
    launcher = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run"]
    launcher += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    words = (WORKER, "equality", "once", folder / "report", folder)
    command = [*launcher, f"--nproc-per-node={num_ranks}", *map(str, words)]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    reports = [json.loads((folder / f"report.{rank}").read_text()) for rank in range(num_ranks)]
    return [report["equality"] for report in reports]


def features_of_the_table():
    return {feature for feature, column in read() if column == "stage"} - NOT_FEATURES


@pytest.mark.parametrize("num_ranks", RANKS)
def test_every_feature_equals_stock_of_this_release_or_is_refused(num_ranks, tmp_path):
    reports = run_worker(num_ranks, tmp_path)
    comparisons, refused = reports[0]["comparisons"], reports[0]["refused"]
    different = {key for report in reports for key, found in report["comparisons"].items() if found}
    left_out = [*reports[0]["left_out"]]
    print(
        f"\nDeepSpeed {RELEASE}, {num_ranks} ranks: {len(comparisons)} comparisons, "
        f"{len(different)} differ; {len(refused) + len(left_out)} refused"
    )
    for feature, why in {**dict.fromkeys(left_out, "not in this release"), **refused}.items():
        print(f"  refused: {feature}: {why}")
    assert different == set()
    compared = {key.partition(" | ")[0] for key in comparisons}
    absent = {*left_out, *refused}
    assert compared >= NOT_FEATURES
    assert compared.isdisjoint(absent)
    if num_ranks == 1:  # on more ranks stock itself fails with some
        assert (compared | absent) - NOT_FEATURES == features_of_the_table()
    if RELEASE == NEWEST:
        assert absent == set()
