"""Exchange checkpoints of 16-bit states with stock, and read gradients; write what differs as JSON.

Run as the only rank of a job: ``states16_worker.py OUT.json FOLDER``. Not a test itself.
"""

import contextlib
import functools
import json
import sys
from pathlib import Path
from unittest import mock

import equality_worker as equality
from cases_states16 import BF16_ALL, BF16_MASTERS
from equality_cases import Case
from settings_worker import read_gradients, run

from deep_optimizer_states.adapter.zero3.stock import SubgroupHomes

CASES = {
    "bf16": Case(config={"bf16": BF16_ALL}, skips=lambda n: (2,) if n // 2 % 2 else ()),
    "moments fp32": Case(config={"bf16": BF16_MASTERS}),
}
BLOCKS = {"stock": None, "stride 2": equality.POLICIES["stride 2"]}


def keep_moments_wide(return_home, homes):
    """What stock does not do: moments that come back in 16 bits are made fp32 again."""
    for number in range(len(homes._masters)):
        state = homes._state_of(number)
        state |= {key: state[key].float() for key in ("exp_avg", "exp_avg_sq")}
    return_home(homes)


def saved(case, block, folder, steps=3):
    engine = equality.make_engine(case, block)
    equality.train(engine, case, steps=steps)
    engine.save_checkpoint(folder)
    engine.destroy()
    return folder


def loaded(case, block, folder):
    """Losses and norms of two more steps, and the state after them."""
    engine = equality.make_engine(case, block)
    engine.load_checkpoint(folder)
    try:
        return equality.train(engine, case, steps=2, skip=3), equality.state_of(engine)
    finally:
        engine.destroy()


def exchange(report, name, case, folder):
    folders = {way: saved(case, block, folder / way) for way, block in BLOCKS.items()}
    stock = loaded(case, None, folders["stock"])
    for way, source in folders.items():
        for to, block in BLOCKS.items():
            if (way, to) != ("stock", "stock"):
                found = equality.differences(loaded(case, block, source), stock)
                report[f"{name}: {way} to {to}"] = found
    if name == "moments fp32":
        wrong = functools.partial(keep_moments_wide, SubgroupHomes.return_home)
        with mock.patch.object(SubgroupHomes, "return_home", lambda homes: wrong(homes)):
            found = loaded(case, BLOCKS["stride 2"], folders["stock"])
        report["without narrowing"] = equality.differences(found, stock)


def main():
    out, folder = map(Path, sys.argv[1:])
    equality.prepare()
    report = {}
    with contextlib.redirect_stdout(sys.stderr):
        for name, case in CASES.items():
            exchange(report, name, case, folder / name)
        case = CASES["moments fp32"]
        ours, stock = (
            loaded(case, None, saved(case, block, folder / f"fresh {way}", steps=0))
            for way, block in reversed(BLOCKS.items())
        )
        report["fresh"] = equality.differences(ours, stock)
        stock, ours = (run(CASES["bf16"], block, read_gradients) for block in BLOCKS.values())
        report["gradients"] = equality.differences(ours, stock)
    out.write_text(json.dumps(report))
    equality.leave()


if __name__ == "__main__":
    main()
