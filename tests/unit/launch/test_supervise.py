import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from launch import supervise as module
from launch.supervise import supervise

PYTHON = sys.executable
SLEEPER = "import time; time.sleep(600)"
ORPHAN = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}], start_new_session=True)
print(child.pid, flush=True)
"""


def run(code, tmp_path, **options):
    log = tmp_path / "a.log"
    command = [PYTHON, "-c", code]
    return supervise(command, tmp_path, dict(os.environ), log, **options), log


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def is_alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


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
        "import os, pathlib, threading, time; from launch.supervise import supervise;"
        "here = pathlib.Path('.'); log = here / 'inner.log';"
        f"a = ([{PYTHON!r}, '-c', 'import os; print(os.getpid(), flush=True); ' + {SLEEPER!r}],"
        "here, dict(os.environ), log); threading.Thread(target=supervise, args=a).start()\n"
        "while not log.exists() or not log.read_text(): time.sleep(0.02)\n"
        "os._exit(3)"  # the inner supervisor dies before it can end anything
    )
    environment = {**os.environ, "PYTHONPATH": str(module.Path(module.__file__).parents[1])}
    ending = supervise([PYTHON, "-c", inner], tmp_path, environment, tmp_path / "a.log")
    assert ending.exit_code == 3
    assert not is_alive(int((tmp_path / "inner.log").read_text()))


def test_a_run_has_a_session_of_its_own_so_that_the_terminals_ctrl_c_reaches_us_alone(tmp_path):
    _, log = run("import os; print(os.getsid(0) == os.getpid())", tmp_path)
    assert log.read_text() == "True\n"


def test_the_time_limit_ends_the_run_and_all_it_started(tmp_path, sleeper):
    ending, log = run(ORPHAN + "import time; time.sleep(600)", tmp_path, timeout_s=1.5)
    assert ending.timed_out
    assert 1.5 <= ending.seconds < 9
    assert not is_alive(int(log.read_text()))
    assert sleeper.poll() is None


def test_a_run_that_ignores_sigterm_is_killed_after_the_grace(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GRACE_S", 0.5)
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    ending, _ = run(code, tmp_path, timeout_s=1.0)
    assert ending.timed_out
    assert ending.exit_code == 137


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_us_ends_the_run_and_nothing_else(tmp_path, sleeper, number):
    log = tmp_path / "a.log"

    def interrupt():
        wait_for(lambda: log.exists() and log.read_text().endswith("\n"))
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    thread = threading.Thread(target=interrupt)
    thread.start()
    ending, _ = run(ORPHAN + "import time; time.sleep(600)", tmp_path)
    thread.join()
    assert ending.stop_signal == number
    assert not is_alive(int(log.read_text()))
    assert sleeper.poll() is None
    assert signal.getsignal(number) == before


def test_a_second_signal_does_not_wait_for_the_grace(tmp_path):
    log = tmp_path / "a.log"
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True)\n"

    def interrupt_twice():
        wait_for(lambda: log.exists() and log.read_text().endswith("\n"))
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_twice)
    thread.start()
    ending, _ = run(code + "time.sleep(600)", tmp_path)
    thread.join()
    assert ending.seconds < module.GRACE_S / 2


def test_an_ignored_hangup_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGHUP))
        timer.start()
        ending, _ = run("import time; time.sleep(1)", tmp_path)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (ending.exit_code, ending.stop_signal) == (0, None)


def test_echo_copies_the_whole_log_to_standard_output(tmp_path, capfd):
    code = "import sys; [print('line', i, flush=True) for i in range(500)]; print('end')"
    _, log = run(code, tmp_path, echo=True)
    assert capfd.readouterr().out == log.read_text()


def test_the_run_goes_on_when_the_reader_of_the_echo_has_gone(tmp_path):
    program = (
        "import os, pathlib, sys; from launch.supervise import supervise;"
        f"e = supervise([{PYTHON!r}, '-c', 'import time;[print(i, time.sleep(0.05), flush=True)"
        " for i in range(40)]'], pathlib.Path('.'), dict(os.environ), pathlib.Path('a.log'),"
        "echo=True); sys.exit(40 + e.exit_code)"
    )
    environment = {**os.environ, "PYTHONPATH": str(module.Path(module.__file__).parents[1])}
    process = subprocess.Popen(
        [PYTHON, "-c", program], cwd=tmp_path, env=environment, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    process.stdout.close()
    assert process.wait() == 40
    assert (tmp_path / "a.log").read_text().startswith("0 None")
    assert "39 None" in (tmp_path / "a.log").read_text()
