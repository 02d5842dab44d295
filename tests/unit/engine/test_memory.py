import pytest

from deep_optimizer_states import memory
from deep_optimizer_states.errors import HostMemoryError

GIB = 2**30


def test_state_that_fits_is_let_through():
    memory.check_host_memory(10**9, 0, 12 * GIB, num_ranks=1)


def test_state_that_does_not_fit_is_refused_with_figures_and_a_way_out():
    with pytest.raises(HostMemoryError) as refused:
        memory.check_host_memory(2 * 10**9, 10**9, 40 * GIB, num_ranks=2)
    message = str(refused.value)
    assert "46.6 GiB" in message
    assert "2,000,000,000 parameters x 12 bytes x 2 ranks" in message
    assert "40.0 GiB are free" in message
    assert '"deep_optimizer_states.ratio"' in message
    assert isinstance(refused.value, MemoryError)


def test_a_lock_limit_below_the_state_is_explained():
    assert memory.explain_lock_limit(5 * GIB, None) is None
    assert memory.explain_lock_limit(5 * GIB, 5 * GIB) is None
    warning = memory.explain_lock_limit(6 * GIB, 2**16)
    assert "ulimit -l" in warning
    assert "6.0 GiB" in warning


def test_the_lock_limit_is_the_process_own(monkeypatch):
    monkeypatch.setattr(memory.resource, "getrlimit", lambda which: (65536, 65536))
    assert memory.lock_limit_bytes() == 65536
    unlimited = (memory.resource.RLIM_INFINITY,) * 2
    monkeypatch.setattr(memory.resource, "getrlimit", lambda which: unlimited)
    assert memory.lock_limit_bytes() is None


def test_a_containers_limit_counts(monkeypatch):
    limits = {"/sys/fs/cgroup/memory.max": 3 * GIB, "/sys/fs/cgroup/memory.current": 2 * GIB}
    monkeypatch.setattr(memory, "_read_number", limits.get)
    assert memory.free_host_bytes() <= GIB


def test_without_a_limit_the_machines_free_memory_counts(monkeypatch):
    monkeypatch.setattr(memory, "_read_number", lambda path: None)
    assert memory.free_host_bytes() > 0


@pytest.mark.parametrize(("value", "ranks"), [("4", 4), ("0", 1)])
def test_ranks_of_this_machine_come_from_the_launcher(monkeypatch, value, ranks):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
    assert memory.local_ranks() == ranks


def test_an_unlimited_container_has_no_number(tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._read_number(str(tmp_path / "memory.max")) is None
    assert memory._read_number(str(tmp_path / "missing")) is None
