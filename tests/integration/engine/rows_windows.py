"""Accumulation windows whose gradients stock drops, errors in them, and what disturbs a run."""

import functools
import logging
import os
import signal
import threading
import warnings

import torch
from deepspeed.utils import logger
from engines import NUM_RANKS, STRIDE, WIDTH, make_folder, play
from rows import Rows
from rows_calls import net_case
from signals import interrupt, names_of, once_within

ROWS = Rows()
run = ROWS.run
THREE = net_case(accumulation=3)
ONE = net_case(accumulation=1)
FP32_SUMS = net_case(accumulation=3, config={"data_types": {"grad_accum_dtype": "fp32"}})
ALL = ()
"""A micro-batch that leaves out no layer."""
NOT_LAST = [ALL, ALL, (2,)]


class Kept(logging.Handler):
    """Warnings of a logger."""

    def __init__(self, logger):
        super().__init__(logging.WARNING)
        self.texts, self._logger = [], logger

    def emit(self, record):
        self.texts.append(record.getMessage())

    def __enter__(self):
        self._logger.addHandler(self)
        return self.texts

    def __exit__(self, *_):
        self._logger.removeHandler(self)


@ROWS.check("the user is told once that stock drops gradients")  # first: a process may be told once
def told_of_dropped_gradients(_folder):
    """Over three such windows of one run; a run of stock itself says nothing."""
    for block, times in ((None, 0), (STRIDE, 1)):
        with Kept(logger) as texts, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            play(functools.partial(train_with_skips, windows=[NOT_LAST] * 3), block)
        texts += [str(warning.message) for warning in caught]
        assert sum("managed_gradient_accumulation" in text for text in texts) == times


def train_with_skips(trial, windows, case=THREE):
    """``windows``: the layers that each of their micro-batches leaves out."""
    skips = [skipped for window in windows for skipped in window]
    engine = trial.open(case.changed(skips=skips.__getitem__))
    trial.train(engine, steps=len(windows))


# Stock steps with the gradients of the micro-batch before a bad last one, or with older ones.
@ROWS.compare("a bad batch without backward, also last in its window", 1, 2)
def bad_batch(trial):
    """Its forward is done and its loss thrown away; the step counts it all the same."""
    engine = trial.open(THREE)
    for micro_step in range(12):
        engine.module.skipped = (1,) if micro_step in (5, 8) else ALL
        if micro_step in (3, 7, 11):
            engine(torch.ones(4, WIDTH, dtype=torch.bfloat16, device=engine.device))
            engine.step()
        else:
            trial.micro_step(engine)


# Errors in a window, and checkpoints loaded in it.


@ROWS.compare("an error in forward of the last micro-batch, which is left out")
def train_through(trial):
    """The window goes on without it."""
    engine = trial.open(THREE)
    for micro_step in range(12):
        if micro_step == 5:
            engine.module.fails_at, engine.module.error = 2, ValueError()
        try:
            trial.micro_step(engine)
        except ValueError:
            engine.optimizer.zero_grad()
    assert engine.global_steps >= 3


def load_at(trial, place, case, **options):
    """Go back to a checkpoint at an odd place of a micro-batch of the third window."""
    engine, folder = trial.open(case), make_folder()
    trial.train(engine, steps=1)
    engine.save_checkpoint(folder)
    trial.train(engine, steps=1)
    for micro_step in range(case.accumulation):
        trial.backward(engine)
        if micro_step == 0 and place == "before step":
            engine.load_checkpoint(folder, **options)
        engine.step()
        if micro_step == 0 and place == "after step":
            engine.load_checkpoint(folder, **options)
    trial.train(engine, steps=2)


WEIGHTS_ALONE = {"load_optimizer_states": False}
for name, given in {
    "before step, three micro-batches": {"case": THREE},
    "before step, one micro-batch, without optimizer states": {"case": ONE, **WEIGHTS_ALONE},
    "after step, gradients summed in fp32": {"case": FP32_SUMS},
}.items():
    place = name.partition(",")[0]
    ROWS.compare(f"loaded {name}", 1, 2, place=place, **given)(load_at)


@ROWS.compare("saved between backward and step, loaded at once", 1, 2)
def saved_in_the_middle(trial):
    engine, folder = trial.open(THREE), make_folder()
    for micro_step in range(12):
        trial.backward(engine)
        if micro_step in (4, 5):
            engine.save_checkpoint(folder, tag=f"at{micro_step}")
            engine.load_checkpoint(folder, tag=f"at{micro_step}")
        engine.step()


@ROWS.compare("accumulation made longer and shorter")
def accumulation_changes(trial):
    engine = trial.open(ONE)
    for micro_batches in (1, 3, 2, 1, 4):
        engine.set_train_batch_size(4 * micro_batches * NUM_RANKS)
        assert engine.gradient_accumulation_steps() == micro_batches
        trial.train(engine, steps=2)


@ROWS.compare("two forwards, then both backwards", 1, 2)
def two_forwards(trial):
    engine = trial.open(THREE)
    for _ in range(6):
        losses = [trial.loss(engine) for _ in range(2)]
        for loss in losses:
            engine.backward(loss)
            engine.step()
        trial.see("losses", losses)


# What disturbs a run.


@ROWS.compare("Ctrl-C while forward waits for the update")
def interrupt_a_wait(trial):
    """Stock, which never waits, is interrupted at the same place."""
    engine = trial.open(ONE)

    def end_the_wait(_number, frame):
        assert "before_gather" in names_of(frame), "nothing was waited for"
        trial.release(engine)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, end_the_wait)
    for _ in range(2):
        trial.micro_step(engine)
        trial.hold(engine)
        trial.micro_step(engine)
        if trial.block:
            once_within("before_gather", lambda: interrupt(signal.SIGALRM))
        else:
            engine.module.fails_at, engine.module.error = 0, KeyboardInterrupt()
        try:
            trial.loss(engine)
        except KeyboardInterrupt:
            continue
        raise AssertionError("nothing was interrupted")
    trial.train(engine)
    signal.signal(signal.SIGALRM, before)


@ROWS.compare("a fork and set_num_threads")
def disturbed(trial):
    """The child ends as Python does."""
    torch.set_num_threads(1)
    engine = trial.open(ONE)
    for threads in (2, 1):
        trial.train(engine, steps=2)
        torch.set_num_threads(threads)
        child = os.fork()
        if child == 0:
            threading._shutdown()  # joins the threads of pools, none of which the child has
            os._exit(5)
        trial.see("status", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    trial.train(engine, steps=2)
