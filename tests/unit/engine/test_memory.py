from types import SimpleNamespace

import pytest

from deep_optimizer_states.core import host as memory
from deep_optimizer_states.errors import HostMemoryError

GIB = 2**30


def test_state_that_fits_is_let_through():
    memory.check_host_memory(10**9, 0, 12 * GIB, num_ranks=1)


def test_a_little_is_left_for_others():
    with pytest.raises(HostMemoryError):
        memory.check_host_memory(10**9, 0, 12 * 10**9, num_ranks=1)


def test_state_that_does_not_fit_is_refused_with_figures_and_a_way_out():
    with pytest.raises(HostMemoryError) as refused:
        memory.check_host_memory(2 * 10**9, 10**9, 40 * GIB, num_ranks=2)
    message = str(refused.value)
    assert "46.6 GiB" in message
    assert "2,000,000,000 parameters x 12 bytes x 2 ranks" in message
    assert "40.0 GiB are free" in message
    assert '"deep_optimizer_states.ratio"' in message
    assert '"deep_optimizer_states.host_memory_bytes"' in message
    assert isinstance(refused.value, MemoryError)


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Control groups of this process, as files; the machine itself has 5 GiB left of 9."""
    monkeypatch.setattr(memory, "PROC_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "CGROUP_ROOT", tmp_path)
    machine = SimpleNamespace(available=5 * GIB, total=9 * GIB)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: machine)

    def write(line, files):
        (tmp_path / "cgroup").write_text(f"3:cpu:/x\n{line}\n")
        for name, value in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value * GIB if isinstance(value, int) else value}\n")

    return write


@pytest.mark.parametrize(
    ("limit", "used", "free"), [(3, 2, 1), (2, 3, 0), (30, 2, 5), ("max", 2, 5)]
)
def test_the_smaller_of_what_machine_and_container_have_left_is_free(groups, limit, used, free):
    groups("0::/", {"memory.max": limit, "memory.current": used})
    assert memory.free_host_bytes() == free * GIB


@pytest.mark.parametrize("where", ["job", "job/step", "job/step/task"])
def test_a_batch_jobs_own_limit_counts_wherever_it_is_set(groups, where):
    groups("0::/job/step/task", {f"{where}/memory.max": 4, f"{where}/memory.current": 1})
    assert memory.free_host_bytes() == 3 * GIB


def test_the_first_version_of_control_groups_counts_too(groups):
    files = {"limit_in_bytes": 4, "usage_in_bytes": 2}
    groups("4:memory,hugetlb:/job", {f"memory/job/memory.{n}": v for n, v in files.items()})
    assert memory.free_host_bytes() == 2 * GIB


@pytest.mark.parametrize("name", ["inactive_file", "total_inactive_file"])
def test_pages_that_can_be_dropped_are_free(groups, name):
    stat = f"anon 5\n{name} {2 * GIB}\nnoise"
    groups("0::/", {"memory.max": 4, "memory.current": 3, "memory.stat": stat})
    assert memory.free_host_bytes() == 3 * GIB


def test_without_control_groups_the_machines_free_memory_counts(groups):
    assert memory.free_host_bytes() == 5 * GIB


@pytest.mark.parametrize(
    ("said", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"LOCAL_SIZE": "4"}, 4),  # by DeepSpeed's launcher
    ],
)
def test_ranks_of_this_machine_come_from_the_launcher(monkeypatch, said, ranks):
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert memory.local_ranks() == ranks
