"""Damaged logs: never a traceback, never a wrong number.

A number of the damaged log is the whole log's of the same iteration, or it is missing, or it is
what a damaged number itself says: a digit that became another cannot be known.
"""

import dataclasses
import math
import re
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from parse.log.read import read_log

AUTHORS = Path(__file__).resolve().parents[2] / ".." / "shared" / "data" / "logs"
GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "parse"
LOGS = sorted({*GOLDEN.rglob("*.log"), *AUTHORS.rglob("*.log")})
NUMBER = re.compile(rb"[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?")
TIME_S = 5.2e-5
"""How far the printed time of an iteration can be from the timer in full precision, in s."""
_known = {}


def read_bytes(name, data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(data)
        log = read_log(path)
        log.lines = len(data.splitlines())
        return log


def whole(path):
    """The bytes of a log, what it says, and where its interesting lines are."""
    if path not in _known:
        data = path.read_bytes()
        marks = (
            rb"TIMER:interval|time \(ms\)|elapsed|Max_MA|CPU Virtual|step=|number of param|world"
        )
        spots = [m.start() for m in re.finditer(marks, data)]
        _known[path] = data, read_bytes(path.name, data), spots
    return _known[path]


def said(data, positions):
    """Numbers of the damaged file that a damaged byte is a part of."""
    found = set()
    for position in positions:
        start = data.rfind(b"\n", 0, position) + 1
        line = data[start:].partition(b"\n")[0] if data[position] != 10 else data[start:position]
        for number in NUMBER.finditer(line):
            if number.start() - 1 <= position - start <= number.end():
                found.add(float(number[0]))
    return found


def same(a, b):
    return a == b or (isinstance(a, float) and isinstance(b, float) and math.isnan(a + b))


def wrong_numbers(log, original, own, hit):
    """Fields of the damaged log that are neither right, missing, nor in ``own``.

    A largest value may also become the second largest, where it was itself ``hit``.
    """
    own = own | {value * 1e-3 for value in own}
    expected = {record.iteration: record for record in original.iterations}
    for record in log.iterations:
        if record.iteration not in expected:
            yield "iteration", record.iteration, None
            continue
        truth = expected[record.iteration]
        for field in dataclasses.fields(record):
            value, right = getattr(record, field.name), getattr(truth, field.name)
            near = field.name == "iteration_s" and value and right and abs(value - right) < TIME_S
            second = field.name.endswith("_gib") and right in hit
            # A line whose counts of skipped and NaN iterations are damaged says another reason why
            # its loss is left out.
            skipped = field.name == "loss" and right is None and hit & {0.0, 1.0}
            if value is None or same(value, right) or near or second or skipped or value in own:
                continue
            yield field.name, value, right
    for name in ("world_size", "vocab_size", "parameters"):
        value, right = getattr(log, name), getattr(original, name)
        ranks_sum = name == "parameters" and any(number > 500 for number in hit)
        if value is not None and value != right and value not in own and not ranks_sum:
            yield name, value, right
    yield from wrong_memory(log, original, own)


def wrong_memory(log, original, own):
    shift = 2 + abs(log.lines - original.lines)
    figures = [f.name for f in dataclasses.fields(original.memory[0])] if original.memory else []
    figures = [name for name in figures if name.endswith(("_gib", "_percent", "iteration"))]
    expected = {line.line: line for line in original.memory}
    for line in log.memory:
        near = [
            expected[n] for n in range(line.line - shift, line.line + shift + 1) if n in expected
        ]
        rows = [[getattr(line, name) for name in figures]]
        for values in rows:
            right = any(
                all(
                    v is None or v == getattr(t, n) or v in own
                    for n, v in zip(figures, values, strict=True)
                )
                for t in near
            )
            if not right:
                yield "memory", values, line


def check(path, data, positions):
    text, original, _ = whole(path)
    log = read_bytes(path.name, data)
    positions = [p for p in positions if p < len(data)]
    own, hit = said(data, positions), said(text, positions)
    assert list(wrong_numbers(log, original, own, hit)) == []


places = st.tuples(st.integers(0, 10**6), st.integers(0, 260), st.booleans())
values = st.one_of(st.integers(0, 255), st.sampled_from(list(b"0123456789 .|:-\n\r\0eE<>")))


def position(place, data, spots):
    """A place in the file, twice of three times in an interesting line."""
    at, offset, anywhere = place
    return at % len(data) if anywhere else min(spots[at % len(spots)] + offset, len(data) - 1)


@pytest.mark.parametrize("part", range(3))
@settings(deadline=None, max_examples=80, derandomize=True)
@given(data=st.data())
def test_a_changed_byte_changes_no_other_number(part, data):
    path = data.draw(st.sampled_from(LOGS[part::3] or LOGS))
    text, _, spots = whole(path)
    at = position(data.draw(places), text, spots)
    damaged = bytearray(text)
    damaged[at] = data.draw(values)
    check(path, bytes(damaged), [at])


@settings(deadline=None, max_examples=100, derandomize=True)
@given(data=st.data())
def test_a_cut_and_a_changed_byte_change_no_other_number(data):
    path = data.draw(st.sampled_from(LOGS))
    text, _, spots = whole(path)
    at = position(data.draw(places), text, spots)
    cut = position(data.draw(places), text, spots)
    damaged = bytearray(text)
    damaged[at] = data.draw(values)
    check(path, bytes(damaged[:cut]), [at])


@settings(deadline=None, max_examples=100, derandomize=True)
@given(data=st.data())
def test_a_block_of_zeros_leaves_gaps_and_no_wrong_number(data):
    path = data.draw(st.sampled_from(LOGS))
    text, _, spots = whole(path)
    at = position(data.draw(places), text, spots)
    size = data.draw(st.sampled_from((1, 16, 512, 4096)))
    zeros = b"\0" * min(size, len(text) - at)
    check(path, text[:at] + zeros + text[at + size :], [at, at + len(zeros) - 1])
