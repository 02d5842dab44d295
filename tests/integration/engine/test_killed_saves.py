"""Ranks that are killed at any moment around a save: what is left is whole; training goes on."""

import os
import re
from pathlib import Path

import prepared
import pytest
import torch
from ranks import rank_environment

from launch.launchers import free_port

WORKER = Path(__file__).with_name("saving_worker.py")
ITERATIONS = 12
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def train(folder, seed, victim, output):
    """Return the exit codes, and rank 0's iterations with their digests."""
    port = free_port()
    environments = [rank_environment(rank, 2, port) for rank in range(2)]
    outputs = [output.with_suffix(f".{rank}") for rank in range(2)]
    words = [WORKER, folder, ITERATIONS, seed, victim]
    codes = prepared.run(prepared.DEEPSPEED, words, environments, outputs)
    text = outputs[0].read_text()
    return codes, {int(n): it for n, it in re.findall(r"ITERATION (\d+) (\w+)", text)}, text


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


@pytest.mark.parametrize(
    "num_kills",
    [5, pytest.param(int(os.environ.get("KILLS", "200")), marks=pytest.mark.exhaustive)],
)
def test_latest_is_whole_and_training_goes_on_from_it(tmp_path, num_kills):
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
