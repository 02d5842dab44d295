"""Run every adversarial case under stock and each policy; write what differs as JSON.

Run as every rank of a job: ``adversary_worker.py EXTENT OUT``, the extent being ``few`` (one policy
for each case, by turns) or ``all``. Not a test itself. With
``ADVERSARY_ONLY`` set to a regular expression, cases alone whose ``"theme | name"`` it finds.
"""

import contextlib
import datetime
import json
import os
import re
import sys
import time
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch
from deepspeed.accelerator import get_accelerator

sys.path.insert(0, str(Path(__file__).parent))
import adversary_calls
import adversary_mishaps
import adversary_models
import adversary_pairs
import adversary_settings
import adversary_uses
import adversary_windows
from adversary_trial import NUM_RANKS, POLICIES, differences, run
from equality_worker import by_turns, late, leave, make_engines_cheaper

import deep_optimizer_states
from deep_optimizer_states.adapter import steppers
from deep_optimizer_states.core.device.base import Wait
from deep_optimizer_states.core.device.emulated import Faults

THEMES = {
    "models": adversary_models,
    "uses": adversary_uses,
    "calls": adversary_calls,
    "settings": adversary_settings,
    "pairs": adversary_pairs,
    "windows": adversary_windows,
    "mishaps": adversary_mishaps,
}
CONTROLS = (
    "EMA of the weights",
    "GatheredParameters, update in flight",
    "generate, Mixtral, greedy",
)
"""Cases in which a gather that does not wait for its tiles must show."""


def compare_all(report, extent):
    for theme, module in THEMES.items():
        for name, (act, ranks) in module.CASES.cases.items():
            key = f"{theme} | {name}"
            if NUM_RANKS not in ranks or not re.search(os.environ.get("ADVERSARY_ONLY", ""), key):
                continue
            begin = time.perf_counter()
            report.update(compared(key, act, by_turns(POLICIES, len(report), extent)))
            print(f"{time.perf_counter() - begin:5.2f} s  {key}", file=sys.stderr)


def compared(key, act, policies):
    try:
        stock = run(act, None)
        assert stock.is_finite, "its losses are not finite, so that they prove nothing"
    except Exception as error:  # noqa: BLE001 - a case that is wrong; the others are to run as well
        return {key: [f"stock itself: {type(error).__name__}: {error}"]}
    return {
        f"{key} | {policy}": differences(act, block, stock) for policy, block in policies.items()
    }


def break_rules(report):
    """Negative controls: without the wait for its weights, a reader must see others."""
    faults = Faults(without=frozenset({Wait.WEIGHTS_READY}))
    for name in CONTROLS:
        act, _ = adversary_calls.CASES.cases[name]
        stock = run(act, None)
        with late():
            report[f"without | {name}"] = differences(act, POLICIES["stride 2"], stock, faults)


def main():
    extent, out = sys.argv[1], Path(sys.argv[2])
    make_engines_cheaper()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # A rank that alone failed must not be waited for until the test's own limit.
    deepspeed.init_distributed(
        dist_backend="nccl" if torch.cuda.is_available() else "gloo",
        timeout=datetime.timedelta(seconds=120),
    )
    if not torch.cuda.is_available():
        # DeepSpeed's CPU accelerator says no to fp16, which torch computes on a CPU all the same.
        type(get_accelerator()).is_fp16_supported = lambda self: True
    deep_optimizer_states.install()
    steppers.check_device_adam = lambda *args: None  # compared elsewhere; a third of the time
    report = {}
    with contextlib.redirect_stdout(sys.stderr):
        report["told of dropped gradients"] = {  # first: a process may be told once for all
            policy: adversary_windows.warnings_of_dropped_gradients(block)
            for policy, block in (("stock", None), ("stride 2", POLICIES["stride 2"]))
        }
        compare_all(report, extent)
        if NUM_RANKS == 1 and not torch.cuda.is_available():
            break_rules(report)
    out.with_suffix(f".{os.environ['RANK']}.json").write_text(json.dumps(report))
    leave()


if __name__ == "__main__":
    main()
