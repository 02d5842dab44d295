import io

import pytest

from dataset.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def bar():
    """A bar whose clock the test sets; it begins at 100 s."""
    bars = []

    def make(stream, total_bytes=1000, begun_bytes=0):
        bar = Progress("x", total_bytes, begun_bytes, stream)
        bar.now_s = bar.start_t = bar.last_print_t = 100.0
        bar._time = lambda: bar.now_s
        bars.append(bar)
        return bar

    yield make
    for one in bars:
        one.close()


def test_a_line_has_share_rate_and_time_left_of_this_run_alone(bar):
    stream = io.StringIO()
    one = bar(stream, 1_000_000_000, 200_000_000)
    one.now_s = 110.0
    one.reach(400_000_000, "a note")
    (line,) = stream.getvalue().splitlines()
    for part in ("x:  40%", "400M/1.00G", "00:10<00:30", "20.0MB/s", "a note"):
        assert part in line


def test_a_log_gets_plain_lines_and_not_too_many(bar):
    stream = io.StringIO()
    one = bar(stream)
    for done, one.now_s in ((10, 101.0), (20, 105.0), (30, 111.0), (40, 112.0), (500, 122.0)):
        one.reach(done, "a note")
    one.close()
    lines = stream.getvalue().splitlines()
    assert [line.partition("%")[0] for line in lines] == ["x:   3", "x:  50"]
    assert all(line.endswith(", a note]") for line in lines)
    assert "\r" not in stream.getvalue()


def test_a_short_step_says_nothing(bar):
    stream = io.StringIO()
    one = bar(stream)
    one.reach(1000, "done")
    one.close()
    assert stream.getvalue() == ""


def test_a_terminal_gets_one_line_that_is_cleared(bar):
    stream = Terminal()
    one = bar(stream)
    for done, one.now_s in ((10, 101.0), (20, 102.0)):
        one.reach(done, "a note")
    one.close()
    shown = stream.getvalue()
    assert "\n" not in shown
    assert [text.strip()[:6] for text in shown.split("\r")[1:3]] == ["x:   1", "x:   2"]
    assert shown.split("\r")[-2].strip() == ""
