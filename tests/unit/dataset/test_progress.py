import io

from dataset import progress
from dataset.progress import Progress, duration, progress_line


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_line_has_share_rate_and_time_left_of_this_run_alone():
    line = progress_line("encoding", 400_000_000, 1_000_000_000, 200_000_000, 10.0)
    assert line == "encoding: 40% of 1,000.0 MB, 20.0 MB/s, 0:30 left"


def test_without_a_total_or_a_rate_nothing_is_made_up():
    assert progress_line("x", 3_000_000, None, 0, 2.0) == "x: 3.0 MB, 1.5 MB/s"
    assert progress_line("x", 0, 10_000_000, 0, 1.0).endswith("unknown left")
    assert progress_line("x", 0, 0, 0, 1.0).startswith("x: 100%")


def test_durations_read_like_a_clock():
    assert [duration(s) for s in (0, 61, 3661, -4)] == ["0:00", "1:01", "1:01:01", "0:00"]


def test_a_log_gets_plain_lines_and_not_too_many(monkeypatch):
    clock = iter([100.0, 101.0, 105.0, 111.0, 112.0, 122.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    bar = Progress("x", 100, stream=stream)
    for _ in range(5):
        bar.update(50, "a note")
    bar.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert all(line.startswith("x: 50%") and line.endswith(", a note") for line in lines)


def test_a_terminal_gets_one_line_that_is_cleared(monkeypatch):
    stream = Terminal()
    bar = Progress("x", 100, stream=stream, interval_s=0)
    bar.update(10, "a longer note")
    bar.update(20)
    bar.close()
    shown = stream.getvalue()
    assert "\n" not in shown
    first, second, blank = shown.split("\r")[1:4]
    assert len(second) == len(first)  # the longer line is painted over
    assert blank.strip() == ""
