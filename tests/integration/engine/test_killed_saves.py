"""Ranks that are killed at any moment around a save: what is left is whole; training goes on."""

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import prepared
import psutil
import pytest
import torch
from processes import is_alive, wait_for
from ranks import rank_environment

from launch.launchers import free_port

WORKER = Path(__file__).with_name("saving_worker.py")
ITERATIONS = 12
pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(3600)]


def train(folder, seed, victim, output):
    """Return the exit codes, and rank 0's iterations with their digests."""
    port = free_port()
    environments = [rank_environment(rank, 2, port) for rank in range(2)]
    outputs = [output.with_suffix(f".{rank}") for rank in range(2)]
    words = [WORKER, folder, ITERATIONS, seed, victim]
    codes = prepared.run(prepared.DEEPSPEED, words, environments, outputs)
    text = outputs[0].read_text()
    return codes, iterations_in(text), text


def iterations_in(text):
    return {int(number): digest for number, digest in re.findall(r"ITERATION (\d+) (\w+)", text)}


def iteration_of_latest(folder):
    """Read every file of the checkpoint that ``latest`` names; return the iteration of all."""
    if not (folder / "latest").exists():
        return None
    files = sorted((folder / (folder / "latest").read_text()).glob("*.pt"))
    assert len(files) == 4, files
    states = [torch.load(file, weights_only=False) for file in files]
    (iteration,) = {state["iteration"] for state in states if "iteration" in state}
    steps = {
        moments["step"]
        for state in states
        if "optimizer_state_dict" in state
        for moments in state["optimizer_state_dict"]["optimizer_state_dict"]["state"].values()
    }
    assert steps == {iteration + 1}
    return iteration


def test_latest_is_whole_and_training_goes_on_from_it(tmp_path):
    num_kills = int(os.environ.get("KILLS", "200"))
    codes, expected, text = train(tmp_path / "reference", 0, "nobody", tmp_path / "reference.out")
    assert codes == [0, 0], text
    assert len(expected) == ITERATIONS
    num_killed = num_resumed = 0
    for number in range(num_kills):
        folder = tmp_path / f"run{number // 4}"
        victim = ("all", "0", "1", "all")[number % 4]
        codes, found, text = train(folder, number, victim, tmp_path / f"out{number}")
        num_killed += codes != [0, 0]
        assert codes == [0, 0] or -9 in codes, text
        wrong = [it for it, digest in found.items() if expected[it] != digest]
        assert not wrong, f"kill {number}: other weights at iterations {wrong}\n{text}"
        num_resumed += bool(found) and 0 not in found
        iteration_of_latest(folder)
        if codes == [0, 0]:
            assert iteration_of_latest(folder) == ITERATIONS - 1
    assert num_killed > num_kills // 2
    assert num_resumed
    print(f"{num_killed} runs killed of {num_kills}, {num_resumed} went on from a save")


def test_ranks_whose_launcher_is_killed_leave_a_whole_checkpoint(tmp_path):
    """Torchrun is killed after a random iteration: its ranks are killed too, or go on to the end.

    Ranks that go on cannot tell each other any more that their files are whole: the store by which
    they do was the launcher's. They say so, and train on.
    """
    _, expected, _ = train(tmp_path / "reference", 0, "nobody", tmp_path / "reference.out")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for number in range(int(os.environ.get("LAUNCHER_KILLS", "8"))):
        folder, output = tmp_path / f"run{number // 4}", tmp_path / f"launched{number}"
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        words += [WORKER, folder, ITERATIONS, number, "launcher"]
        stopping, are_killed = random.Random(number).randint(1, 3), number % 4 != 2
        with output.open("w") as file:
            launcher = subprocess.Popen(
                [sys.executable, *map(str, words)], stdout=file, stderr=file, env=environment
            )
        wait_for(lambda: len(iterations_in(output.read_text())) > stopping or launcher.poll())  # noqa: B023
        assert launcher.poll() is None, output.read_text()
        ranks = psutil.Process(launcher.pid).children(recursive=True)
        assert len(ranks) >= 2
        launcher.kill()
        launcher.wait()
        for rank in ranks if are_killed else ():
            rank.send_signal(signal.SIGKILL)
        wait_for(lambda: not any(is_alive(rank.pid) for rank in ranks))  # noqa: B023
        text = output.read_text()
        found = iterations_in(text)
        assert {it: expected[it] for it in found} == found, text
        assert number % 4 == 0 or "Unable to find latest" not in text, text
        iteration_of_latest(folder)
        assert are_killed or ("cannot tell each other" in text and ITERATIONS - 1 in found), text
