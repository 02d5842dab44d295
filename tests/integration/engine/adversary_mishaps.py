"""Adversarial mishaps: errors in a window, checkpoints loaded in it, windows that change."""

import functools
import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from adversary_models import OddSizes
from adversary_trial import NOTHING_PERSISTS, NUM_RANKS, RANK, Net, Registry, fit_noise
from equality_cases import Case

CASES = Registry()
THREE = Case(accumulation=3, zero=NOTHING_PERSISTS)
ONE = Case(accumulation=1, zero=NOTHING_PERSISTS)
FP32_SUMS = Case(accumulation=3, config={"data_types": {"grad_accum_dtype": "fp32"}})


class MishapError(Exception):
    """What a case raises in the middle of training."""


class FragileNet(Net):
    """Raises once, in the forward of a layer."""

    fails_at = None

    def forward(self, x):
        for idx, layer in enumerate(self.layers):
            if self.fails_at == idx:
                self.fails_at = None
                raise MishapError
            x = torch.tanh(layer(x)) + x
        return x


def train_through(trial, fails_at, when, case):
    """An error in micro-batch ``when`` of the second window; the window goes on without it."""
    engine = trial.open(FragileNet(), case)
    for micro_step in range(4 * case.accumulation):
        is_bad = micro_step == case.accumulation + when
        engine.module.fails_at = fails_at if is_bad else None
        try:
            trial.micro_step(engine)
        except MishapError:
            engine.optimizer.zero_grad()
    assert engine.global_steps >= 3


for when in (0, 2):
    CASES.add(f"an error in forward of micro-batch {when}, which is left out")(
        functools.partial(train_through, fails_at=2, when=when, case=THREE)
    )


@CASES.add("a loss that raises after a forward", (1, 2))
def loss_raises(trial):
    engine = trial.open(case=THREE)
    for micro_step in range(12):
        if micro_step in (4, 8):
            fit_noise(engine, trial.generator)  # its loss is lost
            continue
        trial.micro_step(engine)


class Folder:
    """A folder that all ranks save to."""

    def __enter__(self):
        names = [tempfile.mkdtemp() if RANK == 0 else None]
        if NUM_RANKS > 1:
            dist.broadcast_object_list(names)
        self.name = Path(names[0])
        return self.name

    def __exit__(self, *_):
        if NUM_RANKS > 1:
            dist.barrier()
        if RANK == 0:
            shutil.rmtree(self.name)


def load_at(trial, place, case, with_states):
    """Go back to a checkpoint at an odd place of a micro-batch of the third window."""
    engine = trial.open(case=case)
    with Folder() as folder:
        trial.train(engine, steps=1)
        engine.save_checkpoint(folder)
        trial.train(engine, steps=1)

        def load(name):
            if name == place:
                engine.load_checkpoint(folder, load_optimizer_states=with_states)

        for micro_step in range(case.accumulation):
            is_first = micro_step == 0
            loss = fit_noise(engine, trial.generator)
            engine.backward(loss)
            if is_first:
                load("before step")
            engine.step()
            if is_first:
                load("after step")
            trial.see("loss", loss)
        trial.train(engine, steps=2)


for place, words, case, with_states in (
    ("before step", "three micro-batches", THREE, True),
    ("before step", "one micro-batch, without optimizer states", ONE, False),
    ("after step", "three micro-batches, without optimizer states", THREE, False),
    ("after step", "gradients summed in fp32", FP32_SUMS, True),
):
    CASES.add(f"loaded {place}, {words}", (1, 2))(
        functools.partial(load_at, place=place, case=case, with_states=with_states)
    )


@CASES.add("saved between backward and step, loaded at once", (1, 2))
def saved_in_the_middle(trial):
    engine = trial.open(case=THREE)
    with Folder() as folder:
        for micro_step in range(12):
            loss = fit_noise(engine, trial.generator)
            engine.backward(loss)
            if micro_step in (4, 5):
                engine.save_checkpoint(folder, tag=f"at{micro_step}")
                engine.load_checkpoint(folder, tag=f"at{micro_step}")
            engine.step()
            trial.see("loss", loss)


@CASES.add("accumulation made longer and shorter")
def accumulation_changes(trial):
    engine = trial.open(case=ONE)
    for micro_batches in (1, 3, 2, 1, 4):
        engine.set_train_batch_size(4 * micro_batches * NUM_RANKS)
        assert engine.gradient_accumulation_steps() == micro_batches
        trial.train(engine, steps=2)


@CASES.add("two forwards, then both backwards", (1, 2))
def two_forwards(trial):
    engine = trial.open(case=THREE)
    for _ in range(6):
        losses = [fit_noise(engine, trial.generator) for _ in range(2)]
        for loss in losses:
            engine.backward(loss)
            engine.step()
        trial.see("losses", losses)


@CASES.add("clipping changed between steps", (1, 2))
def clipping_changes(trial):
    def clip(engine, micro_step):
        engine.optimizer.clip_grad = (0.0, 1e-3, 1.0, 1e9)[micro_step % 4]

    trial.train(trial.open(case=ONE), steps=6, before=clip)


EXTREMES = (
    {"betas": (0.0, 0.0)},
    {"betas": (0.9999999, 0.9999999)},
    {"betas": (0.9, 0.95), "eps": 0.0},
    {"eps": 1e30},
    {"eps": 1e-8, "lr": 0.0},
    {"lr": -1e-3},
    {"lr": 1e-42},
    {"lr": torch.tensor(3e-3)},
    {"lr": torch.tensor(3e-3, dtype=torch.float64), "weight_decay": -0.5},
    {"weight_decay": 300.0},
    {"lr": 0, "weight_decay": 1, "eps": 1},
)
"""Changes that add up: zeros, numbers at the edge of fp32, other signs and other types."""


@CASES.add("extreme hyperparameters, one after the other", (1, 2))
def train_extremely(trial):
    def change(engine, step):
        if step:
            engine.optimizer.param_groups[0].update(EXTREMES[step - 1])

    trial.train(trial.open(case=ONE), steps=len(EXTREMES) + 1, before=change)


@CASES.add("a count of steps that jumps")
def jumping_steps(trial):
    engine = trial.open(case=ONE)

    def jump(engine, micro_step):
        for state in engine.optimizer.state.values():
            state["step"] = (0, 0, 10**6, 3, 2**31, 5)[micro_step] or state["step"]

    trial.train(engine, steps=6, before=jump)


def train_with(trial, config, zero, tile_numel=16, model=OddSizes):
    case = Case(zero={"sub_group_size": 4, **NOTHING_PERSISTS, **zero}, config=config)
    trial.train(trial.open(model(), case, tile_numel=tile_numel), steps=3)


for name, config, zero in (
    ("a subgroup of one element", {}, {"sub_group_size": 1}),
    ("a bucket of one element", {}, {"sub_group_size": 1, "reduce_bucket_size": 1}),
    ("nothing prefetched", {}, {"stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0}),
    ("gradients divided twice", {"gradient_predivide_factor": 4.0}, {"reduce_scatter": False}),
    ("gradients summed in fp16", {"data_types": {"grad_accum_dtype": "fp16"}}, {}),
    ("everything persists", {}, {"stage3_param_persistence_threshold": 10**9}),
    ("gradients reduced in fp32", {"communication_data_type": "fp32"}, {}),
    ("a bucket that is not contiguous", {}, {"contiguous_gradients": False}),
    ("gradients not reduce-scattered", {}, {"reduce_scatter": False}),
    ("parameters in rounds", {}, {"round_robin_gradients": True}),
):
    CASES.add(name, (1, 2))(functools.partial(train_with, config=config, zero=zero))


class MixedNet(torch.nn.Module):
    """Parameters that the user made in several types, buffers in more."""

    def __init__(self):
        super().__init__()
        net = Net()
        net.layers[1].double()
        net.layers[2].half()
        self.net = net
        self.register_buffer("shift", torch.full((1,), 0.25, dtype=torch.float64))

    def forward(self, x):
        return self.net(x) + self.shift.to(x.dtype)


@CASES.add("parameters of several types", (1, 2))
def mixed_types(trial):
    engine = trial.open(MixedNet(), Case(zero=NOTHING_PERSISTS))
    trial.train(engine, steps=3)


@CASES.add("weights and biases frozen by turns, each step", (1, 2))
def frozen_by_turns(trial):
    def toggle(engine, micro_step):
        for idx, parameter in enumerate(engine.module.parameters()):
            parameter.requires_grad_((idx + micro_step // 2) % 3 != 0)

    trial.train(trial.open(case=Case(zero={"sub_group_size": 1})), steps=6, before=toggle)
