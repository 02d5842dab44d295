"""One trial for all who ask at once, and whose verdict is kept for whom."""

import fcntl
import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from deep_optimizer_states import release_check
from deep_optimizer_states.errors import UnsupportedDeepSpeedError
from deep_optimizer_states.release_check import Verdict, check_release
from deep_optimizer_states.zero3.trial import _Result, differences

PROBLEM, WAY_OUT = "it differs in Stage3.step", "install another"


@pytest.fixture
def trials(tmp_path, monkeypatch):
    """Verdicts that trials will end with, and the releases of those made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    class Trials:
        def __init__(self):
            self.made, self.verdict, self.lasts_s = [], ([], ""), 0.0

        def make(self, version, folder):
            self.made.append(version)
            time.sleep(self.lasts_s)
            return Verdict(*self.verdict, time.time())

    trials = Trials()
    monkeypatch.setattr(release_check, "_try_release", trials.make)
    return trials


def check(version="0.99.0"):
    check_release(version, PROBLEM, WAY_OUT)


def test_a_verdict_is_kept_for_its_release(trials):
    check()
    check()
    assert trials.made == ["0.99.0"]
    check("0.99.1")
    assert trials.made == ["0.99.0", "0.99.1"]


@pytest.mark.parametrize("what", ["a method", "this package", "torch"])
def test_a_verdict_is_of_one_state_of_everything(trials, monkeypatch, tmp_path, what):
    check()
    if what == "a method":
        monkeypatch.setattr(release_check, "fingerprints_of_installed", lambda: {"other": {}})
    elif what == "torch":
        monkeypatch.setattr(torch, "__version__", "3.0")
    else:
        (tmp_path / "own.py").write_text("")
        monkeypatch.setattr(release_check, "__file__", str(tmp_path / "own.py"))
    check()
    assert len(trials.made) == 2


def test_other_bits_are_refused_for_good_and_named(trials):
    trials.verdict = (["bf16, policy dynamic: losses"], "")
    for _ in range(2):
        with pytest.raises(UnsupportedDeepSpeedError) as caught:
            check()
        for text in (PROBLEM, "bits were not stock's: bf16, policy dynamic: losses", WAY_OUT):
            assert text in str(caught.value)
    assert len(trials.made) == 1


def test_a_trial_that_failed_is_made_again_by_the_next_job(trials):
    trials.verdict = ([], "the trial ended with exit code 1: no compiler")
    with pytest.raises(UnsupportedDeepSpeedError, match="not be found out: the trial ended with"):
        check()
    trials.verdict = ([], "")
    check()
    assert len(trials.made) == 2


@pytest.mark.parametrize("failure", ["", "no compiler"])
def test_of_those_who_ask_at_once_one_makes_the_trial(trials, failure):
    trials.verdict, trials.lasts_s = ([], failure), 1.0
    refused = []

    def ask():
        try:
            check()
        except UnsupportedDeepSpeedError as error:
            refused.append(error)

    askers = [threading.Thread(target=ask) for _ in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    assert len(trials.made) == 1
    assert len(refused) == (4 if failure else 0)


def test_who_waits_too_long_says_for_what(trials, monkeypatch, tmp_path):
    monkeypatch.setattr(release_check, "DEADLINE_S", 0.2)
    monkeypatch.setattr(release_check, "_key", lambda version: "key")
    folder = tmp_path / "cache" / "deep_optimizer_states"
    folder.mkdir(parents=True)
    with (folder / "release-key.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(UnsupportedDeepSpeedError, match=r"has held .*release-key\.lock for 0"):
            check()
    assert not trials.made
    check()
    assert len(trials.made) == 1


@pytest.mark.parametrize("damaged", ["", "{", "[]", '{"other": 1}'])
def test_a_damaged_verdict_is_none(trials, monkeypatch, tmp_path, damaged):
    monkeypatch.setattr(release_check, "_key", lambda version: "key")
    folder = tmp_path / "cache" / "deep_optimizer_states"
    folder.mkdir(parents=True)
    (folder / "release-key.json").write_text(damaged)
    check()
    assert len(trials.made) == 1
    assert json.loads((folder / "release-key.json").read_text())["differences"] == []


def test_without_a_cache_folder_each_process_makes_its_own_trial(trials, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    check()
    check()
    assert len(trials.made) == 2


def test_a_trial_knows_nothing_of_the_job_that_it_is_made_in(monkeypatch, tmp_path):
    of_the_job = (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"),
        *("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "PMI_RANK"),
    )
    for name in of_the_job:
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("MINE", "kept")
    found = release_check.environment(tmp_path)
    left = {name: found[name] for name in of_the_job if name in found}
    assert left == {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    assert (found["DS_ACCELERATOR"], found["CUDA_VISIBLE_DEVICES"]) == ("cpu", "")
    assert found["MINE"] == "kept"
    assert found.get("TORCH_EXTENSIONS_DIR") == os.environ.get("TORCH_EXTENSIONS_DIR")


def test_a_job_on_a_gpu_keeps_its_compiled_ops(monkeypatch, tmp_path):
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(type(get_accelerator()), "device_name", lambda self, index=None: "cuda")
    found = release_check.environment(tmp_path)
    assert found["TORCH_EXTENSIONS_DIR"] == str(tmp_path / "torch_extensions")


def test_a_trial_that_fails_leaves_its_last_lines(monkeypatch, tmp_path):
    monkeypatch.setattr(release_check, "_START", "raise SystemExit('no compiler was found')")
    verdict = release_check._try_release("0.99.0", tmp_path)
    assert verdict.failure == "the trial ended with exit code 1: no compiler was found"


def test_a_trial_that_does_not_end_is_ended_with_all_that_it_started(monkeypatch, tmp_path):
    monkeypatch.setattr(release_check, "DEADLINE_S", 1.0)
    pid = tmp_path / "pid"
    script = f"sleep 1000 & echo $! > {pid}.part; mv {pid}.part {pid}; wait"
    with (tmp_path / "log").open("wb") as log:
        failure = release_check._run(["/bin/sh", "-c", script], dict(os.environ), log.fileno())
    assert failure == "the trial did not end within 1 s"
    number = int(pid.read_text())
    deadline_s = time.monotonic() + 60
    while _is_alive(number):
        assert time.monotonic() < deadline_s, "what the trial started lives on"
        time.sleep(0.05)


def _is_alive(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def result(**changes):
    state = {"master weights of subgroup 0": torch.ones(3)}
    made = {"optimizer": "InterleavedZeroOptimizer", "losses": [1.0], "norms": [2.0]}
    return _Result(**{**made, "state": state, **changes})


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ({}, []),
        ({"losses": [1.5]}, ["losses"]),
        ({"norms": [2.5]}, ["norms"]),
        (
            {"state": {"master weights of subgroup 0": torch.zeros(3)}},
            ["master weights of subgroup 0 (1 of 1 tensors)"],
        ),
        ({"state": {}}, ["master weights of subgroup 0 (1 of 1 tensors)"]),
        ({"optimizer": "Stock"}, ["the optimizer is Stock"]),
    ],
)
def test_a_trial_says_what_differs(ours, said):
    assert differences(result(**ours), result()) == said
