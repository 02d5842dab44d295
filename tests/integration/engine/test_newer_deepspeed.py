"""A DeepSpeed that is newer than all that are known, as a process meets it that calls install().

The newer release is the installed one with another version and one method edited.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

VERSION = "deepspeed.git_version_info_installed"
STAGES_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2"
STAGE_3 = "deepspeed.runtime.zero.stage3"
EDITS = {
    STAGES_1_AND_2: (
        "                single_grad_partition = self.single_partition_of_fp32_groups[i].grad\n",
        "                single_grad_partition.clamp_(-1e-3, 1e-3)\n",
    ),
    STAGE_3: (
        "                    total_norm += param_norm**2\n",
        "                    # edited\n",
    ),
}
"""Module -> a line of ``step`` or of the norm, and what follows it in the edited copy."""

FINDER = """
import importlib.abc, importlib.util, sys

class Edited(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        place = {places!r}.get(name)
        return place and importlib.util.spec_from_file_location(name, place)

sys.meta_path.insert(0, Edited())
"""

PROGRAM = """
import json, os, sys
import deep_optimizer_states as plugin

plugin.install()

import cpuinfo, deepspeed, deepspeed.ops, functools, torch

cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
deepspeed.init_distributed("gloo")
found = {}
for stage in (1, 2, 3):
    torch.manual_seed(3)
    net = torch.nn.Linear(8, 8)
    config = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "deep_optimizer_states": {"enabled": True},
    }
    try:
        words = {"model": net, "model_parameters": net.parameters(), "config": config}
        engine, *_ = deepspeed.initialize(**words)
    except plugin.UnsupportedDeepSpeedError as error:
        found[stage] = str(error)
        continue
    engine.backward(engine(torch.ones(1, 8, dtype=torch.bfloat16)).square().mean())
    engine.step()
    found[stage] = type(engine.optimizer).__name__
print("found", json.dumps(found), flush=True)
os._exit(0)  # gloo now and then aborts while the interpreter is torn down
"""


def source_of(module):
    return Path(importlib.util.find_spec(module).origin).read_text()


@pytest.fixture
def train(tmp_path):
    """Train a step at every stage under DeepSpeed 0.20.0, with edited copies of modules."""

    def run(*modules, **variables):
        places = {VERSION: tmp_path / "version.py"}
        places[VERSION].write_text(source_of(VERSION) + "\nversion = '0.20.0'\n")
        for module in modules:
            source, (line, more) = source_of(module), EDITS[module]
            assert source.count(line) == 1
            places[module] = tmp_path / f"{module}.py"
            places[module].write_text(source.replace(line, line + more))
        named = {name: str(place) for name, place in places.items()}
        (tmp_path / "sitecustomize.py").write_text(FINDER.format(places=named))
        job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PROGRAM],
            env={**os.environ, **job, "PYTHONPATH": str(tmp_path), **variables},
            capture_output=True,
            text=True,
        )

    return run


def found_by(done):
    """Stage -> the optimizer's class, or why there is none."""
    lines = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(lines[0].removeprefix("found "))


FLAT, OURS = "InterleavedFlatOptimizer", "InterleavedZeroOptimizer"


@pytest.mark.parametrize(
    ("edited", "classes"),
    [(STAGES_1_AND_2, {"3": OURS}), (STAGE_3, {"1": FLAT, "2": FLAT})],
    ids=["stages 1 and 2", "stage 3"],
)
def test_stages_with_an_edited_method_are_refused_and_the_others_train(train, edited, classes):
    done = train(edited)
    found = found_by(done)
    assert found.items() >= classes.items()
    refused = found.keys() - classes.keys()
    for stage in refused:
        assert found[stage].startswith(
            f"DeepSpeed 0.20.0 at zero_optimization.stage = {stage}: it is newer than "
        )
        assert "DeepSpeedZeroOptimizer" in found[stage]
    assert refused == {"1", "2", "3"} - classes.keys()
    assert done.stdout.count("refused: other code in ") == 1
    assert done.stdout.count("taken: nothing differs from ") == 1


def test_what_is_refused_at_every_stage_trains_where_that_is_allowed(train):
    refused = train(*EDITS)
    assert refused.returncode == 1
    assert refused.stderr.count("refused: other code in ") == 2
    taken = train(*EDITS, DEEP_OPTIMIZER_STATES_ALLOW_UNVERIFIED="1")
    assert found_by(taken) == {"1": FLAT, "2": FLAT, "3": OURS}
    assert taken.stdout.count("BITS MAY NOT BE STOCK'S") == 2
    uses = "this engine uses the plugin (DeepSpeed 0.20.0, ZeRO stage"
    assert [taken.stdout.count(f"{uses} {stage}): policy ") for stage in (1, 2, 3)] == [1, 1, 1]
