import io
from types import SimpleNamespace

import pytest

from launch.process.live import PLAIN_S, LiveLine, fitted
from launch.process.watch import LOOK_S, ProgressWatch

GIB = 2**30
EVENT = {"iteration": 7, "loss": 8.12345, "host_memory_bytes": GIB, "device_memory_bytes": 2 * GIB}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def watched(has_begun=True, iteration=None, times_ms=()):
    return SimpleNamespace(has_begun=has_begun, iteration=iteration or {}, times_ms=list(times_ms))


@pytest.fixture
def clock():
    return SimpleNamespace(s=0.0)


def line(clock, out, later_s=None):
    return LiveLine("[2/3] tiny stride", 10, later_s, out, lambda: clock.s)


def test_a_file_gets_a_line_every_ten_seconds_and_a_terminal_one_that_changes(clock):
    plain, terminal = io.StringIO(), Terminal()
    lines = [line(clock, out) for out in (plain, terminal)]
    for _ in range(int(3 * PLAIN_S / LOOK_S)):
        clock.s += LOOK_S
        for one in lines:
            one(watched(has_begun=False))
    for one in lines:
        one.close()
    before = "[2/3] tiny stride: ranks import, and build model and engine: {} s\n"
    assert plain.getvalue() == "".join(map(before.format, (10, 20, 30)))
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().count("\r") == 3 * PLAIN_S / LOOK_S + 1
    assert terminal.getvalue().endswith("\r\x1b[K")  # it is taken away


def said(clock, watch, later_s=None):
    out = io.StringIO()
    show = line(clock, out, later_s)
    clock.s += PLAIN_S
    show(watch)
    return out.getvalue().partition(": ")[2].rstrip()


def test_it_says_iteration_loss_times_memory_and_what_is_left(clock):
    assert said(clock, watched()) == "first iteration: 10 s"
    assert said(clock, watched(iteration=EVENT, times_ms=[9000, 2000, 2010]), 60) == (
        "7/10, loss 8.123, 2010 ms (median 2010), host 1.0, device 2.0 GiB, left 6 s, sweep 66 s"
    )
    of_a_log = watched(times_ms=[31.25])  # a trainer that writes no metrics
    assert said(clock, of_a_log) == "1/10, 31.2 ms (median 31.2), left 0 s"
    assert "loss nan" in said(
        clock, watched(iteration={"loss": None, "loss_text": "nan"}, times_ms=[1])
    )


def test_a_long_name_is_cut_and_never_the_figures():
    assert fitted("x" * 120, "7/10, loss 8", 100) == f"{'x' * 85}…: 7/10, loss 8"
    assert len(fitted("x" * 120, "y" * 130, 100)) == 100


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), UnicodeEncodeError("ascii", "…", 0, 1, "not in it")]
)
def test_a_reader_who_has_gone_or_takes_no_such_letter_does_not_end_the_run(clock, error):
    class Gone(Terminal):
        def write(self, text):
            raise error

    show = line(clock, Gone())
    show(watched())
    show.close()


def test_the_watch_reads_what_is_shown_from_the_metrics(tmp_path):
    clock = SimpleNamespace(s=0.0)
    metrics = tmp_path / "metrics.jsonl"
    watch = ProgressWatch(tmp_path / "log", metrics, None, lambda: clock.s)
    for text, shown in (
        ('{"event": "start"}\n', (True, {}, [])),
        ('{"event": "iteration", "iteration": 1, "iteration_ms": 5.0, "loss": 2.5}\nno json\n',
         (True, 2.5, [5.0])),
    ):  # fmt: skip
        with metrics.open("a") as file:
            file.write(text)
        clock.s += 1
        watch.look()
        loss = watch.iteration.get("loss", {})
        assert (watch.has_begun, loss, watch.times_ms) == shown


@pytest.mark.parametrize("value", ['"many"', "[1]", "null", "true", "1" + "0" * 400])
def test_what_another_trainer_writes_into_the_metrics_does_not_end_the_run(clock, tmp_path, value):
    metrics = tmp_path / "metrics.jsonl"
    watch = ProgressWatch(tmp_path / "log", metrics, None, lambda: clock.s)
    names = ("iteration", "iteration_ms", "loss", "loss_text", "host_memory_bytes")
    fields = ", ".join(f'"{name}": {value}' for name in names)
    metrics.write_text(f'{{"event": "iteration", {fields}}}\n')
    clock.s += 1
    watch.look()
    text = "many, " if value == '"many"' else ""
    assert (
        said(clock, watch) == f"1/10, {'loss ' if text else ''}{text}0.0 ms (median 0.0), left 0 s"
    )
