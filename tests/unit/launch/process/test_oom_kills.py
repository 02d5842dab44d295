import pytest

from launch.process.oom_kills import OomKills


@pytest.fixture
def roots(tmp_path):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "proc", tmp_path / "cgroup"


def put(path, count):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"low 0\noom 4\noom_kill {count}\noom_group_kill 0\n")


CASES = {
    "version 2": ("0::/slurm/job_7", "slurm/job_7/memory.events"),
    "version 2 seen from its container": ("0::/kubepods/x", "memory.events"),
    "version 1": ("9:cpu,memory:/job\n0::/", "memory/job/memory.oom_control"),
    "version 1 seen from its container": ("4:memory:/docker/x", "memory/memory.oom_control"),
}


@pytest.mark.parametrize("case", CASES)
def test_kills_of_the_own_control_group_count(roots, case):
    proc, cgroups = roots
    line, file = CASES[case]
    (proc / "self" / "cgroup").write_text(line + "\n")
    put(proc / "vmstat", 100)
    put(cgroups / file, 3)
    kills = OomKills(proc, cgroups)
    put(proc / "vmstat", 150)  # somebody else's on the same machine
    assert kills.since() == 0
    put(cgroups / file, 5)
    assert kills.since() == 2


def test_without_a_group_the_machines_count(roots):
    put(roots[0] / "vmstat", 1)
    kills = OomKills(*roots)
    put(roots[0] / "vmstat", 2)
    assert kills.since() == 1


def test_where_nothing_can_be_read_nothing_is_said(roots):
    assert OomKills(*roots).since() is None


def test_this_kernel_counts_no_kill_in_between():
    assert OomKills().since() in (None, 0)
