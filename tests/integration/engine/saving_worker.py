"""Save a checkpoint in a signal handler, as preempted jobs do; write what was saved as JSON.

Run as the only rank: ``saving_worker.py OUT.json FOLDER``. Not a test itself.
"""

import json
import signal
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import equality_worker as equality
from equality_cases import Case
from late_adam import LateAdam
from signals import interrupt, names_of, once_within

from deep_optimizer_states.adapter import steppers
from deep_optimizer_states.core.kernels.host import HostAdam as make_host_adam

CASE = Case(accumulation=1, zero={"stage3_param_persistence_threshold": 0})
BLOCK = equality.POLICIES["stride 2"]
PREEMPTED_AFTER = 2
"""Steps that are over when the signal comes, in the forward after them or in the next step."""


class PreemptedError(Exception):
    """Ends training once the checkpoint is there."""


def stock_state():
    """By number of steps."""
    engine, states = equality.make_engine(CASE, None), {}
    for step in range(PREEMPTED_AFTER + 1):
        equality.train(engine, CASE, steps=1, skip=step)
        states[step + 1] = equality.state_of(engine)
    engine.destroy()
    return states


def in_forward(engine):
    """The signal comes while forward waits for the update."""
    LateAdam.is_held = True
    once_within("before_gather", lambda: interrupt(signal.SIGALRM))


def in_step(engine):
    """The signal comes when the update was launched, and ``engine.step()`` is not over."""
    launch = engine.optimizer._optimizer_step

    def launch_and_signal(subgroup):
        launch(subgroup)
        signal.raise_signal(signal.SIGALRM)

    engine.optimizer._optimizer_step = launch_and_signal


def saved_by_a_handler(arm, folder):
    """The error of the save, or None; and the functions it interrupted."""
    steppers.HostAdam = LateAdam
    engine = equality.make_engine(CASE, BLOCK)
    steppers.HostAdam = make_host_adam
    errors, callers = [], []

    def save(_number, frame):
        callers.extend(names_of(frame))
        LateAdam.is_held = False
        try:
            engine.save_checkpoint(folder)
        except Exception as error:  # noqa: BLE001 - the answer is what it says
            errors.append(f"{type(error).__name__}: {error}")
        raise PreemptedError

    signal.signal(signal.SIGALRM, save)
    equality.train(engine, CASE, steps=PREEMPTED_AFTER)
    arm(engine)
    try:
        equality.train(engine, CASE, steps=1, skip=PREEMPTED_AFTER)
    except PreemptedError:
        engine.destroy()
    return (errors or [None])[0], callers


def differences_from_stock(folder, states):
    """Between what stock loads and what it had after as many steps as the checkpoint says."""
    engine = equality.make_engine(CASE, None)
    engine.load_checkpoint(folder)
    loaded, expected = equality.state_of(engine), states[engine.global_steps]
    engine.destroy()
    return [key for key in expected if not torch.equal(loaded[key], expected[key])]


def main():
    out, folder = map(Path, sys.argv[1:])
    equality.prepare()
    states, report = stock_state(), {}
    for name, arm in (("forward", in_forward), ("step", in_step)):
        error, callers = saved_by_a_handler(arm, folder / name)
        report[name] = {
            "error": error,
            "callers": callers,
            "differences": None if error else differences_from_stock(folder / name, states),
        }
    out.write_text(json.dumps(report))
    equality.leave()


if __name__ == "__main__":
    main()
