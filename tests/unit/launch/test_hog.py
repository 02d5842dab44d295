import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from launch.hog import MOST_DEBT_S, Debt, main

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def start(tmp_path):
    started = []

    def begin(share, out=tmp_path / "hog.json"):
        options = ["--share", str(share), "--device", "cpu", "--out", str(out)]
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.hog", *options], cwd=ROOT, stderr=subprocess.PIPE
        )
        started.append(process)
        return process, out

    yield begin
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def processor_s(processes):
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def test_the_share_is_held_and_reported(start):
    process, out = start(0.5)
    wait_for(out.exists)
    first = json.loads(out.read_text())
    assert first == {"device": "cpu", "share_asked": 0.5, "share_held": None, "seconds": 0.0}
    everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
    before_s, began = processor_s(everyone), time.monotonic()
    time.sleep(3)
    cores = len(psutil.Process().cpu_affinity())
    seen = (processor_s(everyone) - before_s) / (time.monotonic() - began) / cores
    assert seen == pytest.approx(0.5, rel=0.15)
    process.terminate()
    assert process.wait(timeout=5) == 0
    last = json.loads(out.read_text())
    assert last["share_held"] == pytest.approx(0.5, rel=0.15)
    assert last["seconds"] > 3
    assert not any(worker.is_running() for worker in everyone[1:])


def test_a_lost_worker_ends_the_hog_by_name(start):
    process, out = start(0.05)
    wait_for(out.exists)
    psutil.Process(process.pid).children()[0].kill()
    assert process.wait(timeout=5) == 1
    assert b"[launch] hog of cpu: error: one of its workers ended" in process.stderr.read()


def test_sigterm_to_the_whole_run_still_gives_the_last_report(start):
    process, out = start(0.05)
    wait_for(out.exists)
    workers = psutil.Process(process.pid).children()
    for worker in workers:
        worker.terminate()
    time.sleep(0.3)
    process.terminate()
    assert process.wait(timeout=5) == 0
    assert json.loads(out.read_text())["seconds"] > 0.2


def test_workers_end_when_the_hog_is_killed(start):
    process, out = start(0.05)
    wait_for(out.exists)
    workers = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert alive == []


def test_a_full_disk_is_said_and_the_share_still_held(start, tmp_path):
    process, _ = start(0.05, tmp_path / "missing" / "hog.json")
    worker = None
    wait_for(lambda: psutil.Process(process.pid).children())
    (worker, *_) = psutil.Process(process.pid).children()
    time.sleep(0.5)
    assert worker.is_running()
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=5) == 0
    assert b"could not be written" in process.stderr.read()


@pytest.mark.parametrize(
    "words",
    [
        ["--share", "0", "--device", "cpu"],
        ["--share", "1", "--device", "cpu"],
        ["--share", "nan", "--device", "cpu"],
        ["--share", "0.5", "--device", "cuda"],
        ["--share", "0.5", "--device", "tpu:0"],
    ],
)
def test_wrong_words_are_refused(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main([*words, "--out", "x"])
    assert caught.value.code == 2
    assert "error" in capsys.readouterr().err


def test_work_falls_due_at_the_share_of_time():
    debt = Debt(0.25, 10.0)
    assert debt.due_s(12.0) == 0.5
    debt.pay(0.6)
    assert debt.due_s(12.0) == pytest.approx(-0.1)
    assert debt.due_s(12.4) == pytest.approx(0.0)


def test_what_was_missed_for_long_is_forgotten():
    debt = Debt(0.5, 0.0)
    assert debt.due_s(1000.0) == MOST_DEBT_S


def test_an_error_without_words_is_named(monkeypatch, tmp_path, capsys):
    def fail(*_arguments):
        raise AssertionError

    monkeypatch.setattr("launch.hog.GpuHolder", fail)
    monkeypatch.setattr(signal, "signal", lambda *_arguments: None)  # the test's own stay
    assert main(["--share", "0.5", "--device", "cuda:0", "--out", str(tmp_path / "h")]) == 1
    assert capsys.readouterr().err == "[launch] hog of cuda:0: error: AssertionError\n"
