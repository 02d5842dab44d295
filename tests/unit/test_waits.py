"""Every wait has an end, or a reason beside it; and every thread of ours a boundary at its top."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "launch")
REASON = "# No deadline: "
"""Begins a comment on the line of a wait without one, or on the lines above it."""
OURS = (
    *("background", "_background", "_run", "checkpoints", "in_background"),
    *("previous", "files", "save", "_last"),
)
"""Objects whose ``wait`` is a function of this project, whose own waits are found by themselves."""
CLOCKS = ("monotonic", "perf_counter", "process_time")
"""A loop that looks at a clock ends by it."""


def texts():
    return {
        path: path.read_text()
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def keywords(call):
    return {word.arg: word.value for word in call.keywords}


def is_none(value):
    return isinstance(value, ast.Constant) and value.value is None


def called(call):
    """The name of a function that is called, and of what it is a method of."""
    function = call.func
    if isinstance(function, ast.Attribute):
        owner = function.value
        if isinstance(owner, ast.Call):
            return function.attr, called(owner)[0]
        return function.attr, getattr(owner, "attr", getattr(owner, "id", ""))
    return getattr(function, "id", ""), ""


def has_bound(call):
    """Whether a call that waits is told how long at most."""
    limit = keywords(call).get("timeout")
    return limit is not None and not is_none(limit)


def waits_without_end(call, optional):
    """Whether a call may wait for ever; ``optional`` are names that may be None."""
    name, owner = called(call)
    first = call.args[0] if call.args else None
    match name:
        case "wait" if owner in (*OURS, "self"):
            return False
        case "wait" | "join" | "result":
            is_given = first is not None and not is_none(first)
            return not has_bound(call) and not (
                is_given and getattr(first, "id", "") not in optional
            )
        case "get" if "queue" in owner or "store" in owner:
            return not has_bound(call) and len(call.args) < 2
        case "acquire":
            is_try = isinstance(keywords(call).get("blocking"), ast.Constant)
            return not has_bound(call) and not is_try and not call.args
        case "shutdown":
            return not (isinstance(first, ast.Constant) and first.value is False)
        case "communicate" | "waitpid" | "synchronize" | "flock":
            text = ast.unparse(call)
            is_ours = name == "synchronize" and owner not in ("cuda", "stream")
            is_try = any(it in text for it in ("NOHANG", "LOCK_NB", "LOCK_UN"))
            return not (has_bound(call) or is_ours or is_try)
    return False


def polls_without_end(loop):
    """Whether a loop sleeps, or looks with a short wait, and asks no clock."""
    calls = [called(node)[0] for node in ast.walk(loop) if isinstance(node, ast.Call)]
    bounded = ("wait", "acquire", "get")
    sleeps = "sleep" in calls or any(
        called(node)[0] in bounded and (node.args or node.keywords) and not is_dict_get(node)
        for node in ast.walk(loop)
        if isinstance(node, ast.Call)
    )
    return sleeps and not set(calls) & set(CLOCKS)


def is_dict_get(call):
    name, owner = called(call)
    return name == "get" and "queue" not in owner


def found_in(text):
    """Lines of the waits without a deadline, and of reasons for one."""
    waits, optional = set(), set(re.findall(r"(\w+): float \| None", text))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and waits_without_end(node, optional):
            waits.add(node.lineno)
        if isinstance(node, ast.While) and polls_without_end(node):
            waits.add(node.lineno)
    lines = text.splitlines()
    reasons = set()
    for number, line in enumerate(lines, 1):
        if REASON in line:
            own = number
            while lines[own - 1].lstrip().startswith("#"):
                own += 1
            reasons.add(own)
    return waits, reasons


def test_every_wait_without_a_deadline_has_its_reason_beside_it():
    unexplained, stale = [], []
    for path, text in texts().items():
        waits, reasons = found_in(text)
        name = path.relative_to(ROOT)
        unexplained += [f"{name}:{line}" for line in sorted(waits - reasons)]
        stale += [f"{name}:{line}" for line in sorted(reasons - waits)]
    assert unexplained == []
    assert stale == [], "a reason for a wait that is not there"


@pytest.mark.parametrize(
    "text",
    [
        "thread.join()",
        "thread.join(patience_s)  # patience_s: float | None",
        "process.wait(timeout=None)",
        "lock.acquire()",
        "self._queue.get()",
        "future.result()",
        "pool.shutdown(wait=True)",
        "os.waitpid(pid, 0)",
        "fcntl.flock(lock, fcntl.LOCK_EX)",
        "while True:\n    time.sleep(1)",
        "while not ended.wait(LOOK_S):\n    look()",
        "while not store.check([name]):\n    time.sleep(POLL_S)",
    ],
)
def test_each_kind_of_wait_is_found(text):
    """Negative controls; a reason beside it makes it one that is permitted."""
    assert found_in(text) == ({1}, set())
    assert found_in(f"# No deadline: because.\n{text}") == ({2}, {2})


@pytest.mark.parametrize(
    "text",
    [
        "', '.join(names)",
        "thread.join(5)",
        "table.get(name)",
        "lock.acquire(timeout=LOOK_S)",
        "lock.acquire(blocking=False)",
        "while clock.monotonic() < end:\n    time.sleep(1)",
        "while places:\n    table.get(places.pop())",
    ],
)
def test_what_ends_by_itself_is_not_found(text):
    assert found_in(text) == (set(), set())


def test_every_thread_of_ours_begins_in_the_boundary():
    """Whatever ends a thread is told; pools of threads hand it on in their results."""
    found = []
    for path, text in texts().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and called(node)[0] == "Thread":
                target = keywords(node).get("target")
                if getattr(target, "id", "") != "run_guarded":
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []
