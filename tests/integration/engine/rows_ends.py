"""Processes that end with an update in flight; a group of the worker whose report has statuses."""

import json
import os
import signal
import sys
import threading
import time

import engines
from engines import STRIDE, Case, Trial
from signals import interrupt, main_thread_callers, once_within

NONE_PERSISTENT = Case(accumulation=1, zero={"stage3_param_persistence_threshold": 0})
WAYS_TO_END = (
    "at the end",
    "after backward",
    "an error",
    "SystemExit from a handler",
    "SIGTERM",
)


def main(out):
    how = end_in_each_way(out)
    if how is not None:
        engines.prepare()
        leave(how)


def leave(how):
    """End with an update in flight, which steps nothing before somebody waits for it."""
    trial = Trial(STRIDE)
    engine = trial.open(NONE_PERSISTENT)
    trial.train(engine, 1)
    assert engine.optimizer.state, "this waits for the first update"
    trial.hold(engine)
    trial.train(engine, 1)
    assert engine.optimizer.background.is_running, "no update is in flight"
    waits = {"_shutdown"} if how == "SystemExit from a handler" else {"_shutdown", "before_gather"}
    release_within(waits, trial, engine)
    if how == "after backward":
        engine.backward(trial.loss(engine))
    if how == "an error":
        raise RuntimeError("the user's own")
    if how == "SystemExit from a handler":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
        once_within("before_gather", lambda: interrupt(signal.SIGTERM))
        trial.train(engine, 1)
    if how == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)


def release_within(functions, trial, engine):
    """Let the update go on once the main thread waits in one of these."""

    def watch():
        while functions.isdisjoint(main_thread_callers()):
            time.sleep(0.002)
        trial.release(engine)

    threading.Thread(target=watch, daemon=True).start()


def end_in_each_way(out):
    """Fork a process for each way to end; in it, the way, and in the parent None once all ended.

    What is imported is all that they share: no thread runs yet and no engine is there.
    """
    engines.leave_out_muon()
    statuses = {}
    for how in WAYS_TO_END:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            return how
        statuses[how] = status_of(child)
    out.write_text(json.dumps(statuses))
    return None


def status_of(child):
    """As ``subprocess`` gives it; "hangs" if it has not ended long after it should have."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hangs"
