import contextlib
import os
import secrets
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
from launch.process import supervise as module
from launch.process.supervise import (
    TOKEN_VARIABLE,
    Companion,
    Members,
    ProcessSpec,
    end_leftovers,
    supervise,
)
from launch.process.watch import ProgressWatch

PYTHON = sys.executable
TOKEN = secrets.token_hex(16)
SLEEPER = "import time; time.sleep(600)"
IGNORES_SIGTERM = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True)\n"
ORPHAN = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], start_new_session=True)
print(child.pid, flush=True)
"""


def run(code, tmp_path, echo=False, **more):
    log = tmp_path / "a.log"
    job = ProcessSpec([PYTHON, "-c", code], tmp_path, dict(os.environ), log, **more)
    return supervise(job, echo=echo), log


def wait_for_line(log):
    return wait_for(lambda: log.exists() and log.read_text().endswith("\n") and log.read_text())


@contextlib.contextmanager
def meanwhile(work):
    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join()


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
        monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(module, "ProgressWatch", lambda *given: ProgressWatch(*given, now))

    return install


@pytest.fixture
def no_grace(monkeypatch):
    """Whoever waits for the end of the grace waits for ever."""
    monkeypatch.setattr(module, "GRACE_S", 3600.0)


def test_exit_code_and_both_streams_are_kept_in_a_log_that_is_appended_to(tmp_path):
    (tmp_path / "a.log").write_text("before\n")
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"
    ending, log = run(code, tmp_path)
    assert (ending.exit_code, ending.stop_signal, ending.given_up) == (7, None, None)
    assert sorted(log.read_text().split()) == ["before", "err", "out"]
    assert ending.seconds > 0
    assert ending.oom_kills in (None, 0)


def test_a_process_left_behind_in_its_own_session_is_ended(tmp_path, sleeper):
    ending, log = run(ORPHAN, tmp_path)
    assert ending.exit_code == 0
    assert not is_alive(int(log.read_text()))
    assert sleeper.poll() is None


def test_a_run_that_ignores_sigterm_is_killed_after_the_grace(tmp_path, monkeypatch, leap):
    monkeypatch.setattr(module, "GRACE_S", 0.5)
    log = tmp_path / "a.log"
    leap(lambda: 100.0 if log.exists() and log.read_text() else 0.0)
    ending, _ = run(IGNORES_SIGTERM + SLEEPER, tmp_path, timeout_s=1800)
    assert (ending.given_up[0], ending.exit_code) == ("timeout", 137)


@pytest.mark.own_process
def test_a_hangup_ends_the_run_and_nothing_else(tmp_path, sleeper):
    log = tmp_path / "a.log"

    def hang_up():
        wait_for_line(log)
        os.kill(os.getpid(), signal.SIGHUP)

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup have it ignored
    with meanwhile(hang_up):
        ending, _ = run(ORPHAN + SLEEPER, tmp_path)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    assert ending.stop_signal == signal.SIGHUP
    assert not is_alive(int(log.read_text()))
    assert is_alive(sleeper.pid)


@pytest.mark.own_process
def test_an_ignored_hangup_stays_ignored(tmp_path):
    log, sent = tmp_path / "a.log", tmp_path / "sent"
    code = "import pathlib, time; print(flush=True)\n"
    code += "while not pathlib.Path('sent').exists(): time.sleep(0.02)"

    def hang_up():
        wait_for_line(log)
        os.kill(os.getpid(), signal.SIGHUP)
        sent.touch()

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with meanwhile(hang_up):
        ending, _ = run(code, tmp_path)
    assert (ending.exit_code, ending.stop_signal) == (0, None)


def test_echo_copies_the_whole_log_to_standard_output(tmp_path, capfd):
    code = "import sys; [print('line', i, flush=True) for i in range(500)]; print('end')"
    _, log = run(code, tmp_path, echo=True)
    assert capfd.readouterr().out == log.read_text()


def test_the_run_goes_on_when_the_reader_of_the_echo_has_gone(tmp_path):
    program = (
        "import os, pathlib, sys; from launch.process.supervise import ProcessSpec, supervise;"
        f"j = ProcessSpec([{PYTHON!r}, '-c', 'import time;[print(i, time.sleep(0.05), flush=True)"
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
    assert "39 None" in (tmp_path / "a.log").read_text()


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
    job = ProcessSpec(
        [PYTHON, "-c", code], tmp_path, {}, tmp_path / "a.log", metrics=metrics, hang_s=60
    )
    assert "after iteration 1;" in supervise(job, beside).given_up[1]


def test_a_stopped_run_is_ended_as_a_hang(tmp_path, leap, no_grace):
    """SIGTERM reaches it at once."""
    log = tmp_path / "a.log"

    def is_stopped():
        text = log.read_text() if log.exists() else ""
        return text.count("\n") == 1 and psutil.Process(int(text)).status() == "stopped"

    leap(lambda: 10.0 if is_stopped() else 0.0)
    code = "import faulthandler, os, signal; faulthandler.register(signal.SIGUSR1)\n"
    code += "print(os.getpid(), flush=True); os.kill(0, signal.SIGSTOP)"
    ending, _ = run(code, tmp_path, hang_s=60)
    assert ending.given_up[0] == "hang"
    assert "state T (stopped)" in log.read_text()
    assert "cannot show its stacks" in log.read_text()  # it would not answer


def test_a_hang_shows_where_each_process_stands(tmp_path, leap):
    log = tmp_path / "a.log"
    leap(lambda: 10.0 if log.exists() and log.read_text() else 0.0)
    code = "import faulthandler, signal, time; faulthandler.register(signal.SIGUSR1)\n"
    code += "def wait_for_ever():\n    print('waits', flush=True); time.sleep(600)\nwait_for_ever()"
    ending, _ = run(code, tmp_path, hang_s=60)
    assert ending.given_up[0] == "hang"
    assert "state S (sleeping)" in log.read_text()
    assert "in wait_for_ever" in log.read_text()


@pytest.fixture
def beside(tmp_path):
    """A companion that runs the given code."""

    def make(code):
        ready = tmp_path / "ready"
        begin = f"import pathlib, signal, time; ready = pathlib.Path({str(ready)!r})\n"
        return (Companion("the other", [PYTHON, "-c", begin + code], ready),)

    return make


def test_a_companion_is_ready_first_and_ends_with_sigterm_after_the_run(tmp_path, beside):
    others = beside(
        "signal.signal(15, lambda *_: (ready.write_text('ended'), exit(0)))\n"
        "time.sleep(0.5); ready.touch(); time.sleep(600)"
    )
    code = "import pathlib; print(pathlib.Path('ready').exists())"
    ending, log = run(code, tmp_path, companions=others)
    assert (ending.exit_code, ending.given_up) == (0, None)
    assert log.read_text() == "True\n"
    assert others[0].ready.read_text() == "ended"


def test_a_companion_that_never_gets_ready_fails_the_run_by_name(tmp_path, beside):
    others = beside("print('no such device', flush=True); exit(3)")
    ending, log = run("print('ran')", tmp_path, companions=others)
    assert ending.exit_code != 0
    assert ending.given_up == ("failed", "the other ended before it was ready, exit code 3")
    assert log.read_text() == "no such device\n"


def test_a_companion_that_ends_before_the_run_fails_it_by_name(tmp_path, beside, no_grace):
    ending, _ = run(SLEEPER, tmp_path, companions=beside("ready.touch(); exit(5)"))
    assert ending.given_up == ("failed", "the other ended before the run did, exit code 5")
    assert ending.exit_code == 128 + signal.SIGTERM


@pytest.mark.own_process
def test_a_signal_while_a_companion_gets_ready_ends_it(tmp_path, beside):
    def terminate():
        wait_for_line(tmp_path / "a.log")
        os.kill(os.getpid(), signal.SIGTERM)

    with meanwhile(terminate):
        others = beside("print('waits', flush=True); time.sleep(600)")
        ending, log = run("print('ran')", tmp_path, companions=others)
    assert (ending.stop_signal, ending.given_up) == (signal.SIGTERM, None)
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
    supervise(ProcessSpec([PYTHON, "-c", code], tmp_path, {}, tmp_path / "a.log"), beside)
    assert (len(seen[0]), seen[1]) == (1, [])


def started(token=TOKEN):
    environment = {**os.environ, TOKEN_VARIABLE: token}
    return subprocess.Popen([PYTHON, "-c", SLEEPER], env=environment, start_new_session=True)


@pytest.fixture
def leftover():
    """A process of a run whose driver is gone."""
    process = started()
    yield process
    process.kill()
    process.wait()


def test_a_stopped_leftover_is_ended_without_waiting_for_the_grace(leftover, no_grace):
    stopped = psutil.Process(leftover.pid)
    stopped.suspend()
    wait_for(lambda: stopped.status() == psutil.STATUS_STOPPED)
    end_leftovers(TOKEN)
    assert leftover.wait() == -15


@pytest.mark.parametrize("token", ["", ":", "x", "*", "0" * 31, "../../etc"])
def test_what_is_no_token_ends_nothing(leftover, sleeper, monkeypatch, token):
    # Whatever breaks, this test can reach no process but its own two.
    own = [psutil.Process(leftover.pid), psutil.Process(sleeper.pid)]
    monkeypatch.setattr(psutil, "process_iter", lambda: own)
    assert end_leftovers(token) == []
    assert [process.status() != psutil.STATUS_ZOMBIE for process in own] == [True, True]
    with pytest.raises(ValueError, match="token"):
        Members(token)
    members = Members(TOKEN)
    members._token = ""  # even so
    assert members.all() == []


def test_a_sample_sees_processes_come_and_go(leftover):
    members = Members(TOKEN)
    assert [member.pid for member in members.sample()] == [leftover.pid]
    other = started()
    try:
        both = {leftover.pid, other.pid}
        assert wait_for(lambda: {member.pid for member in members.sample()} == both)
    finally:
        other.kill()
        other.wait()
    assert [member.pid for member in members.sample()] == [leftover.pid]


@pytest.mark.parametrize(("age_s", "seen"), [(0.5, True), (1.5, False)])
def test_a_young_stranger_is_asked_again_and_an_old_one_is_not(leftover, monkeypatch, age_s, seen):
    process = psutil.Process(leftover.pid)
    answers = iter([False, True])  # it had not loaded its program when it was looked at first
    monkeypatch.setattr(Members, "_has", lambda self, one: next(answers))
    monkeypatch.setattr(psutil, "process_iter", lambda: [process])
    monkeypatch.setattr(process, "create_time", lambda: time.time() - age_s)
    members = Members(TOKEN)
    assert members.sample() == []
    assert members.sample() == ([process] if seen else [])
