"""Switch the plugin on in DeepSpeed's own tests, and note what they do.

A plugin of pytest; the ranks of a test are forked from a server, which imports it first.
"""

import functools
import gc
import hashlib
import json
import multiprocessing
import os
import random
import re
import sys
from pathlib import Path

import cpuinfo
import deepspeed
import numpy
import pytest
import torch
import torch._inductor.lowering  # ranks would import it, each for a second
import torch.distributed.tensor
import unit.util
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from gathers import wait_for_every_gather
from packaging.version import Version
from torch.nn.parallel import DistributedDataParallel
from unit.common import DistributedExec

BLOCK = {"enabled": True, "policy": "dynamic", "tile_numel": 64}  # most models are tiny
MAX_TILES = 256
TASK = json.loads(os.environ["DEEPSPEED_SUITE"])
"""The files ``notes`` and ``results``; whether to ``plugin``, and to ``add`` an offload."""
ENGINES = []

multiprocessing.set_forkserver_preload([__name__])
# The server does once what every rank would do again.
cpuinfo.get_cpu_info = functools.partial(dict, cpuinfo.get_cpu_info())
get_accelerator().create_op_builder("CPUAdamBuilder").load()  # DeepSpeed keeps it
ACCELERATOR = type(get_accelerator())
# Tests make tensors on this device; DeepSpeed answers with a number in a string for a CPU.
ACCELERATOR.current_device = ACCELERATOR.current_device_name
# torch computes in fp16 and bf16 on a CPU; DeepSpeed and these tests want a GPU for it.
ACCELERATOR.is_fp16_supported = unit.util.bf16_required_version_check = lambda *_, **__: True
gc.collect()
gc.freeze()  # a rank's collections would touch, and so copy, all that it shares with the server


def note(kind, value):
    with Path(TASK["notes"]).open("a") as file:
        file.write(json.dumps([int(os.environ.get("RANK", "0")), kind, value]) + "\n")


def wrap(owner, name):  # the function comes in the method's place, and is given it first
    def decorate(wrapper):
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args, **kwargs):
            return wrapper(original, *args, **kwargs)

        setattr(owner, name, wrapped)

    return decorate


def without_torch_adam(params):
    """Return the block of an optimizer whose update DeepSpeedCPUAdam makes, as an offload asks."""
    block = params["optimizer"]
    kept = {key: block["params"][key] for key in block.get("params", {}) if key != "torch_adam"}
    return {**block, "params": kept} if "params" in block else block


@wrap(DistributedDataParallel, "__init__")
def _take_no_device(original, wrapped, module, device_ids=None, output_device=None, **options):
    original(wrapped, module, **options)  # a model on a CPU may have none


@wrap(comm, "all_gather_into_tensor")
def _gather_numbers(original, gathered, tensor, *args, **kwargs):
    return original(gathered, torch.atleast_1d(tensor), *args, **kwargs)  # or gloo refuses one


if Version(deepspeed.__version__) < Version("0.19.8"):
    wait_for_every_gather(comm, comm.comm)


def fix_seeds():
    [seed(1234) for seed in (random.seed, numpy.random.seed, torch.manual_seed)]


if TASK["plugin"]:
    import deep_optimizer_states
    from deep_optimizer_states import errors

    deep_optimizer_states.install()
    REFUSALS = (errors.ConfigError, errors.UnsupportedDeepSpeedError, errors.CheckpointError)

    @wrap(errors.DeepOptimizerStatesError, "__init__")
    def _note_refusal(original, error, *words):
        original(error, *words)
        if isinstance(error, REFUSALS):
            note("refused", str(error))


@wrap(DeepSpeedConfig, "_initialize_params")
def _add_blocks(original, config, params):
    zero = params.get("zero_optimization")
    zero = zero if isinstance(zero, dict) and zero.get("stage") else {}
    offload = zero.get("offload_optimizer") or {"device": "cpu" if zero.get("cpu_offload") else ""}
    device = offload["device"] if isinstance(offload, dict) else offload.device
    is_own = getattr(device, "value", device) == "cpu"
    is_adam = str((params.get("optimizer") or {}).get("type")).lower() in ("adam", "adamw")
    can_add = bool(zero) and is_adam and device == ""
    note("offload", "own" if is_own else "could be added" if can_add else "none")
    if can_add and TASK["add"]:
        zero = {**zero, "offload_optimizer": {"device": "cpu"}}
        zero.pop("cpu_offload", None)  # DeepSpeed refuses the older name beside it
        params = {**params, "zero_optimization": zero, "optimizer": without_torch_adam(params)}
    if TASK["plugin"] and (is_own or (can_add and TASK["add"])):
        params = {**params, "deep_optimizer_states": BLOCK}
    original(config, params)


@wrap(DeepSpeedEngine, "_configure_zero_optimizer")
def _note_engine(original, engine, optimizer):
    if hasattr(engine._config, "deep_optimizer_states"):
        settings = engine._config.deep_optimizer_states
        numel = sum(getattr(each, "ds_numel", each.numel()) for each in engine.module.parameters())
        tile = max(settings.tile_numel, numel // MAX_TILES // 16 * 16)
        engine._config.deep_optimizer_states = settings.model_copy(update={"tile_numel": tile})
    made = original(engine, optimizer)
    note("engine", hasattr(made, "background"))
    ENGINES.append(engine)
    return made


@wrap(DeepSpeedEngine, "step")
def _note_norm(original, engine, *args, **kwargs):
    original(engine, *args, **kwargs)
    note("bits", str(getattr(engine, "_global_grad_norm", None)))


@wrap(DeepSpeedEngine, "destroy")
def _note_before_the_end(original, engine, *args, **kwargs):
    note_state([engine])
    original(engine, *args, **kwargs)


def note_state(engines):
    """Note this rank's part of weights, master weights and moments, once for each engine."""
    for engine in [each for each in engines if each in ENGINES]:
        ENGINES.remove(engine)
        try:
            note("bits", {name: bits(tensor) for name, tensor in state_of(engine)})
        except Exception as error:  # noqa: BLE001 - a test may leave an engine in any state
            note("bits", type(error).__name__)


def bits(tensor):
    """A digest of every bit, by which any NaN equals any other (docs/plugin.md)."""
    tensor = tensor.detach().cpu()
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.nan, tensor)
    raw = tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]


def state_of(engine):
    """Without padding, which stock leaves uninitialised at stage 3, and without moments of zero.

    Stock has no moments before the first step.
    """
    stock = engine.optimizer
    if hasattr(stock, "background"):
        stock.background.wait()  # nobody else waits for a part that is not gathered
    for name, param in engine.module.named_parameters():
        if not hasattr(param, "ds_tensor"):
            yield name, param.data
        else:
            rank = torch.distributed.get_rank(param.ds_process_group)
            left = param.ds_numel - rank * param.partition_numel()
            yield name, param.ds_tensor.flatten()[: max(0, left)]
    if hasattr(stock, "fp32_partitioned_groups_flat"):
        masters, groups = stock.fp32_partitioned_groups_flat, stock.fp16_partitioned_groups
        cuts = [[part.numel() for part in parts] for parts in groups]
        paddings = stock.groups_padding
    else:
        masters = getattr(stock, "single_partition_of_fp32_groups", [])
        cuts, paddings = [[master.numel()] for master in masters], [[0]] * len(masters)
    for idx, master in enumerate(masters):
        state = stock.optimizer.state.get(master, {})
        tensors = {"master": master, **{key: state[key] for key in state if key != "step"}}
        for key, tensor in sorted(tensors.items()):
            pieces = tensor.flatten().split(cuts[idx])
            for number, (piece, padding) in enumerate(zip(pieces, paddings[idx], strict=True)):
                if key == "master" or piece.any():
                    yield f"{key}/{idx}/{number}", piece[: len(piece) - padding]


@wrap(DistributedExec, "_dist_run")
def _run_noted(original, test, *args, **kwargs):
    fix_seeds()
    result = original(test, *args, **kwargs)
    note_state(ENGINES)
    return result


@wrap(DistributedExec, "_close_pool")
def _end_ranks(original, test, pool, *args, **kwargs):
    """End ranks at once after a failure: they may wait for each other."""
    if sys.exc_info()[0] is None:
        return original(test, pool, *args, **kwargs)
    return pool.terminate()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    fix_seeds()
    item.suite = {"test": item.nodeid, "outcome": "passed", "why": ""}
    item.suite |= {kind: [] for kind in ("offload", "engine", "bits", "refused")}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    report = (yield).get_result()
    if not report.passed and item.suite["outcome"] == "passed":
        said = str(report.longrepr[2] if report.skipped else report.longreprtext)
        errors = re.findall(r"^(?:E\s+)?([\w.]*(?:Error|Exception|Failed)\b.*)", said, re.M)
        item.suite |= {"outcome": report.outcome, "why": (errors or said.splitlines() or [""])[-1]}
    if report.when == "call" and report.passed:
        note_state(ENGINES)
    if report.when == "teardown":
        ENGINES.clear()
        notes = Path(TASK["notes"])
        lines = [json.loads(line) for line in notes.read_text().splitlines()]
        notes.write_text("")
        for _, kind, value in sorted(lines, key=lambda line: line[0]):  # stable: a rank's in order
            item.suite[kind].append(value)
        with Path(TASK["results"]).open("a") as file:
            file.write(json.dumps(item.suite) + "\n")
