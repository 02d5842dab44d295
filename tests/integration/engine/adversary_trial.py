"""What the adversarial cases share: one run of a case under one engine, and all that it saw.

A case is a function of a :class:`Trial`. It runs under stock and under each policy, and everything
that it sees on the way, and every bit of state that it leaves behind, must be the same.
"""

import contextlib
import dataclasses
import hashlib
import os
import threading

import deepspeed
import torch
from engine_states import state_of
from equality_cases import Case, ds_config
from equality_worker import SMALL_TILES

from deep_optimizer_states.adapter import steppers
from deep_optimizer_states.core.device.emulated import Faults
from deep_optimizer_states.core.kernels.host import HostAdam

RANK, NUM_RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WIDTH = 19
POLICIES = {
    "stride 2": {**SMALL_TILES, "policy": "stride", "stride": 2},
    "dynamic": {**SMALL_TILES, "policy": "dynamic"},
}
FP16 = {
    "bf16": {"enabled": False},
    "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1},
}
NOTHING_PERSISTS = {"stage3_param_persistence_threshold": 0}
HELD_S = 0.05
"""How long an update that is held steps nothing, once the case looks at its weights."""


@dataclasses.dataclass
class Registry:
    """The cases of a theme: by name, with the numbers of ranks on which each runs."""

    cases: dict = dataclasses.field(default_factory=dict)

    def add(self, name, ranks=(1,)):
        def keep(act):
            self.cases[name] = (act, ranks)
            return act

        return keep


class Net(torch.nn.Module):
    """Residual layers, some of which may be left out; ``poison`` multiplies what goes backward."""

    def __init__(self, num_layers=4):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.skipped = ()
        self.poison = None

    def forward(self, x):
        for idx, layer in enumerate(self.layers):
            if idx not in self.skipped:
                x = torch.tanh(layer(x)) + x
            if idx == 1 and self.poison is not None:
                x.register_hook(self._poisoned)
        return x

    def _poisoned(self, grad):
        return grad * self.poison


def fit_noise(engine, generator):
    """Loss of one micro-batch of :class:`Net`."""
    dtype = next(engine.module.parameters()).dtype
    x, y = (torch.randn(4, WIDTH, generator=generator).to(engine.device, dtype) for _ in range(2))
    return ((engine(x) - y).float() ** 2).mean()


def bits(value):
    """A digest of every bit of a tensor or number, by which any NaN equals any other."""
    tensor = torch.as_tensor(value).detach().cpu()
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.nan, tensor)
    raw = tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()


def num_updates(engine):
    """Updates so far of an engine of ours; 0 of stock's."""
    update = getattr(engine.optimizer, "_update", None)
    return 0 if update is None else update.num_updates


class Gate:
    """Where one update of an engine is held: the next one after ``shut``, not one in flight."""

    def __init__(self):
        self.engine = None
        self.opened = threading.Event()
        self._update = None

    def shut(self):
        self.opened.set()  # whatever waited for it before
        self.opened = threading.Event()
        self._update = num_updates(self.engine) + 1

    def wait(self):
        if self.engine is not None and num_updates(self.engine) == self._update:
            self.opened.wait()


class Trial:
    """One run of a case.

    Args:
        block: The policy's block; None for stock.
        faults: What the emulated device breaks on purpose.
    """

    def __init__(self, block, faults=None):
        self.block = block
        self.faults = faults or Faults(jitter_s=0.0003)
        self.generator = torch.Generator().manual_seed(RANK)
        self.seen = {}
        self.is_finite = True
        self._engines = {}
        torch.manual_seed(3)

    def open(self, model=None, case=None, block="the trial's", tile_numel=256, **kwargs):
        """An engine of ``model``, whose state is compared when the trial ends."""
        case = case or Case()
        case = dataclasses.replace(case, zero={"sub_group_size": 300 // NUM_RANKS, **case.zero})
        block = self.block if block == "the trial's" else block
        config = ds_config(case, {**block, "tile_numel": tile_numel} if block else None)
        if "optimizer" in kwargs or case.own_optimizer:
            config.pop("optimizer", None)
        model = model or Net()
        kwargs.setdefault("model_parameters", case.groups(model) if case.groups else None)
        kwargs["model_parameters"] = kwargs["model_parameters"] or model.parameters()
        gate = Gate()

        class HeldAdam(HostAdam):
            """Steps nothing of an update that is held."""

            def step(self, *args, **kwargs):
                gate.wait()
                super().step(*args, **kwargs)

        steppers.faults_for_tests, steppers.HostAdam = self.faults, HeldAdam
        try:
            engine, *_ = deepspeed.initialize(model=model, config=config, **kwargs)
        finally:
            steppers.faults_for_tests, steppers.HostAdam = None, HostAdam
        ours = type(engine.optimizer).__name__ == "InterleavedZeroOptimizer"
        assert ours == bool(block), "the wrong engine was built"
        self._engines[engine], gate.engine = gate, engine
        return engine

    def see(self, what, value):
        """Keep the bits of a tensor, a number or a list of them."""
        values = value if isinstance(value, (list, tuple)) else [value]
        for one in values:
            self.seen[f"{len(self.seen)}: {what}"] = bits(one)

    def hold(self, engine):
        """The next update steps nothing until it is let go."""
        self._engines[engine].shut()

    def let_go(self, engine, after_s=HELD_S):
        """Call after ``step()``: the update in flight goes on a while after this has returned."""
        if hasattr(engine.optimizer, "background"):
            assert engine.optimizer.background.is_running, "nothing is in flight"
        threading.Timer(after_s, self._engines[engine].opened.set).start()

    def train(self, engine, loss_of=fit_noise, steps=3, before=None, after=None):
        """Whole iterations; ``before`` each micro-batch and ``after`` each step a case acts."""
        for micro_step in range(steps * engine.gradient_accumulation_steps()):
            if before:
                before(engine, micro_step)
            self.micro_step(engine, loss_of)
            if after:
                after(engine, micro_step)

    def micro_step(self, engine, loss_of=fit_noise):
        """Forward, backward and ``step()`` of one micro-batch."""
        loss = loss_of(engine, self.generator)
        engine.backward(loss)
        engine.step()
        self.see("loss", loss)
        self.is_finite &= bool(torch.isfinite(loss))
        if engine.get_global_grad_norm() is not None:
            self.see("gradient norm", engine.get_global_grad_norm())

    def destroy(self, engine):
        """Compare its state and end it, before the trial ends."""
        state = state_of(engine)
        assert len({key.split("/")[1] for key in state}) >= 3, "too few subgroups"
        for name, tensor in state.items():
            self.see(name, tensor)
        for name, parameter in engine.module.named_parameters():
            self.see(f"partition of {name}", self._own_part(parameter))
        self.end(engine)

    @staticmethod
    def _own_part(parameter):
        """Of a frozen one too; what stock pads it with is not initialised."""
        left = parameter.ds_numel - RANK * parameter.partition_numel()
        return parameter.ds_tensor.flatten()[: max(0, left)]

    def end(self, engine):
        """End an engine; its state is not looked at."""
        self._engines.pop(engine).opened.set()
        engine.destroy()

    def close(self, failed):
        """End what is left; state is compared if nothing went wrong."""
        for engine in list(self._engines):
            if failed:
                with contextlib.suppress(Exception):
                    self.end(engine)
            else:
                self.destroy(engine)


def gathered(engine):
    """Copies of all weights, as a user reads them."""
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return [parameter.detach().clone() for parameter in parameters]


def run(act, block, faults=None):
    """What a case saw, and whether its losses were finite."""
    trial = Trial(block, faults)
    failed = True
    try:
        act(trial)
        failed = False
    finally:
        trial.close(failed)
    return trial


def differences(act, block, stock, faults=None):
    """Names of what differs from stock, or the error that stopped the case."""
    try:
        ours = run(act, block, faults)
    except Exception as error:  # noqa: BLE001 - the other cases are to run as well
        return [f"{type(error).__name__}: {error}"]
    if ours.seen.keys() != stock.seen.keys():
        return ["something else was seen", *sorted(ours.seen.keys() ^ stock.seen.keys())[:5]]
    return [name for name, digest in stock.seen.items() if ours.seen[name] != digest]
