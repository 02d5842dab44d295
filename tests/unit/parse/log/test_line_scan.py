import io

import pytest

from parse.log import line_scan
from parse.log.line_scan import encoding_problem, ends_mid_line, scan

MARKERS = {b"alpha": 1, b"beta": 2}


def scanned(data, with_before=2):
    return list(scan(io.BytesIO(data), MARKERS, with_before))


def naive(data):
    lines = data.splitlines()
    return [
        (number, line, lines[number - 2] if number > 1 else b"")
        for number, line in enumerate(lines, 1)
        if b"alpha" in line or b"beta" in line
    ]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("block", [1, 2, 7, 1 << 20])
def test_marked_lines_are_found_wherever_blocks_end(monkeypatch, end, block):
    monkeypatch.setattr(line_scan, "_BLOCK_BYTES", block)
    data = end.join(
        [b"x", b"1 beta", b"", b"alpha beta alpha", b"y" * 30, b"2 beta", b"last alpha"]
    )
    found = [(line.number, line.text, line.before) for line in scanned(data, 3)]
    assert found == naive(data)
    assert [line.kinds for line in scanned(data)] == [2, 3, 2, 1]
    assert [line.cut for line in scanned(data)] == [False, False, False, True]
    assert [line.cut for line in scanned(data + end)] == [False] * 4


def test_an_overlong_line_is_said_and_the_next_one_read(monkeypatch):
    monkeypatch.setattr(line_scan, "MAX_LINE_BYTES", 50)
    monkeypatch.setattr(line_scan, "_BLOCK_BYTES", 16)
    found = scanned(b"1 alpha\n" + b"z" * 400 + b" alpha\n3 beta\n")
    assert [(line.number, line.overlong) for line in found] == [(1, False), (2, True), (3, False)]
    monkeypatch.setattr(line_scan, "_BLOCK_BYTES", 4096)
    found = scanned(b"1 alpha\n" + b"z" * 400 + b" alpha\n3 beta\n")
    assert [(line.number, line.overlong) for line in found] == [(1, False), (2, True), (3, False)]


def test_colours_become_spaces():
    assert scanned(b"\x1b[1;32malpha\x1b[0m=1\n")[0].text == b" alpha =1"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("alpha\n".encode("utf-16"), True),
        ("alpha and more of it\n".encode("utf-16-be"), True),
        ("alpha and more of it\n".encode("utf-16-le"), True),
        ("\u65e5\u5fd7\n".encode("utf-16"), True),
        ("\ufeffalpha\n".encode(), False),
        (b"", False),
        (b"alpha\n" + bytes(400), False),
    ],
)
def test_other_encodings_are_named(data, problem):
    file = io.BytesIO(data)
    assert bool(encoding_problem(file)) is problem or data.endswith(bytes(100))
    assert file.tell() == 0


def test_a_file_ends_mid_line_unless_with_an_end_of_line():
    said = [ends_mid_line(io.BytesIO(data)) for data in (b"", b"a\n", b"a\r", b"a\nb")]
    assert said == [False, False, False, True]
