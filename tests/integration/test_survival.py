"""What becomes of a run when something goes wrong, and what is kept; processes are real."""

import json
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from fake_runs import finish, pids, run_dir, start, status
from processes import is_alive, wait_for

from launch.process.supervise import end_leftovers
from launch.process.watch import count_oom_kills

needs_a_counter = pytest.mark.skipif(
    count_oom_kills() is None, reason="needs a kernel that counts out-of-memory kills"
)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB of its own."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def small_memory():
    """A control group of 1 GiB of memory."""
    if (Path("/sys/fs/cgroup") / "cgroup.controllers").exists():
        group, limit = Path("/sys/fs/cgroup"), "memory.max"
    else:
        group, limit = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    group /= f"deep-optimizer-states-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("making a control group needs root")
    try:
        try:
            (group / limit).write_text(str(2**30))
        except OSError:
            pytest.skip("no memory controller")
        yield group
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGKILL)  # a test that fails leaves them
        wait_for(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def fill(folder):
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return


def log_text(results):
    (log,) = run_dir(results).glob("log-*.log")
    return log.read_text()


def living(pids):
    return [pid for pid in pids if is_alive(pid)]


@needs_a_counter
def test_a_killed_rank(tmp_path, sleeper):
    results = tmp_path / "r"
    process = start("hang", results)
    ranks = pids(results, 2)
    os.kill(ranks[0], signal.SIGKILL)
    code, _, err = finish(process)
    assert (code, status(results)["status"]) == (137, "failed")
    assert "killed by SIGKILL from outside (no out-of-memory kill was counted)" in err
    assert living(ranks) == []


@pytest.mark.exhaustive  # a killed sweep, in `make test`, leaves one as well
def test_a_killed_driver_leaves_a_run_that_can_be_ended(tmp_path, sleeper):
    results = tmp_path / "r"
    process = start("hang", results)
    ranks = pids(results, 2)
    process.kill()
    assert finish(process)[0] == -9
    record = status(results)
    assert record["status"] == "running"
    assert sorted(living(ranks)) == sorted(ranks)
    assert sorted(end_leftovers(record["driver"]["token"])) == sorted(ranks)
    assert living(ranks) == []


def start_slowly(how, results, *arguments):
    """Start, and stop the launcher's clock until a rank has written its iterations."""
    process = start(how, results, *arguments)
    launcher = psutil.Process(process.pid)
    # Children that come before the log are what asks for facts of the machine.
    wait_for(lambda: [*results.glob("single/*/run-001/log-*.log")] and launcher.children())
    launcher.suspend()  # a launcher that is stopped itself counts no silence
    wait_for(lambda: any(p.read_text() for p in results.glob("single/*/run-001/metrics.jsonl")))
    launcher.resume()
    return process


@pytest.mark.exhaustive
def test_a_hanging_rank_shows_where(tmp_path, sleeper):
    results = tmp_path / "r"
    code, _, _ = finish(start_slowly("stuck", results, "--hang-timeout", "25"))
    record = status(results)
    assert (code, record["status"]) == (124, "hang")
    assert "(limit 25 s) after iteration 2" in record["cause"]
    assert "in _wait_for_ever" in log_text(results)
    assert "(rank 0): state S (sleeping)" in log_text(results)
    assert (run_dir(results) / "metrics.jsonl").read_text().count("iteration_ms") == 2


@pytest.mark.exhaustive
def test_a_stopped_rank_of_two(tmp_path, sleeper):
    results = tmp_path / "r"
    code, _, _ = finish(start_slowly("stopped", results, "--dp", "2", "--hang-timeout", "25"))
    assert (code, status(results)["status"]) == (124, "hang")
    text = log_text(results)
    assert "(rank 0): state T (stopped)" in text
    assert "(rank 1): state S (sleeping)" in text
    assert "in _wait_for_ever" in text


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("host-memory", "MemoryError"),
        pytest.param(
            "allocator",
            "DefaultCPUAllocator: can't allocate memory",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_host_memory_that_runs_out(tmp_path, how, cause):
    results = tmp_path / "r"
    finish(start(how, results))
    record = status(results)
    assert (record["status"], record["exit_code"]) == ("oom-host", 1)
    assert cause in record["cause"]
    assert record["last_lines"]


def test_the_kernels_out_of_memory_killer(small_memory, tmp_path, sleeper):
    results = tmp_path / "r"

    def enter():
        (small_memory / "cgroup.procs").write_text(str(os.getpid()))

    code, _, err = finish(start("greedy", results, "--no-memory-check", enter=enter))
    assert (code, status(results)["status"]) == (137, "oom-host")
    assert "killed by the kernel's out-of-memory killer (1 counted)" in err
    assert json.loads((run_dir(results) / "run.json").read_text())["command"]


def test_a_full_disk(small_disk, tmp_path):
    results = small_disk / "r"
    code, _, err = finish(start("full", results))
    assert code == 1
    assert "Traceback" not in err
    record = status(results)
    assert record["status"] == "failed"
    assert "full" in record["cause"] or "No space left" in record["cause"]
    assert json.loads((run_dir(results) / "run.json").read_text())["command"]


def test_a_disk_that_is_full_before_the_run(small_disk):
    results = small_disk / "r"
    results.mkdir()
    for end in (".bin", ".idx"):
        (small_disk / f"data{end}").touch()
    fill(small_disk)
    code, _, err = finish(start("ok", results))
    assert (code, err.count("\n")) == (2, 1)
    assert "No space left on device" in err


def test_a_read_only_results_folder(small_disk):
    for end in (".bin", ".idx"):
        (small_disk.parent / f"data{end}").touch()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    code, _, err = finish(start("ok", small_disk))
    assert (code, err.count("\n")) == (2, 1)
    assert "Read-only file system" in err
    assert "--results-dir" in err


def test_a_hogged_run(tmp_path, sleeper):
    results = tmp_path / "r"
    code, _, err = finish(start("ok", results, "--hog-share", "0.2"))
    assert (code, err) == (0, "")
    hog = json.loads((run_dir(results) / "hog.json").read_text())
    assert (hog["device"], hog["share_asked"]) == ("cpu", 0.2)
    assert hog["share_held"] > 0


@pytest.mark.exhaustive
def test_a_hog_that_dies_fails_the_run_by_name(tmp_path, sleeper):
    results = tmp_path / "r"
    process = start("hang", results, "--hog-share", "0.05")
    ranks = pids(results, 2)
    hogs = [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "launch.hog" in child.cmdline()
    ]
    hogs[0].kill()
    code, _, err = finish(process)
    assert code != 0
    assert "the hog of cpu ended before the run did, exit code 137" in err
    assert status(results)["status"] == "failed"
    assert living([*ranks, *(hog.pid for hog in hogs)]) == []


def test_the_monitor_follows_the_run(tmp_path):
    results = tmp_path / "r"
    process = start("hang", results, "--monitor-interval", "0.1")
    pids(results, 2)
    path = run_dir(results) / "monitor.jsonl"
    wait_for(lambda: path.exists() and path.read_text().count("\n") > 10)
    process.terminate()
    finish(process)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert max(row["host_used_bytes"] for row in rows) > 2**20
    assert {row["device_id"] for row in rows} == {None}
