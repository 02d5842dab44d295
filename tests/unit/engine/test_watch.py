"""What is said of other processes while something is timed."""

import subprocess
import sys

import pytest

from deep_optimizer_states.calibrate import cli, watch
from deep_optimizer_states.calibrate.watch import OtherWork, look_around


class Machine:
    """A clock, and CPU seconds that this process and others have used by it."""

    def __init__(self):
        self.now = (0.0, 0.0, 0.0)

    def passes(self, seconds, own, others):
        before, busy, mine = self.now
        self.now = (before + seconds, busy + own + others, mine + own)


@pytest.fixture
def machine(monkeypatch):
    machine = Machine()
    monkeypatch.setattr(watch, "_cpu_seconds", lambda: machine.now)
    return machine


def test_own_work_is_not_taken_for_that_of_others(machine):
    work = OtherWork(cpus=8)
    machine.passes(10.0, own=70.0, others=2.0)
    assert work.used_cpus() == pytest.approx(0.2)
    assert work.warning("used") == ""
    machine.passes(10.0, own=0.0, others=78.0)
    assert work.warning("used").startswith(
        "warning: other processes used 4.0 of 8 CPUs: figures come out too low"
    )


def test_what_runs_before_the_timing_is_warned_of(machine, monkeypatch):
    monkeypatch.setattr(watch.time, "sleep", lambda s: machine.passes(s, own=0.0, others=1.5 * s))
    said = []
    after = look_around(said.append)
    (line,) = said
    assert "other processes use 1.5 of " in line
    machine.passes(1.0, own=1.0, others=0.0)
    assert after.warning("used") == "", "what ran before the timing is no part of it"


def test_a_quiet_machine_is_not_warned_of(machine, monkeypatch):
    monkeypatch.setattr(watch.time, "sleep", lambda s: machine.passes(s, own=0.0, others=0.0))
    said = []
    look_around(said.append)
    assert said == []


def test_work_of_children_that_were_waited_for_is_ones_own():
    before = watch._cpu_seconds()
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    after = watch._cpu_seconds()
    assert after[2] - before[2] > 0
    assert after[1] >= before[1]


def test_calibrate_warns_and_says_so_in_the_profile(machine, monkeypatch, tmp_path, capsys):
    def measure(found, *_args, **_options):
        machine.passes(100.0, own=100.0, others=90.0)
        found.rates["h2d_bytes_per_s"] = 1e9
        return {"source": "a test", "gpus": 0, "cores": 2, "host_memory_bytes": 2**34}

    monkeypatch.setattr(cli, "measure", measure)
    path = tmp_path / "m.toml"
    assert cli.main(["-o", str(path), "--device", "cpu"]) == 0
    assert "warning: other processes used 0.9 of " in capsys.readouterr().err
    assert 'source = "a test; other processes used 0.9 CPUs meanwhile"' in path.read_text()
