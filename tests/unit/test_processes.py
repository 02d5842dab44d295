"""The plugin that ends what tests start, in a pytest of its own whose tests fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import is_alive

SUPPORT = Path(__file__).resolve().parents[1] / "support"
ORPHAN = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(sys.argv[1], f"{os.getpid()}.pid").touch()
time.sleep(600)
"""
LEAVES_AN_ORPHAN = """
import subprocess, sys
subprocess.Popen([sys.executable, "orphan.py", sys.argv[1]], start_new_session=True)
"""
CHILD = """
import os, pathlib, signal, subprocess, sys
handler = signal.getsignal(signal.SIGINT)
pathlib.Path(sys.argv[1], "hears").write_text(str(handler == signal.default_int_handler))
subprocess.run([sys.executable, "leaves_an_orphan.py", sys.argv[1]])
exec(pathlib.Path("orphan.py").read_text())
"""
FAILING = """
import pathlib, subprocess, sys, time

HERE = pathlib.Path(__file__).parent

def begin(name):
    (HERE / name).mkdir()
    subprocess.Popen([sys.executable, "child.py", str(HERE / name)], cwd=HERE)
    while len(list((HERE / name).glob("*.pid"))) < 2:
        time.sleep(0.02)

def test_that_fails():
    begin("fails")
    raise AssertionError("as asked")

def test_that_is_interrupted():
    assert not any(map(is_alive, HERE.glob("fails/*.pid")))
    begin("interrupted")
    raise KeyboardInterrupt

def is_alive(path):
    status = pathlib.Path("/proc", path.stem, "stat")
    return status.exists() and " Z " not in status.read_text()
"""


@pytest.mark.parametrize("plugin", [["-p", "processes"], []], ids=["ended", "negative control"])
def test_what_a_failing_test_started_ends_although_the_shell_ignores_sigint(tmp_path, plugin):
    scripts = {"orphan": ORPHAN, "leaves_an_orphan": LEAVES_AN_ORPHAN, "child": CHILD}
    for name, text in {**scripts, "test_failing": FAILING}.items():
        (tmp_path / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", *plugin, "test_failing.py"]
    done = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        check=False,
    )
    alive = [is_alive(int(path.stem)) for path in sorted(tmp_path.glob("*/*.pid"))]
    hears = {path.parent.name: path.read_text() for path in tmp_path.glob("*/hears")}
    assert "as asked" in done.stdout, done.stdout + done.stderr
    if plugin:
        assert alive == [False] * 4
        assert hears == {"fails": "True", "interrupted": "True"}
    else:
        assert alive == [True] * 2, done.stdout
        assert hears == {"fails": "False"}


SIGNALS_ITSELF = """
import os, signal, pytest

@pytest.mark.own_process
def test_that_nobody_handles_a_signal_of():
    os.kill(os.getpid(), signal.SIGINT)

@pytest.mark.own_process
def test_that_is_killed():
    os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.own_process
def test_that_sees_its_signal(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    print("seen")
    assert capsys.readouterr().out == "seen\\n"
    assert list(tmp_path.iterdir()) == []

def test_after_them():
    pass
"""


def test_a_signal_that_nobody_handles_fails_a_test_and_does_not_end_the_run(tmp_path):
    (tmp_path / "test_signals.py").write_text(SIGNALS_ITSELF)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "processes", "test_signals.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "KeyboardInterrupt" in done.stdout
    assert "ended with status -9" in done.stdout
