"""Links of a given rate between ranks: real namespaces, whose end is the end of their processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from processes import python_path, wait_for
from trainer_runs import write_corpus

from launch.hosts import namespaces
from launch.hosts.namespaces import unavailable
from launch.process.supervise import end_leftovers

ROOT = Path(__file__).resolve().parents[2]
WORKER = ROOT / "tests" / "support" / "link_worker.py"
FAKES = ROOT / "tests" / "unit" / "launch" / "fakes"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(unavailable()), reason=f"needs links: {unavailable()}"),
]
COUNT = 2**19


def begin(folder, mbit, count):
    """Three ranks behind links, the first of which sends and receives so many bytes."""
    folder.mkdir(parents=True)
    words = [sys.executable, str(WORKER), "start", str(count), str(folder)]
    return subprocess.Popen(
        [sys.executable, "-m", namespaces.__name__, "start", str(mbit), "3", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path(ROOT, ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def seen(folder):
    return json.loads((folder / "seen.json").read_text())


def own_namespaces(folder):
    return {int(path.read_text()) for path in folder.glob("namespace-*")}


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


def test_bytes_take_as_long_as_the_links_rate_says_and_the_kernel_counts_them(tmp_path):
    """Either way, however many a rank exchanges with; and two runs that use the same addresses
    side by side see nothing of each other, nor of the other's rate.
    """
    before = set(psutil.net_if_addrs())
    slow, fast = (tmp_path / "slow", 4), (tmp_path / "fast", 4000)
    runs = [begin(folder, mbit, COUNT) for folder, mbit in (slow, fast)]
    for run in runs:
        output, _ = run.communicate()
        assert run.returncode == 0, output
    least_s = 8 * COUNT / 4e6
    # A burst goes out at once, less than a twentieth of what is sent.
    for way in ("sending_s", "receiving_s"):
        assert seen(slow[0])[way] > 0.95 * least_s
    for folder, _ in (slow, fast):
        found = seen(folder)
        assert COUNT < found["kernel_bytes"] < 1.03 * COUNT
        assert found["gloo"] == namespaces.INTERFACE
        # Of the machine's own interfaces there is none: only what the kernel puts everywhere.
        assert {"lo", namespaces.INTERFACE} <= set(found["interfaces"])
        assert not any(name.startswith(("port", "bridge")) for name in found["interfaces"])
    assert len(own_namespaces(slow[0]) | own_namespaces(fast[0])) == 6
    made = set(psutil.net_if_addrs()) - before
    assert not any(name.startswith(("port", "bridge0", namespaces.INTERFACE)) for name in made)


def test_a_failing_rank_leaves_no_namespace(tmp_path):
    run = begin(tmp_path / "run", 20, "fail")
    output, _ = run.communicate()
    assert run.returncode == 1
    assert "the rank's own words" in output
    mine = own_namespaces(tmp_path / "run")
    assert mine
    assert not mine & known_namespaces()


def test_what_the_kernel_refuses_fails_the_run_before_a_rank_starts(tmp_path):
    run = begin(tmp_path / "run", 0, 1)
    output, _ = run.communicate()
    assert run.returncode == 1
    assert "RuntimeError: tc: " in output
    assert not own_namespaces(tmp_path / "run")


def start(results, *arguments, **environment):
    command = [sys.executable, "-m", "launch.run", "tiny", "--study", "optimus-cc", *arguments]
    return subprocess.Popen(
        [*command, "--results-dir", str(results), "--device", "cpu", "--no-echo", "--share"],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_dir(results):
    (path,) = results.glob("optimus-cc/single/log-*/run-001")
    return path


def ends(results):
    lines = (run_dir(results) / "metrics.jsonl").read_text().splitlines()
    return json.loads(lines[-1])


SMALL = (
    *("--dp", "1", "--iterations", "3", "--eval-interval", "2", "--eval-iterations", "20"),
    *("--model.layers", "2", "--model.seq-length", "16", "--global-batch-size", "8"),
)


@pytest.mark.exhaustive
def test_counted_bytes_are_the_kernels_and_links_change_no_bit(tmp_path):
    """Headers and acknowledgements come on top; an evaluation, start and end are not counted."""
    corpus = tmp_path / "data" / "corpus"
    corpus.parent.mkdir()
    write_corpus(corpus)
    results = {mbit: tmp_path / f"{mbit}" for mbit in ("0", "80")}
    runs = [
        start(folder, *SMALL, "--data-prefix", str(corpus), "--link-mbit", mbit)
        for mbit, folder in results.items()
    ]
    for run in runs:
        output, _ = run.communicate()
        assert run.returncode == 0, output
    plain, linked = (ends(folder) for folder in results.values())
    assert linked["weights_sha256"] == plain["weights_sha256"]
    assert linked["counted_sent_mib"] == plain["counted_sent_mib"] > 10
    assert "kernel_sent_mib" not in plain
    assert 1.0 < linked["kernel_sent_mib"] / linked["counted_sent_mib"] < 1.02
    log = next(run_dir(results["80"]).glob("log-*-link80-*.log")).read_text()
    assert log.startswith("[launch] 2 ranks behind links of 80 Mbit/s each way")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_namespace_outlives_its_run_however_the_launcher_ends(tmp_path, number):
    """A launcher that is killed leaves ranks, which the next call of a sweep ends by their mark."""
    prefix = tmp_path / "data"
    for end in (".bin", ".idx"):
        Path(f"{prefix}{end}").touch()
    results = tmp_path / "r"
    words = ("--data-prefix", str(prefix), "--trainer-module", "fake_trainer", "--dp", "1")
    fake = {"PYTHONPATH": str(FAKES), "FAKE_TRAINER": "hang"}
    process = start(results, *words, "--link-mbit", "20", **fake)

    def ranks():
        files = list(results.glob("optimus-cc/single/log-*/run-001/pids-*"))
        pids = [file.read_text().split()[:1] for file in files]
        return [int(pid) for (pid,) in pids] if len(pids) == 2 and all(pids) else []

    try:
        pids = wait_for(ranks)
        mine = {Path(f"/proc/{pid}/ns/net").stat().st_ino for pid in pids}
        assert len(mine) == 2
        assert Path("/proc/self/ns/net").stat().st_ino not in mine
        process.send_signal(number)
        output, _ = process.communicate()
    finally:
        process.kill()
    if number == signal.SIGKILL:
        assert mine <= known_namespaces()
        status = json.loads((run_dir(results) / "status.json").read_text())
        assert end_leftovers(status["driver"]["token"])
    else:
        assert "interrupted: stopped by SIGTERM" in output
    assert not mine & known_namespaces()
