"""Ranks behind links of a given rate: real namespaces, whose end is the end of their processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import prepared
import pytest
from fake_runs import finish, pids, start, status
from link_worker import FIRST_ADDRESS, RUNS
from processes import python_path, wait_for
from ranks import run_ranks
from trainer_runs import write_corpus

from configs.files import ROOT
from launch.links import INTERFACE, command_behind_links, unavailable
from launch.process.supervise import end_leftovers

WORKER = ROOT / "tests" / "support" / "link_worker.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(unavailable()), reason=f"needs links: {unavailable()}"),
]
MOST_BYTES = 2**25
"""At 800 Mbit/s a third of a second, at 1 Mbit/s four and a half minutes."""


TWO_RANKS = 'LOCAL_RANK=1 "$@" & LOCAL_RANK=0 "$@" && wait $!'
"""What torchrun does here, in a shell; the ranks of the runs below are torchrun's."""


def begin(name, mbit, folder):
    starter = ["sh", "-c", TWO_RANKS, "sh", sys.executable]
    words = [str(WORKER), name, str(MOST_BYTES), str(folder)]
    return subprocess.Popen(
        command_behind_links(starter, words, mbit),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path(ROOT, ROOT / "src", WORKER.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_slow_link_passes_fewer_bytes_than_a_fast_one_beside_it(tmp_path):
    """Two runs that use the same addresses at once see nothing of each other."""
    rates = dict(zip(RUNS, (1, 800), strict=True))
    runs = [begin(name, mbit, tmp_path) for name, mbit in rates.items()]
    for run in runs:
        output, _ = run.communicate()
        assert run.returncode == 0, output
    seen = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in RUNS}
    assert 0 < seen["slow"]["kernel_bytes"] < seen["fast"]["kernel_bytes"] / 10
    for name, found in seen.items():
        assert found["peer"] == name
        assert all(f" rate {rates[name]}Mbit " in classes for classes in found["shaped"])
        assert found["gloo"] == INTERFACE
        # None of the machine's own.
        assert sorted(found["addresses"]) == [FIRST_ADDRESS, "127.0.0.1"]


def test_a_link_that_the_kernel_refuses_stops_the_rank_before_it_begins():
    starter = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable]
    done = subprocess.run(
        command_behind_links(starter, ["-c", "print('begun')"], 0),
        cwd=ROOT,
        env={**os.environ, "LOCAL_RANK": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode
    assert "rate" in done.stderr
    assert "begun" not in done.stdout


def known_namespaces():
    """Network namespaces that some process is in, or that a file stands for."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(path.stat().st_ino)
        except OSError:  # the process has ended
            continue
    mounts = Path("/proc/self/mountinfo").read_text()
    return found | {int(word[5:-1]) for word in mounts.split() if word.startswith("net:[")}


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.exhaustive), signal.SIGKILL]
)
def test_no_namespace_outlives_its_run_however_the_launcher_ends(tmp_path, number):
    """A launcher that is killed leaves ranks, which the next call of a sweep ends by their mark."""
    results = tmp_path / "r"
    words = ("--dp", "2", "--link-mbit", "20", "--share")
    process = start("hang", results, *words)
    try:
        mine = {Path(f"/proc/{pid}/ns/net").stat().st_ino for pid in pids(results, 4)}
        assert len(mine) == 2
        assert Path("/proc/self/ns/net").stat().st_ino not in mine
        process.send_signal(number)
        _, _, err = finish(process)
    finally:
        process.kill()
    if number == signal.SIGKILL:
        assert mine <= known_namespaces()
        assert end_leftovers(status(results)["driver"]["token"])
    else:
        assert "interrupted: stopped by SIGTERM" in err
    wait_for(lambda: not mine & known_namespaces())


SMALL = (
    *("--pp", "2", "--dp", "1", "--iterations", "3", "--eval-interval", "2"),
    *("--eval-iterations", "10", "--model.layers", "2", "--model.seq-length", "16"),
    *("--global-batch-size", "8", "--device", "cpu", "--dtype", "fp32", "--share"),
)


def without_links(run_dir, folder):
    """Train the same run again on the machine's own interface; its folder."""
    run = json.loads((run_dir / "run.json").read_text())
    run["point"]["link_mbit"] = 0
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(run))
    shutil.copy(run_dir / "ds_config.json", folder)
    words = ("-m", "launch.pretrain_pipeline", folder / "run.json")
    paths = python_path(ROOT, ROOT / "src")
    run_ranks(*words, num_ranks=2, modules=prepared.MEGATRON, PYTHONPATH=paths)
    return folder


def test_counted_bytes_are_the_kernels_and_links_change_no_bit(tmp_path):
    """Headers and acknowledgements come on top; an evaluation, start and end are not counted."""
    corpus = tmp_path / "data" / "corpus"
    corpus.parent.mkdir()
    write_corpus(corpus)
    command = [sys.executable, "-m", "launch.run", "tiny", "--study", "optimus-cc", *SMALL]
    command += ["--link-mbit", "80", "--results-dir", str(tmp_path), "--data-prefix", str(corpus)]
    # On one thread, as `run_ranks` has it: sums have an order.
    variables = {**os.environ, **prepared.variables(prepared.MEGATRON)}
    subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, check=True)
    (run_dir,) = tmp_path.glob("optimus-cc/single/log-*-link80-*/run-001")
    folders = (without_links(run_dir, tmp_path / "plain"), run_dir)
    plain, linked = (
        json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1]) for folder in folders
    )
    assert linked["weights_sha256"] == plain["weights_sha256"]
    assert linked["counted_sent_mib"] == plain["counted_sent_mib"] > 10
    assert "kernel_sent_mib" not in plain
    assert 1.0 < linked["kernel_sent_mib"] / linked["counted_sent_mib"] < 1.02
    (log,) = run_dir.glob("log-*-link80-*.log")
    assert log.read_text().startswith("[launch] ranks behind links of 80 Mbit/s each way")
