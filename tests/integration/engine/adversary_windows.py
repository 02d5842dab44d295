"""Adversarial accumulation windows: gradients that stock drops, windows given up, bad batches."""

import functools
import logging
import math
import warnings
from itertools import chain

import torch
from adversary_models import ExpertNet
from adversary_trial import FP16, NOTHING_PERSISTS, WIDTH, Registry, fit_noise, run
from deepspeed.utils import logger
from equality_cases import Case

from deep_optimizer_states.errors import UpdateError

CASES = Registry()
THREE = Case(accumulation=3, zero=NOTHING_PERSISTS)
ALL = ()
"""Of layers that a micro-batch leaves out: none."""


def train_with_skips(trial, skips, case=THREE, **kwargs):
    """``skips``: the layers that each micro-batch leaves out."""

    def skip(engine, micro_step):
        engine.module.skipped = skips[micro_step]

    engine = trial.open(case=case)
    trial.train(engine, steps=len(skips) // case.accumulation, before=skip, **kwargs)


UNMANAGED = Case(accumulation=3, config={"managed_gradient_accumulation": False})
FP32_SUMS = Case(accumulation=3, config={"data_types": {"grad_accum_dtype": "fp32"}})
EARLY_ALONE = [ALL, (2,), (2,)]
LATE_ALONE = [(2,), (2,), ALL]
MIDDLE_ALONE = [(2,), ALL, (2,)]
NOT_LAST = [ALL, ALL, (2,)]
USED, UNUSED = [ALL] * 3, [(2,)] * 3
for name, windows, case, ranks in (
    ("in one window", [USED, EARLY_ALONE, USED], THREE, (1, 2)),
    ("in the first window", [EARLY_ALONE, USED, USED], THREE, (1,)),
    ("in the first window, then used late", [NOT_LAST, LATE_ALONE, USED], THREE, (1,)),
    ("twice, then unused", [USED, MIDDLE_ALONE, NOT_LAST, UNUSED, USED], THREE, (1, 2)),
    ("then used late", [USED, NOT_LAST, LATE_ALONE, MIDDLE_ALONE, USED], THREE, (1,)),
    ("after a window without it", [USED, UNUSED, EARLY_ALONE, UNUSED, USED], THREE, (1,)),
    ("gradients summed in fp32", [USED, NOT_LAST, EARLY_ALONE, USED], FP32_SUMS, (1,)),
    ("never in a last micro-batch", [NOT_LAST, EARLY_ALONE, MIDDLE_ALONE], THREE, (1,)),
):
    CASES.add(f"a gradient dropped {name}", ranks)(
        functools.partial(train_with_skips, skips=[*chain(*windows)], case=case)
    )


@CASES.add("a gradient of all layers but one dropped")
def most_dropped(trial):
    train_with_skips(trial, [ALL, ALL, (0, 1, 2)] * 2 + [ALL] * 3)


@CASES.add("a gradient dropped in fp16, steps skipped", (1, 2))
def dropped_and_skipped(trial):
    """The window with the dropped gradient overflows; so does the next one."""
    skips = [ALL, ALL, ALL, (2,), ALL, (2,), (2,), ALL, ALL, ALL]

    def act(engine, micro_step):
        engine.module.skipped = skips[micro_step]
        engine.module.poison = math.inf if micro_step in (2, 4) else None

    engine = trial.open(case=Case(dtype=torch.float16, config=FP16))
    trial.train(engine, steps=5, before=act)
    assert engine.skipped_steps == 2


@CASES.add("an expert not chosen in the last micro-batch")
def experts(trial):
    """What the router chooses is data's affair; half the experts are closed at a time."""
    engine = trial.open(ExpertNet())

    def choose(engine, micro_step):
        closed = micro_step // 2 + micro_step
        engine.module.layers[1].allowed = tuple(i for i in range(4) if (i + closed) % 3)

    trial.train(engine, steps=4, before=choose)


@CASES.add("frozen in the middle of a window")
def frozen_mid_window(trial):
    def freeze(engine, micro_step):
        engine.module.layers[2].requires_grad_(micro_step not in (4, 5, 6))

    trial.train(trial.open(case=THREE), steps=4, before=freeze)


@CASES.add("unused in the last micro-batch, managed_gradient_accumulation false", (1, 2))
def unmanaged(trial):
    """There stock keeps the gradient."""
    engine = trial.open(case=UNMANAGED)
    for window in (USED, EARLY_ALONE, NOT_LAST, UNUSED, MIDDLE_ALONE):
        for skipped in window:
            engine.module.skipped = skipped
            see_backward(trial, engine)
        engine.step()
        trial.see("gradient norm", engine.get_global_grad_norm())


def see_backward(trial, engine):
    loss = fit_noise(engine, trial.generator)
    trial.see("loss", loss)
    engine.backward(loss)


@CASES.add("a window given up by zero_grad()", (1, 2))
def given_up(trial):
    """After one and after two micro-batches; the layer left out then is used in what is given up
    alone."""
    engine = trial.open(case=THREE)
    train = functools.partial(trial.micro_step, engine)
    for number in (1, 2):
        for _ in range(number):
            train()
        engine.zero_grad()
        engine.optimizer.zero_grad()
        engine.module.skipped = (number,)
        for _ in range(6 - number):
            train()
        engine.module.skipped = ALL


@CASES.add("a window given up, managed_gradient_accumulation false")
def given_up_unmanaged(trial):
    engine = trial.open(case=UNMANAGED)
    for skipped in (ALL, (1,), ALL, (0, 2)):
        engine.module.skipped = ALL
        see_backward(trial, engine)
        engine.optimizer.zero_grad()
        engine.module.skipped = skipped
        see_backward(trial, engine)
        see_backward(trial, engine)
        engine.step()


@CASES.add("a bad batch without backward", (1, 2))
def bad_batch(trial):
    """Its forward is done and its loss thrown away; the step counts it all the same."""
    engine = trial.open(case=THREE)
    for micro_step in range(12):
        engine.module.skipped = (1,) if micro_step in (5, 8) else ALL
        if micro_step in (3, 7):
            engine(torch.ones(4, WIDTH, dtype=torch.bfloat16, device=engine.device))
            engine.step()
        else:
            trial.micro_step(engine)


@CASES.add("a bad batch last in its window")
def bad_batch_last(trial):
    """Stock then steps with the gradients of the micro-batch before it, or with older ones."""
    engine = trial.open(case=THREE)
    for micro_step in range(12):
        if micro_step == 5:
            engine(torch.ones(4, WIDTH, dtype=torch.bfloat16, device=engine.device))
            engine.step()
        else:
            trial.micro_step(engine)


class Kept(logging.Handler):
    """Warnings of DeepSpeed's logger."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def warnings_of_dropped_gradients(block):
    """How often the user is told that stock drops gradients, over three such windows."""
    kept = Kept()
    logger.addHandler(kept)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(functools.partial(train_with_skips, skips=NOT_LAST * 3), block)
    except UpdateError as error:
        return str(error)
    finally:
        logger.removeHandler(kept)
    texts = [*kept.texts, *(str(warning.message) for warning in caught)]
    return sum("managed_gradient_accumulation" in text for text in texts)
