"""Run the table of equality: its rows under their policies, and resumes.

The extent is ``once``, ``few`` or ``all`` of the runs.
"""

import functools
import os
import re

from engines import (
    NUM_RANKS,
    POLICIES,
    STEPS,
    STRIDE,
    differences,
    go_on,
    moving,
    play,
    save,
    training,
)
from rows_table import CASES, FIRST_CASE, columns_of
from seams import UnsupportedDeepSpeedError

PREFETCHED, BEFORE_NORM = "dynamic, prefetched", "stride 2, before the norm"
IN_BACKWARD = {
    PREFETCHED: {**POLICIES["dynamic"], "device_memory_bytes": 50_000},
    BEFORE_NORM: {
        **STRIDE,
        "step_before_norm": True,
        "device_memory_bytes": 20_000,
    },
}
"""Ways to work during backward; the second is of ZeRO-3 alone, without clipping on both sides. In
both, state comes to the device and goes home again every few steps."""
IN_SHORT = (FIRST_CASE, f"ZeRO-2: {FIRST_CASE}", f"ZeRO-1: {FIRST_CASE}")
ONE_IN = 10
"""In the extent ``few`` one rank takes every case, and two take one in so many."""
FEW_STEPS = 3
"""As many see moments that are zero, new and old, and state that moves away and back. The full set
trains longer."""
FEW_RESUMES = ("stock", "stride 2", "ratio 0.5")
"""Between which checkpoints are exchanged on more than one rank, if not all is run."""


def run(report, extent, folder):
    """Fill ``comparisons``, ``columns``, ``left_out`` and ``refused``."""
    for name in ("comparisons", "columns", "left_out", "refused"):
        report[name] = {}
    for number, (name, case) in enumerate(CASES.items()):
        if re.search(os.environ.get("ROWS_ONLY", ""), name):
            compare_case(report, extent, number, name, shortened(case, extent))
    compare_two_at_once(report, extent)
    resume(report["comparisons"], folder, extent)


def shortened(case, extent):
    """The case with as few steps as show it; fp16 needs those that overflow as well."""
    is_long = extent == "all" or case.steps != STEPS or "fp16" in case.config
    return case if is_long else case.changed(steps=FEW_STEPS)


def compare_case(report, extent, number, name, case):
    policies = policies_of(number, name, extent)
    if not policies:
        return
    if not case.is_in_this_release:
        report["left_out"][name] = len(policies)
        return
    ways = ways_in_backward(name, extent)
    blocks = {policy: POLICIES[policy] for policy in policies}
    blocks |= {PREFETCHED: IN_BACKWARD[PREFETCHED]} if ways else {}
    # Ours first: in a fresh process DeepSpeed must not need stock's optimizer to have run.
    try:
        with moving():
            ours = {policy: play(training(case), block) for policy, block in blocks.items()}
    except UnsupportedDeepSpeedError as error:  # on every rank alike
        report["refused"][name] = str(error)
        return
    stock = play(training(case), None)
    for policy, trial in ours.items():
        report["comparisons"][f"{name} | {policy}"] = differences(trial, stock)
    if BEFORE_NORM in ways:
        act = training(case.changed(config={**case.config, "gradient_clipping": 0}))
        with moving():
            trial = play(act, IN_BACKWARD[BEFORE_NORM])
        report["comparisons"][f"{name} | {BEFORE_NORM}"] = differences(trial, play(act, None))
    report["columns"][name] = columns_of(case)


def policies_of(number, name, extent):
    """The policies that a case is run under, ``number`` being its place among the cases."""
    case = CASES[name]
    if case.most_ranks < NUM_RANKS:
        return ()
    names = case.policies or tuple(POLICIES)
    if extent == "all" or (name == FIRST_CASE and extent != "once"):
        return names
    if extent == "few" and NUM_RANKS > 1:
        turn, is_taken = divmod(number, ONE_IN)
        return (names[turn % len(names)],) if is_taken == ONE_IN - 1 else ()
    return (names[number % len(names)],)


def ways_in_backward(name, extent):
    """Those of ``IN_BACKWARD`` that a case is run in: all, or for short of the first of a stage."""
    case = CASES[name]
    is_run = extent == "all" or (name in IN_SHORT and extent != "once")
    if not is_run or case.most_ranks < NUM_RANKS:
        return ()
    if case.stage < 3:
        return (PREFETCHED,)
    if not case.config.get("managed_gradient_accumulation", True):
        return ()  # refused: no backward knows whether the window ends
    return (PREFETCHED,) if "fp16" in case.config else tuple(IN_BACKWARD)


def compare_two_at_once(report, extent):
    """Two engines of one process, a step of one between the steps of the other."""
    case = shortened(CASES[FIRST_CASE], extent)

    def act(trial, blocks):
        engines = [trial.open(case, block=block) for block in blocks]
        for step in range(case.steps):
            for engine in engines:
                trial.train(engine, steps=1, skip=step)

    names = ("stride 2", "dynamic")
    ours = play(functools.partial(act, blocks=[POLICIES[name] for name in names]), None)
    found = differences(ours, play(functools.partial(act, blocks=[None, None]), None))
    for name in names:
        report["comparisons"][f"two engines at once | {name}"] = found
    report["columns"]["two engines at once"] = columns_of(case)


def resume(comparisons, folder, extent):
    """Save under one engine, load under another, go on: equal to stock doing the same."""
    case, blocks = shortened(CASES[FIRST_CASE], extent), {"stock": None, **POLICIES}
    if extent == "once" or (NUM_RANKS > 1 and extent != "all"):
        blocks = {name: blocks[name] for name in FEW_RESUMES}
    for name, block in blocks.items():
        save(case, block, folder / name)
    stock = go_on(case, None, folder / "stock", steps=case.steps)
    for saved, name in exchanges([*blocks], extent):
        trial = go_on(case, blocks[name], folder / saved, steps=case.steps)
        comparisons[f"resume | {saved} to {name}"] = differences(trial, stock)


def exchanges(names, extent):
    """``(saved by, loaded by)``: every pair, or a ring through all names."""
    if extent == "all":
        pairs = [(saved, loaded) for saved in names for loaded in names]
        return pairs[1:]  # stock to stock is the reference
    return list(zip(names, [*names[1:], names[0]], strict=True))
