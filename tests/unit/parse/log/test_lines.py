import pytest

from parse import log
from parse.log import encoding_problem, open_log, read_lines


@pytest.fixture
def read(tmp_path):
    def read(data):
        path = tmp_path / "a.log"
        path.write_bytes(data)
        with open_log(path) as file:
            return list(read_lines(file))

    return read


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_every_kind_of_line_end_ends_a_line(read, end):
    data = end.join([b"x", b"1 beta", b"", b"\xe6\x97\xa5", b"\xff last"])
    found = read(data)
    assert [line.number for line in found] == [1, 2, 3, 4, 5]
    assert [line.text for line in found] == ["x", "1 beta", "", "\u65e5", "\ufffd last"]
    assert [line.cut for line in found] == [False] * 4 + [True]
    assert [line.cut for line in read(data + end)] == [False] * 5
    assert read(b"") == []


@pytest.mark.parametrize("length", [50, 51, 99, 100, 400])
def test_an_overlong_line_is_said_and_the_next_one_read(monkeypatch, read, length):
    monkeypatch.setattr(log, "MAX_LINE_CHARACTERS", 50)
    found = read(b"1 alpha\n" + b"z" * length + b"\n3 beta\n")
    assert [(line.number, line.overlong) for line in found] == [(1, False), (2, True), (3, False)]
    assert [line.text for line in found] == ["1 alpha", "z" * 50, "3 beta"]
    assert [line.cut for line in read(b"z" * length)] == [True]
    assert [line.overlong for line in read(b"z" * 49 + b"\n")] == [False]


def test_colours_become_spaces(read):
    assert read(b"\x1b[1;32malpha\x1b[0m=1\n")[0].text == " alpha =1"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ("alpha\n".encode("utf-16"), True),
        ("alpha and more of it\n".encode("utf-16-be"), True),
        ("alpha and more of it\n".encode("utf-16-le"), True),
        ("\u65e5\u5fd7\n".encode("utf-16"), True),
        ("\ufeffalpha\n".encode(), False),
        (b"", False),
        (b"alpha of a log\n" * 40 + bytes(400), False),
    ],
)
def test_other_encodings_are_named(tmp_path, data, problem):
    path = tmp_path / "a.log"
    path.write_bytes(data)
    with open_log(path) as file:
        assert bool(encoding_problem(file)) is problem
        assert file.read() == data.decode(errors="replace")
