import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
from processes import is_alive, wait_for

from configs.files import ROOT
from launch.process import members as module, supervise as supervisor, watch
from launch.process.supervise import Companion, Job, Limits, supervise
from launch.process.watch import ProgressWatch

PYTHON = sys.executable
SLEEPER = "import time; time.sleep(600)"
IGNORES_SIGTERM = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True)\n"
ORPHAN = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], start_new_session=True)
print(child.pid, flush=True)
"""


def run(code, tmp_path, echo=False, **limits):
    log = tmp_path / "a.log"
    job = Job([PYTHON, "-c", code], tmp_path, dict(os.environ), log)
    return supervise(job, Limits(**limits), echo=echo), log


def wait_for_line(log):
    return wait_for(lambda: log.exists() and log.read_text().endswith("\n") and log.read_text())


@pytest.fixture
def leap(monkeypatch):
    """``leap(seconds)`` says how far the supervisor's clock leaps ahead at each look at it.

    Python may take any time to start on a busy machine: what a limit means is seen by letting no
    time pass before the run is where the test wants it, and then a lot at once.
    """

    def install(seconds):
        leapt_s = [0.0]

        def now():
            leapt_s[0] += seconds()
            return time.monotonic() + leapt_s[0]

        clock = SimpleNamespace(monotonic=now, sleep=time.sleep)
        monkeypatch.setattr(supervisor, "time", clock)
        monkeypatch.setattr(supervisor, "ProgressWatch", lambda *given: ProgressWatch(*given, now))

    return install


@pytest.fixture
def no_grace(monkeypatch):
    """Whoever waits for the end of the grace waits for ever."""
    monkeypatch.setattr(module, "GRACE_S", 3600.0)


def test_exit_code_and_both_streams_are_kept(tmp_path):
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"
    ending, log = run(code, tmp_path)
    assert (ending.exit_code, ending.stop_signal, ending.timed_out) == (7, None, False)
    assert sorted(log.read_text().split()) == ["err", "out"]
    assert ending.seconds > 0


def test_death_by_signal_is_128_plus_the_signal(tmp_path):
    ending, _ = run("import os; os.kill(os.getpid(), 9)", tmp_path)
    assert ending.exit_code == 137


def test_a_log_is_appended_to(tmp_path):
    (tmp_path / "a.log").write_text("before\n")
    _, log = run("print('after')", tmp_path)
    assert log.read_text() == "before\nafter\n"


def test_a_process_left_behind_in_its_own_session_is_ended(tmp_path, sleeper):
    ending, log = run(ORPHAN, tmp_path)
    assert ending.exit_code == 0
    assert not is_alive(int(log.read_text()))
    assert sleeper.poll() is None


def test_a_process_of_the_run_is_not_spared_by_an_inner_run(tmp_path):
    inner = (
        "import os, pathlib, threading, time;"
        "from launch.process.supervise import Job, supervise;"
        "here = pathlib.Path('.'); log = here / 'inner.log';"
        f"a = Job([{PYTHON!r}, '-c', 'import os; print(os.getpid(), flush=True); ' + {SLEEPER!r}],"
        "here, dict(os.environ), log); threading.Thread(target=supervise, args=(a,)).start()\n"
        "while not log.exists() or not log.read_text(): time.sleep(0.02)\n"
        "os._exit(3)"  # the inner supervisor dies before it can end anything
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ending = supervise(Job([PYTHON, "-c", inner], tmp_path, environment, tmp_path / "a.log"))
    assert ending.exit_code == 3
    assert not is_alive(int((tmp_path / "inner.log").read_text()))


def test_a_run_has_a_session_of_its_own_so_that_the_terminals_ctrl_c_reaches_us_alone(tmp_path):
    _, log = run("import os; print(os.getsid(0) == os.getpid())", tmp_path)
    assert log.read_text() == "True\n"


def test_the_time_limit_ends_the_run_and_all_it_started(tmp_path, sleeper, leap):
    log = tmp_path / "a.log"
    leap(lambda: 100.0 if log.exists() and log.read_text().endswith("\n") else 0.0)
    ending, _ = run(ORPHAN + "import time; time.sleep(600)", tmp_path, timeout_s=1800)
    assert ending.timed_out
    assert ending.seconds >= 1800
    assert not is_alive(int(log.read_text()))
    assert sleeper.poll() is None


def test_a_run_that_ignores_sigterm_is_killed_after_the_grace(tmp_path, monkeypatch, leap):
    monkeypatch.setattr(module, "GRACE_S", 0.5)
    log = tmp_path / "a.log"
    leap(lambda: 100.0 if log.exists() and log.read_text() else 0.0)
    ending, _ = run(IGNORES_SIGTERM + SLEEPER, tmp_path, timeout_s=1800)
    assert ending.timed_out
    assert ending.exit_code == 137


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.own_process
def test_a_signal_to_us_ends_the_run_and_nothing_else(tmp_path, sleeper, number):
    log = tmp_path / "a.log"

    def interrupt():
        wait_for_line(log)
        os.kill(os.getpid(), number)

    before = signal.signal(number, signal.SIG_DFL)  # tests under nohup have SIGHUP ignored
    try:
        thread = threading.Thread(target=interrupt)
        thread.start()
        ending, _ = run(ORPHAN + "import time; time.sleep(600)", tmp_path)
        thread.join()
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert ending.stop_signal == number
    assert not is_alive(int(log.read_text()))
    assert is_alive(sleeper.pid)


@pytest.mark.own_process
def test_a_second_signal_does_not_wait_for_the_grace(tmp_path, no_grace):
    log = tmp_path / "a.log"
    code = (
        "import signal, time; signal.signal(15, lambda *_: print('told', flush=True))\n"
        "print('begun', flush=True); time.sleep(600)"
    )

    def interrupt_twice():
        for words in ("begun\n", "begun\ntold\n"):
            wait_for(lambda words=words: log.exists() and log.read_text() == words)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_twice)
    thread.start()
    ending, _ = run(code, tmp_path)
    thread.join()
    assert (ending.exit_code, ending.stop_signal) == (137, signal.SIGINT)


@pytest.mark.own_process
def test_an_ignored_hangup_stays_ignored(tmp_path):
    log, sent = tmp_path / "a.log", tmp_path / "sent"
    code = "import pathlib, time; print(flush=True)\n"
    code += "while not pathlib.Path('sent').exists(): time.sleep(0.02)"

    def hang_up():
        wait_for_line(log)
        os.kill(os.getpid(), signal.SIGHUP)
        sent.touch()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        thread = threading.Thread(target=hang_up)
        thread.start()
        ending, _ = run(code, tmp_path)
        thread.join()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (ending.exit_code, ending.stop_signal) == (0, None)


def test_echo_copies_the_whole_log_to_standard_output(tmp_path, capfd):
    code = "import sys; [print('line', i, flush=True) for i in range(500)]; print('end')"
    _, log = run(code, tmp_path, echo=True)
    assert capfd.readouterr().out == log.read_text()


def test_the_run_goes_on_when_the_reader_of_the_echo_has_gone(tmp_path):
    program = (
        "import os, pathlib, sys; from launch.process.supervise import Job, supervise;"
        f"j = Job([{PYTHON!r}, '-c', 'import time;[print(i, time.sleep(0.05), flush=True)"
        " for i in range(40)]'], pathlib.Path('.'), dict(os.environ), pathlib.Path('a.log'));"
        "sys.exit(40 + supervise(j, echo=True).exit_code)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [PYTHON, "-c", program], cwd=tmp_path, env=environment, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.wait() == 40
    assert (tmp_path / "a.log").read_text().startswith("0 None")
    assert "39 None" in (tmp_path / "a.log").read_text()


WORKS = "import time\nfor i in range(30): print(i, flush=True); time.sleep(0.1)\n"
HANGS = """
import faulthandler, signal, time
faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
print("begun", flush=True)
def stuck_here(): time.sleep(600)
stuck_here()
"""


def test_a_run_without_progress_shows_its_stacks_and_is_ended(tmp_path, sleeper, leap, monkeypatch):
    monkeypatch.setattr(watch, "ANSWER_S", 60.0)
    monkeypatch.setattr(watch, "QUIET_S", 2.0)
    log = tmp_path / "a.log"
    leap(lambda: 10.0 if log.exists() and log.read_text().endswith("begun\n") else 0.0)
    ending, _ = run(ORPHAN + HANGS, tmp_path, hang_s=60)
    assert ending.stall.limit_s == 60
    assert ending.stall.iterations == 0
    assert 60 <= ending.stall.idle_s < 63  # an hour without a look would count as 2 s
    assert not ending.timed_out
    text = log.read_text()
    assert "[launch] no progress for" in text
    assert "in stuck_here" in text
    orphan = int(text.split()[0])
    assert f"[launch] process {orphan} (" in text  # it does not answer, and is still accounted for
    assert not is_alive(orphan)
    assert sleeper.poll() is None


def test_an_iteration_before_the_first_look_is_counted(tmp_path, leap):
    metrics = tmp_path / "metrics.jsonl"

    def is_written():
        return metrics.exists() and metrics.read_text().endswith("\n")

    @contextlib.contextmanager
    def beside(_):
        wait_for(is_written)
        yield

    event = '{"event": "iteration", "iteration_ms": 5.0}'
    code = f"open('metrics.jsonl', 'w').write({event + chr(10)!r})\n{SLEEPER}"
    leap(lambda: 10.0 if is_written() else 0.0)
    job = Job([PYTHON, "-c", code], tmp_path, {}, tmp_path / "a.log", metrics=metrics)
    assert supervise(job, Limits(hang_s=60), beside=beside).stall.iterations == 1


def test_a_run_that_writes_is_not_hung(tmp_path, leap):
    log, seen = tmp_path / "a.log", [0]

    def two_seconds_a_line():
        before, seen[0] = seen[0], log.read_text().count("\n") if log.exists() else 0
        return 2.0 * (seen[0] - before)

    leap(two_seconds_a_line)
    ending, _ = run(WORKS, tmp_path, hang_s=30)
    assert (ending.exit_code, ending.stall) == (0, None)
    assert ending.seconds > 60


def test_a_stopped_run_is_ended_as_a_hang(tmp_path, leap, no_grace):
    """SIGTERM reaches it at once."""
    log = tmp_path / "a.log"

    def is_stopped():
        text = log.read_text() if log.exists() else ""
        return text.count("\n") == 1 and psutil.Process(int(text)).status() == "stopped"

    leap(lambda: 10.0 if is_stopped() else 0.0)
    code = "import os, signal; print(os.getpid(), flush=True); os.kill(0, signal.SIGSTOP)"
    ending, _ = run(code, tmp_path, hang_s=60)
    assert ending.stall is not None
    assert "state T (stopped)" in log.read_text()


def companion(tmp_path, code):
    ready = tmp_path / "ready"
    begin = f"import pathlib, signal, time; ready = pathlib.Path({str(ready)!r})\n"
    return Companion("the helper", [PYTHON, "-c", begin + code], ready)


def run_with(helper, code, tmp_path):
    log = tmp_path / "a.log"
    job = Job([PYTHON, "-c", code], tmp_path, dict(os.environ), log, companions=[helper])
    return supervise(job), log


def test_a_companion_is_ready_first_and_ends_with_sigterm_after_the_run(tmp_path):
    helper = companion(
        tmp_path,
        "signal.signal(15, lambda *_: (ready.write_text('ended'), exit(0)))\n"
        "time.sleep(0.5); ready.touch(); time.sleep(600)",
    )
    code = "import pathlib; print(pathlib.Path('ready').exists())"
    ending, log = run_with(helper, code, tmp_path)
    assert (ending.exit_code, ending.companion) == (0, "")
    assert log.read_text() == "True\n"
    assert helper.ready.read_text() == "ended"


def test_a_companion_that_never_gets_ready_fails_the_run_by_name(tmp_path):
    helper = companion(tmp_path, "print('no such device', flush=True); exit(3)")
    ending, log = run_with(helper, "print('ran')", tmp_path)
    assert ending.exit_code != 0
    assert ending.companion == "the helper ended before it was ready, exit code 3"
    assert log.read_text() == "no such device\n"


def test_a_companion_that_dies_ends_the_run_by_name(tmp_path, no_grace):
    helper = companion(
        tmp_path,
        "ready.touch()\nwhile not pathlib.Path('runs').exists(): time.sleep(0.02)\n"
        "signal.raise_signal(9)",
    )
    ending, _ = run_with(helper, f"open('runs', 'w'); {SLEEPER}", tmp_path)
    assert ending.companion == "the helper ended before the run did, exit code 137"


@pytest.mark.own_process
def test_a_signal_while_a_companion_gets_ready_ends_it(tmp_path):
    helper = companion(tmp_path, "print('waits', flush=True); time.sleep(600)")

    def terminate():
        wait_for_line(tmp_path / "a.log")
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=terminate)
    thread.start()
    ending, log = run_with(helper, "print('ran')", tmp_path)
    thread.join()
    assert ending.stop_signal == signal.SIGTERM
    assert log.read_text() == "waits\n"


def test_what_runs_beside_sees_the_runs_processes(tmp_path):
    seen = []

    @contextlib.contextmanager
    def beside(members):
        seen.append([process.pid for process in members.all()])
        (tmp_path / "seen").touch()
        yield
        seen.append([process.pid for process in members.all()])

    code = "import pathlib, time\nwhile not pathlib.Path('seen').exists(): time.sleep(0.02)"
    job = Job([PYTHON, "-c", code], tmp_path, {}, tmp_path / "a.log")
    supervise(job, beside=beside)
    assert len(seen[0]) == 1
    assert seen[1] == []
