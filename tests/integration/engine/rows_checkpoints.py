"""Checkpoints that go from stock to the plugin and back, of every stage, type and home."""

import contextlib
import os
import sys
from pathlib import Path
from unittest import mock

import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_optimizer_state
from engines import POLICIES, RANK, STRIDE, Case, Trial, differences, save
from rows import Rows
from rows_table import BF16_ALL, BF16_MASTERS, CASES, FIRST_CASE
from seams import SubgroupHomes

ROWS = Rows()
run = ROWS.run
TAG = "saved"
SAVED_AFTER = 3


def ways(case, **blocks):
    """Name -> the case and policy under which a checkpoint is saved or loaded."""
    return {"stock": (case, None), "ours": (case, STRIDE)} | {
        name: (case, block) for name, block in blocks.items()
    }


def save_all(folder, of, steps=SAVED_AFTER):
    for name, (case, block) in of.items():
        save(case, block, folder / name, steps, TAG)


def go_on_from(folder, case, block, steps_before=SAVED_AFTER, **changes):
    """Load into an engine that has trained: nothing of that must survive."""
    with Trial(block) as trial:
        engine = trial.open(case.changed(**changes))
        trial.train(engine, 1)
        trial.forget()
        tag = TAG + "_universal" * bool(changes)
        assert engine.load_checkpoint(folder, tag)[0] is not None
        trial.train(engine, steps=2, skip=steps_before)
        for name, parameter in engine.module.named_parameters() if changes else ():
            moment = safe_get_full_optimizer_state(parameter, "exp_avg")
            trial.see(f"exp_avg of {name}", moment)
    return trial


def load_all(folder, of, pairs=None, steps_before=SAVED_AFTER, **changes):
    """Each pair goes on as stock does that loads stock's."""

    def load(saved, name):
        return go_on_from(folder / saved, *of[name], steps_before, **changes)

    expected = load("stock", "stock")
    pairs = pairs or [(saved, name) for saved in of for name in of][1:]
    found = {
        f"{saved} to {name}": differences(load(saved, name), expected) for saved, name in pairs
    }
    assert not any(found.values()), found
    return found


def exchange(folder, case, steps=SAVED_AFTER):
    save_all(folder, ways(case), steps)
    load_all(folder, ways(case), steps_before=steps)


STATES_16 = Case(config={"bf16": BF16_ALL}, skips=lambda n: (2,) if n // 2 % 2 else ())
WIDE_MOMENTS = Case(config={"bf16": BF16_MASTERS})
for name, case, ranks in (
    ("16-bit states", STATES_16, (1,)),
    ("16-bit states, moments fp32", WIDE_MOMENTS, (1,)),
    ("stage 2", CASES[f"ZeRO-2: {FIRST_CASE}"], (1, 2)),
    ("stage 1", CASES[f"ZeRO-1: {FIRST_CASE}"], (1, 2)),
):
    ROWS.check(name, *ranks, case=case)(exchange)
    # Stock makes its own moments after a checkpoint from before the first update.
    ROWS.check(f"{name}, before the first step", *ranks, case=case, steps=0)(exchange)


@ROWS.check("moments that stay fp32 after loading are seen")
def keep_moments_wide(folder):
    """Negative control: stock goes on with moments in the type of the master weights."""
    return_home = SubgroupHomes.return_home

    def widen_and_return(homes):
        for number in range(len(homes._masters)):
            state = homes._state_of(number)
            state |= {key: state[key].float() for key in ("exp_avg", "exp_avg_sq")}
        return_home(homes)

    save(WIDE_MOMENTS, None, folder, tag=TAG)
    stock = go_on_from(folder, WIDE_MOMENTS, None)
    with mock.patch.object(SubgroupHomes, "return_home", widen_and_return):
        assert differences(go_on_from(folder, WIDE_MOMENTS, STRIDE), stock) != []


@ROWS.check("between homes of the weights")
def between_homes(folder):
    """The 16-bit weights live on the device or in host memory, when saved and when loaded."""
    on_host, on_device = CASES["offload_param"], CASES[FIRST_CASE]
    of = ways(on_host, resident=POLICIES["ratio 0.5"])
    of |= {f"{name}, on the device": it for name, it in ways(on_device).items()}
    save_all(folder, of)
    others = [name for name in of if name != "stock"]
    pairs = [("stock", name) for name in others] + [(name, "stock") for name in others]
    found = load_all(folder, of, [*pairs, ("ours", "resident"), ("ours", "ours, on the device")])
    assert len(found) == 10


# Universal checkpoints.

UNIVERSAL = {"config": {"checkpoint": {"load_universal": True}}}


def convert(folder, names, *options):
    """As DeepSpeed's own command does."""
    if RANK:
        return
    for name in names:
        words = ["--input_folder", folder / name / TAG]
        words += ["--output_folder", folder / name / f"{TAG}_universal"]
        words += ["--num_extract_workers", 1, "--num_merge_workers", 1, *options]
        argv = ["ds_to_universal", *map(str, words)]
        with mock.patch.object(sys, "argv", argv), contextlib.redirect_stdout(sys.stderr):
            ds_to_universal.main(ds_to_universal.parse_arguments())


def shared_folder():
    """Return the folder that the runs on one rank and on two share."""
    return Path(os.environ["CHECKPOINTS"])


@ROWS.check("universal ones of two ranks are saved", 2)
def save_for_one_rank(_folder):
    save_all(shared_folder(), ways(CASES[FIRST_CASE]))


@ROWS.check("universal ones of two ranks are loaded by one", 1)
def load_of_two_ranks(_folder):
    of = ways(CASES[FIRST_CASE])
    convert(shared_folder(), of)
    load_all(shared_folder(), of, **UNIVERSAL)


@ROWS.check("universal ones at stage 2", 1, 2)
def universal_at_stage_2(folder):
    of = ways(CASES[f"ZeRO-2: {FIRST_CASE}"])
    save_all(folder, of)
    convert(folder, of, "--inject_missing_state")
    torch.distributed.barrier()
    load_all(folder, of, **UNIVERSAL)
