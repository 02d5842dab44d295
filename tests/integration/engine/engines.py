"""Engines that tests train, and all that is seen of them.

An act is a function of a `Trial`. It is played under stock and under the plugin: everything that it
sees on the way, and every bit of state that its engines leave, must be the same.
"""

import contextlib
import dataclasses
import datetime
import functools
import gc
import hashlib
import inspect
import itertools
import os
import sys
import tempfile
import threading
import types
from pathlib import Path
from unittest import mock

import deepspeed
import deepspeed.ops
import seams
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import utils as zero_utils
from deepspeed.utils import numa, nvtx
from gathers import wait_for_every_gather
from late import late
from limited_device import LimitedDevice
from packaging.version import Version
from seams import EmulatedDevice, Faults, steppers
from torch.autograd import function
from torch.utils.checkpoint import checkpoint

RANK, NUM_RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ON_CUDA = torch.cuda.is_available()
WIDTH = 37
STEPS = 5
HELD_S = 0.05
"""An update that is held steps nothing for so long after the act begins to look at its weights."""
# No update is repeated: one that is, is waited for, and the next forward would race with none.
SMALL_TILES = {"enabled": True, "tile_numel": 256, "verify_every": 0}
POLICIES = {
    "all-host": {"enabled": True, "policy": "all-host", "just_in_time_forward": False},
    "stride 1": {"enabled": True, "policy": "stride", "stride": 1},
    "stride 2": {**SMALL_TILES, "policy": "stride", "stride": 2},
    "stride 3": {"enabled": True, "policy": "stride", "stride": 3},
    "all-device": {**SMALL_TILES, "policy": "all-device"},
    "ratio 0.5": {**SMALL_TILES, "policy": "ratio", "ratio": 0.5},
    "stride 2, ratio 0.7": {"enabled": True, "policy": "stride", "stride": 2, "ratio": 0.7},
    "dynamic": {**SMALL_TILES, "policy": "dynamic"},
}
STRIDE = POLICIES["stride 2"]
FLAT_OPTIMIZERS = ("DeepSpeedZeroOptimizer", "InterleavedFlatOptimizer")
OPTIMIZERS = {1: FLAT_OPTIMIZERS, 2: FLAT_OPTIMIZERS}
OPTIMIZERS[3] = ("DeepSpeedZeroOptimizer_Stage3", "InterleavedZeroOptimizer")
"""Stock's optimizer of a stage, and ours."""


class Net(torch.nn.Module):
    """Residual layers; some may be skipped, used again, recomputed or without gradients.

    ``reentrant`` says how each segment is recomputed in backward, if at all; ``segments`` are the
    layers of each, in order, and every layer by itself for None.
    """

    def __init__(self, num_layers=6, reentrant=None, segments=None):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.skipped = ()  # layers left out
        self.poison = None  # multiplies the gradient that goes back through the second layer
        self.fails_at = self.error = None  # the layer before which the error is raised, once
        self.reentrant, self.segments = reentrant, segments

    def forward(self, x):
        for segment in self.segments or [(idx,) for idx in range(len(self.layers))]:
            x = self.run_or_checkpoint([idx for idx in segment if idx not in self.skipped], x)
        self._fail_before(len(self.layers))
        return x

    def run_or_checkpoint(self, segment, x):
        if self.reentrant is None or not segment:
            return self.run(segment, x)
        x = x if x.requires_grad else x.requires_grad_()  # or reentrant backward has no root
        return checkpoint(self.run, segment, x, use_reentrant=self.reentrant)

    def run(self, segment, x):
        for idx in segment:
            self._fail_before(idx)
            x = torch.tanh(self.layers[idx](x)) + x
            if idx == 1 and self.poison is not None:
                x.register_hook(lambda grad, factor=self.poison: grad * factor)
        return x

    def _fail_before(self, idx):
        if self.fails_at == idx:
            self.fails_at = None
            raise self.error


def draw_vectors(generator):
    return [torch.randn(4, WIDTH, generator=generator) for _ in "xy"]


def mean_square(engine, batch):
    x, y = batch
    return ((engine(x) - y).float() ** 2).mean()


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and how it is trained; in the table, a feature that must equal stock."""

    dtype: torch.dtype = torch.bfloat16
    accumulation: int = 2
    config: dict = dataclasses.field(default_factory=dict)  # laid over DeepSpeed's JSON
    zero: dict = dataclasses.field(default_factory=dict)  # laid over its ``zero_optimization``
    make: callable = Net  # builds the model
    groups: callable = None  # makes parameter groups of a model; None for one group
    batch: callable = draw_vectors  # draws a batch of ``dtype`` for one micro-step, on the host
    loss: callable = mean_square  # of an engine and a batch on its device
    skips: callable = None  # layers left out of a micro-step; None where the act chooses them
    before: callable = None  # called with the engine before each micro-step
    own_optimizer: callable = None  # makes the optimizer that DeepSpeed is given
    steps: int = STEPS
    most_ranks: int = 4  # on more of them stock itself fails
    policies: tuple = ()  # what alone it is run under; empty for all
    is_cut: bool = True  # the state must be in three subgroups at least
    states: str = "fp32"  # type of master weights and moments
    since: str = ""  # the first DeepSpeed release that has the feature
    tile_numel: int = 0  # laid over the policy's block; 0 for what that says

    @property
    def is_in_this_release(self):
        """Return whether the installed DeepSpeed has the feature."""
        return not self.since or Version(deepspeed.__version__) >= Version(self.since)

    @property
    def stage(self):
        return self.zero.get("stage", 3)

    def changed(self, **changes):
        return dataclasses.replace(self, **changes)


def ds_config(case, block):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "train_batch_size": 4 * case.accumulation * NUM_RANKS,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "sub_group_size": 700,
            "reduce_bucket_size": 3000,
            "stage3_param_persistence_threshold": 50,
            **case.zero,
        },
        "bf16": {"enabled": True},
        "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {}},
    } | case.config
    if case.own_optimizer:
        del config["optimizer"]
    else:
        adam = {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}
        kind = config["optimizer"]
        config["optimizer"] = {**kind, "params": {**adam, **kind["params"]}}
    return config | ({"deep_optimizer_states": block} if block else {})


class Steps:
    """Holds the steps of one engine back, on every lane, or lets those of all engines fail."""

    is_broken = False
    """Those of all engines."""

    def __init__(self):
        self.engine, self.opened, self._update = None, threading.Event(), None
        self._holds = None

    def make_adam(self, mode):
        """Stand in for ``HostAdam``."""
        adam = seams.HostAdam(mode)
        step = adam.step

        def step_when_allowed(tensors, *args, **kwargs):
            self._before(tensors)
            step(tensors, *args, **kwargs)

        adam.step = step_when_allowed
        return adam

    def _before(self, tensors):
        is_held = self.engine is not None and num_updates(self.engine) == self._update
        if is_held and self._holds(tensors):
            self.opened.wait()
        if Steps.is_broken:
            raise RuntimeError("the CPU lane is out of luck")

    def hold(self, holds):
        self.opened.set()  # whatever waited for it before
        self.opened, self._holds = threading.Event(), holds
        self._update = num_updates(self.engine) + 1


def num_updates(engine):
    """Updates so far of an engine of ours; 0 of stock's."""
    update = getattr(engine.optimizer, "_launcher", None)
    return 0 if update is None else update.num_updates


@contextlib.contextmanager
def broken(fault):
    """Let a lane fail, or the device make NaN of a number that it stepped."""
    adam = EmulatedDevice.adam

    def fail(*args, **kwargs):
        raise RuntimeError("the GPU lane is out of luck")

    def step_badly(self, tensors, *args, **kwargs):
        adam(self, tensors, *args, **kwargs)
        tensors.master[0] = torch.nan

    made = {"GPU lane": fail, "wrong bit": step_badly}.get(fault, adam)
    with (
        mock.patch.object(Steps, "is_broken", fault == "CPU lane"),
        mock.patch.object(EmulatedDevice, "adam", made),
    ):
        yield


_OF_THE_TRIAL = object()


class Trial:
    """One run of an act under a policy's block, or under stock for None."""

    def __init__(self, block, faults=None, memory=None):
        self.block = block
        faults = faults or Faults(jitter_s=0.0004)
        self._make_device = functools.partial(EmulatedDevice, faults=faults)
        if memory is not None:
            self._make_device = functools.partial(LimitedDevice, faults=faults, memory=memory)
        self.seen, self.is_finite = {}, True
        self._engines = {}
        self._generator = torch.Generator().manual_seed(RANK)
        torch.manual_seed(3)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        """End what is left; state is compared if nothing went wrong."""
        for engine in list(self._engines):
            if kind is None:
                self.destroy(engine)
            else:
                with contextlib.suppress(Exception):
                    self.end(engine)

    def open(self, case=None, model=None, block=_OF_THE_TRIAL, **given):
        """An engine of ``model``, whose state is compared when the trial ends."""
        case = case or Case()
        block = self.block if block is _OF_THE_TRIAL else block
        if block and case.tile_numel:
            block = {**block, "tile_numel": case.tile_numel}
        model = model or case.make()
        parameters = case.groups(model) if case.groups else model.parameters()
        if case.own_optimizer:
            given["optimizer"] = case.own_optimizer(parameters)
        else:
            given["model_parameters"] = parameters
        steps = Steps()
        with (
            mock.patch.object(steppers, "EmulatedDevice", self._make_device),
            mock.patch.object(steppers, "HostAdam", steps.make_adam),
        ):
            engine, *_ = deepspeed.initialize(model=model, config=ds_config(case, block), **given)
        assert type(engine.optimizer).__name__ == OPTIMIZERS[case.stage][bool(block)]
        if block and block.get("enabled"):  # or page-locked memory lies anywhere
            assert seams.inside(engine, "lanes").cpu_affinity is not seams.ANYWHERE
            assert seams.inside(engine, "homes").num_subgroups >= 3 or not case.is_cut
        self._engines[engine], steps.engine = (case, steps), engine
        return engine

    def see(self, what, value):
        """Keep the bits of a tensor, a number or a list of them."""
        for one in value if isinstance(value, (list, tuple)) else [value]:
            self.seen[f"{len(self.seen)}: {what}"] = bits(one)

    def forget(self):
        """Begin to compare here."""
        self.seen.clear()

    def hold(self, engine, holds=lambda tensors: True):
        """The next update steps nothing, or nothing that ``holds`` is true of, until let go."""
        self._engines[engine][1].hold(holds)

    def let_go(self, engine, after_s=HELD_S):
        """Call after ``step()``: the update in flight goes on a while after this has returned."""
        if hasattr(engine.optimizer, "background"):
            assert engine.optimizer.background.is_running, "nothing is in flight"
        threading.Timer(after_s, self._engines[engine][1].opened.set).start()

    def release(self, engine):
        """Let the update go on at once, if there is one."""
        self._engines[engine][1].opened.set()

    def train(self, engine, steps=3, skip=None, before=None, after=None):
        """Whole iterations; ``before`` each micro-batch and ``after`` each step the act acts.

        With ``skip`` the batches begin anew, and those of so many iterations are left out.
        """
        case, _ = self._engines[engine]
        window = int(engine.gradient_accumulation_steps())  # may be a float
        first = (skip or 0) * window
        if skip is not None:
            self._generator = torch.Generator().manual_seed(RANK)
            for _ in range(first):
                case.batch(self._generator)
        for micro_step in range(first, first + steps * window):
            for act in filter(None, (case.before, before)):
                act(engine, micro_step)
            if case.skips:
                engine.module.skipped = case.skips(micro_step)
            self.micro_step(engine, (micro_step + 1) % window == 0)
            if after:
                after(engine, micro_step)
        self.see("what was seen on the way", getattr(engine, "seen", []))

    def micro_step(self, engine, ends_window=True):
        """Forward, backward and ``step()`` of one micro-batch."""
        self.backward(engine)
        if ends_window or is_managed(engine):
            self.step(engine, ends_window)

    def loss(self, engine):
        case, _ = self._engines[engine]
        batch = [
            tensor.to(engine.device, case.dtype if tensor.is_floating_point() else None)
            for tensor in case.batch(self._generator)
        ]
        return case.loss(engine, batch)

    def backward(self, engine):
        loss = self.loss(engine)
        self.see("loss", loss)
        self.is_finite &= bool(torch.isfinite(loss))
        engine.backward(loss)

    def step(self, engine, ends_window=True):
        engine.step()
        if ends_window and engine.get_global_grad_norm() is not None:
            self.see("gradient norm", engine.get_global_grad_norm())

    def see_state(self, engine):
        for name, tensor in state_of(engine).items():
            self.see(name, tensor)
        for name, parameter in engine.module.named_parameters():
            if hasattr(parameter, "ds_tensor"):
                self.see(f"partition of {name}", own_part(parameter))

    def destroy(self, engine):
        """Compare its state and end it, before the trial ends."""
        self.see_state(engine)
        self.end(engine)

    def end(self, engine):
        """End an engine; its state is not looked at."""
        self._engines.pop(engine)[1].opened.set()
        engine.destroy()


def is_managed(engine):
    """Return whether DeepSpeed knows when a window ends; before 0.19 it always does."""
    return getattr(engine, "managed_gradient_accumulation", lambda: True)()


def own_part(parameter):
    """Return this rank's part without padding, which stock does not initialise; also if frozen."""
    rank = dist.get_rank(parameter.ds_process_group)
    left = parameter.ds_numel - rank * parameter.partition_numel()
    return parameter.ds_tensor.flatten()[: max(0, left)]


def bits(value):
    """A digest of every bit of a tensor or number, by which any NaN equals any other."""
    tensor = torch.as_tensor(value).detach().cpu()
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.nan, tensor)
    raw = tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()


def state_of(engine):
    """Every tensor of the optimizer's state, by name.

    Padding is cut off at stage 3: stock leaves it uninitialised.
    """
    optimizer = engine.optimizer
    if not hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return _flat_state_of(engine)
    result = {}
    for idx, master in enumerate(optimizer.fp32_partitioned_groups_flat):
        state = optimizer.optimizer.state[master]
        tensors = {"master": master.data, "weights": optimizer.fp16_partitioned_groups_flat[idx]}
        tensors |= {name: state[name] for name in ("exp_avg", "exp_avg_sq")}
        sizes = [partition.numel() for partition in optimizer.fp16_partitioned_groups[idx]]
        paddings = optimizer.groups_padding[idx]
        for name, tensor in tensors.items():
            pieces = tensor.detach().split(sizes)
            for number, (piece, padding) in enumerate(zip(pieces, paddings, strict=True)):
                result[f"{name}/{idx}/{number}"] = piece[: len(piece) - padding]
    return result


def _flat_state_of(engine):
    """The same below stage 3, padding and gradients too, which stock leaves nowhere to chance."""
    optimizer, result = engine.optimizer, {}
    for idx, master in enumerate(optimizer.single_partition_of_fp32_groups):
        rank = torch.distributed.get_rank(optimizer.real_dp_process_group[idx])
        state = optimizer.optimizer.state[master]
        tensors = {
            "master": master.data,
            "grad": torch.cat([*optimizer.offload_gradient_dict[idx]]),
            **{name: torch.as_tensor(value) for name, value in state.items()},
            "weights": optimizer.parallel_partitioned_bit16_groups[idx][rank],
            "weights of all ranks": optimizer.bit16_groups_flat[idx],
        }
        result |= {f"{name}/{idx}": tensor for name, tensor in tensors.items()}
    return result | dict(engine.module.named_parameters())


def play(act, block, faults=None):
    with Trial(block, faults) as trial:
        act(trial)
    return trial


def play_late(act, block, without=(), lane=""):
    """Play it without some waits; updates, and one lane, are as late as the others allow."""
    with late(lane):
        return play(act, block, Faults(without=frozenset(without)))


@contextlib.contextmanager
def moving(every=83):
    """Let memory be short at one look in so many, and come back in the second window after."""
    looks = itertools.count(1)

    def is_short(_budget, _taken):
        return next(looks) % every == 0

    with (
        mock.patch.object(seams.Budget, "look", is_short),
        mock.patch.object(seams.cache, "LONGEST_WAIT", 1),
    ):
        yield


def differences(ours, stock):
    """Names of what two trials saw differently."""
    if ours.seen.keys() != stock.seen.keys():
        return ["something else was seen", *sorted(ours.seen.keys() ^ stock.seen.keys())[:5]]
    found = [name for name, digest in stock.seen.items() if ours.seen[name] != digest]
    if not stock.is_finite:
        found.append("stock itself does not train: the comparison proves nothing")
    return found


def same(ours, stock):
    """Assert that two trials saw the same."""
    found = differences(ours, stock)
    assert not found, found


def train_case(trial, case):
    """The act of a row of the table."""
    engine = trial.open(case)
    trial.train(engine, case.steps)
    if case.config.get("fp16", {}).get("enabled") and "loss_scale" not in case.config["fp16"]:
        assert 0 < engine.skipped_steps < case.steps, "no overflow, or nothing else"


def training(case):
    return functools.partial(train_case, case=case)


def save(case, block, folder, steps=3, tag=None):
    """Train and save a checkpoint."""
    with Trial(block) as trial:
        engine = trial.open(case)
        trial.train(engine, steps)
        with contextlib.redirect_stdout(sys.stderr):
            engine.save_checkpoint(folder, tag)
        trial.end(engine)


def go_on(case, block, folder, tag=None, steps=2, skip=3, **options):
    """Load a checkpoint and train on; the trial."""
    with Trial(block) as trial:
        engine = trial.open(case)
        assert engine.load_checkpoint(folder, tag, **options)[0]
        trial.train(engine, steps, skip)
    return trial


def answer(action):
    """Tell in words what an action returns or raises."""
    try:
        return f"no error: {action()}"
    except BaseException as error:  # noqa: BLE001 - the answer is what it says
        return f"{type(error).__name__}: {error}"


def lanes_left():
    """Threads of the plugin."""
    names = [thread.name for thread in threading.enumerate()]
    return sorted(name for name in names if name.startswith("deep_optimizer_states"))


def make_folder():
    """An empty folder, the same on all ranks."""
    names = [tempfile.mkdtemp(dir=sys.argv[-1]) if RANK == 0 else None]
    torch.distributed.broadcast_object_list(names)
    return Path(names[0])


def prepare(installs=True):
    """Make this process a rank that compares many small engines."""
    _make_engines_cheaper()
    if not ON_CUDA and Version(deepspeed.__version__) < Version("0.19.8"):
        wait_for_every_gather(dist)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # A rank that alone failed must not be waited for until the test's own limit.
    timeout = datetime.timedelta(seconds=120)
    deepspeed.init_distributed(dist_backend="nccl" if ON_CUDA else "gloo", timeout=timeout)
    if not ON_CUDA:
        # DeepSpeed's CPU accelerator says no to fp16, which torch computes on a CPU all the same.
        type(get_accelerator()).is_fp16_supported = lambda self: True
    if installs:
        seams.install()
    _check_each_type_once()


def _make_engines_cheaper():
    """Ask once in this process what DeepSpeed asks for every engine, and leave what it frees."""
    # To learn the NUMA nodes takes a process three times.
    numa.get_numa_cores = functools.cache(numa.get_numa_cores)
    # A function's signature is asked for at every call that backward goes through, and each of
    # DeepSpeed's own marks a range for a profiler that nobody runs.
    function.inspect = types.SimpleNamespace(signature=functools.cache(inspect.signature))
    nvtx.enable_nvtx = False
    # Every engine of stage 3 formats the values of all its weights for lines that nobody sees.
    torch.nn.Parameter.__repr__ = object.__repr__
    # For every engine all objects that there are would be looked through for garbage.
    zero_utils.gc = types.SimpleNamespace(collect=lambda: 0)
    gc.freeze()
    leave_out_muon()


def leave_out_muon():
    """DeepSpeed imports torch's compiler for Muon, which hardly any engine here is made with."""
    muon = types.ModuleType("muon_optimizer")
    muon.MuonWithAuxAdam = type("MuonWithAuxAdam", (), {})
    sys.modules["deepspeed.runtime.zero.muon.muon_optimizer"] = muon


def _check_each_type_once():
    """The device's self-check takes a third of the time of an engine as small as these."""
    check, seen = steppers.check_device_adam, set()

    def check_once(lanes, host_adam, tail, *types_of_tensors):
        if types_of_tensors not in seen:
            seen.add(types_of_tensors)
            check(lanes, host_adam, tail, *types_of_tensors)

    steppers.check_device_adam = check_once


def leave():
    """End this rank. A rank of gloo now and then aborts while the interpreter is torn down, after
    all work is done and under stock as well, so that teardown is skipped."""
    # The other rank may be gone already, by this same function: the reports are written.
    with contextlib.suppress(RuntimeError):
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
