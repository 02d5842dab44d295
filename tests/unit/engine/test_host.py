import os
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, strategies as st

from deep_optimizer_states.core import host as cores
from deep_optimizer_states.core.host import (
    HostRoom,
    LaneCores,
    Place,
    choose_cores,
    deal,
    find_place,
    read_cpu_list,
    usable_cores,
)
from deep_optimizer_states.errors import HostMemoryError


@pytest.fixture(autouse=True)
def no_settings_of_openmp(monkeypatch):
    monkeypatch.setattr(cores, "usable_cores", lambda: 1000)
    for name in ("OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two sockets of four cores, two threads a core: CPU n and n + 8 share core n."""
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu sse avx512f\n\n")
    monkeypatch.setattr(cores, "CPUINFO", tmp_path / "cpuinfo")
    for cpu in range(16):
        folder = tmp_path / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    for node, cpus in enumerate(("0-3,8-11", "4-7,12-15")):
        folder = tmp_path / f"bus/pci/devices/0000:{node}a:00.0"
        folder.mkdir(parents=True)
        (folder / "local_cpulist").write_text(f"{cpus}\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    return tmp_path


def singles(*cpus):
    """Cores of one CPU each."""
    return tuple((cpu,) for cpu in cpus)


@pytest.mark.parametrize(
    ("usable", "gpu", "cpus"),
    [
        (range(16), "0000:1a:00.0", (4, 5, 6, 7)),  # the socket of the GPU, one thread a core
        (range(16), None, range(8)),
        (range(16), "ffff:00:00.0", range(8)),
        # A launcher's binding is kept, elsewhere on purpose.
        ({5, 13, 14}, "0000:1a:00.0", (5, 14)),
        ({5, 13, 14}, "0000:0a:00.0", (5, 14)),
    ],
)
def test_a_rank_uses_one_thread_a_core_near_its_gpu(machine, monkeypatch, usable, gpu, cpus):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(usable))
    assert find_place(0, gpu, machine).cores == singles(*cpus)


def test_without_a_description_every_cpu_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3})
    assert find_place(0, None, tmp_path).cores == singles(0, 3)


@pytest.fixture
def virtual_machine(machine):
    flags = "flags\t\t: fpu hypervisor avx512f"
    (machine / "cpuinfo").write_text(f"processor\t: 0\n{flags}\nvmx flags\t: x\n")
    return machine


def test_a_virtual_machines_cpus_all_count(virtual_machine, monkeypatch):
    """Its hypervisor may call two cores halves of one; half of the machine would stay idle."""
    near = find_place(0, "0000:1a:00.0", virtual_machine)
    assert near.cores == ((4, 12), (5, 13), (6, 14), (7, 15))
    assert choose_cores(near, [near]) == LaneCores(8, (4, 5, 6, 7, 12, 13, 14, 15))
    places = [find_place(rank, None, virtual_machine) for rank in range(3)]
    shares = [choose_cores(place, places).cores for place in places]
    assert shares == [(0, 1, 8, 9), (2, 3, 4, 10, 11, 12), (5, 6, 7, 13, 14, 15)]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 13, 14})
    assert find_place(0, None, virtual_machine).cores == ((5, 13), (14,))


@pytest.mark.parametrize("text", ["", "Features\t: fp hypervisor\n", "model name: hypervisor\n"])
def test_a_machine_is_real_unless_its_cpu_says_otherwise(machine, text):
    (machine / "cpuinfo").write_text(text)
    assert find_place(0, None, machine).cores == singles(*range(8))
    (machine / "cpuinfo").unlink()
    assert find_place(0, None, machine).cores == singles(*range(8))


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-2,7\n", {0, 1, 2, 7}), ("4", {4}), ("\n", set()), ("0-x", set())]
)
def test_the_kernels_notation(tmp_path, text, cpus):
    (tmp_path / "list").write_text(text)
    assert read_cpu_list(tmp_path / "list") == cpus


@given(st.sets(st.integers(0, 200), min_size=1), st.integers(1, 40))
def test_cores_are_dealt_evenly_and_once(own, num_ranks):
    dealt = [deal(sorted(own), position, num_ranks) for position in range(num_ranks)]
    assert {core for share in dealt for core in share} <= own
    if num_ranks <= len(own):
        assert sorted(core for share in dealt for core in share) == sorted(own)
        assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    else:
        assert all(len(share) == 1 for share in dealt)


@pytest.mark.parametrize(
    ("places", "cores"),
    [
        ([("a", range(4)), ("b", range(4)), ("a", range(4))], [(0, 1), (0, 1, 2, 3), (2, 3)]),
        ([("a", (0, 1)), ("a", (2, 3))], [(0, 1), (2, 3)]),  # ranks on other cores are no peers
        ([("a", range(8))], [tuple(range(1, 8))]),  # of many cores one is left to the model
    ],
)
def test_ranks_share_the_cores_that_they_have_in_common(places, cores):
    ranks = [Place(host, rank, singles(*cpus)) for rank, (host, cpus) in enumerate(places)]
    chosen = [choose_cores(rank, ranks) for rank in ranks]
    assert chosen == [LaneCores(len(own), own) for own in cores]


@pytest.mark.parametrize(
    ("said", "chosen"),
    [
        # A launcher's one thread is not taken for a wish.
        ({"OMP_NUM_THREADS": "1"}, LaneCores(4, (0, 1, 2, 3))),
        ({"OMP_NUM_THREADS": "3"}, LaneCores(3, (0, 1, 2, 3))),
        ({"OMP_NUM_THREADS": "3,1"}, LaneCores(3, (0, 1, 2, 3))),
        ({"OMP_NUM_THREADS": "many"}, LaneCores(4, (0, 1, 2, 3))),
        # Binding can be left to others.
        ({"OMP_PROC_BIND": "close"}, LaneCores(4, ())),
    ],
)
def test_the_environment_is_heard(monkeypatch, said, chosen):
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    place = Place("a", 0, singles(0, 1, 2, 3))
    assert choose_cores(place, [place]) == chosen


def test_a_container_with_the_time_of_few_cores_gets_few_threads(monkeypatch, tmp_path):
    (tmp_path / "fs/cgroup").mkdir(parents=True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for quota, usable in (("250000 100000", 3), ("max 100000", 8)):
        (tmp_path / "fs/cgroup/cpu.max").write_text(f"{quota}\n")
        assert usable_cores(tmp_path) == usable
    monkeypatch.setattr(cores, "usable_cores", lambda: 3)
    ranks = [Place("a", rank, singles(*range(8))) for rank in range(2)]
    assert choose_cores(ranks[0], ranks) == LaneCores(1, (0, 1, 2, 3))


def test_where_binding_is_forbidden_a_warning_says_so_once(monkeypatch):
    def forbid(pid, cores):
        raise PermissionError(1, "Operation not permitted")

    cores._warn_not_bound.cache_clear()
    monkeypatch.setattr(os, "sched_setaffinity", forbid)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for lane in (LaneCores(1, ()), LaneCores(1, (0,)), LaneCores(2, (0, 1))):
            lane.bind_this_thread()
    (warning,) = warned
    assert "(Operation not permitted)" in str(warning.message).replace("[Errno 1] ", "")
    assert "OMP_PROC_BIND=false" in str(warning.message)
    assert warning.filename == __file__
    cores._warn_not_bound.cache_clear()


GIB = 2**30


def test_state_that_does_not_fit_is_refused_with_figures_and_a_way_out():
    HostRoom(12 * GIB, num_ranks=1).check(10**9, 0, "")
    with pytest.raises(HostMemoryError):  # a little is left for others
        HostRoom(12 * 10**9, num_ranks=1).check(10**9, 0, "")
    with pytest.raises(MemoryError) as refused:
        HostRoom(40 * GIB, num_ranks=2).check(2 * 10**9, 10**9, "what helps")
    for words in (
        "46.6 GiB",
        "2,000,000,000 parameters x 12 bytes x 2 ranks",
        "40.0 GiB are free",
        "a smaller model or what helps. If",
        '"deep_optimizer_states.host_memory_bytes"',
    ):
        assert words in str(refused.value)


@pytest.mark.parametrize(
    ("free", "num_ranks", "share"),
    [(12_001, 1, 1.0), (11_900, 1, 0.9), (9_700, 1, 0.8), (9_700, 2, 0.3), (1_200, 1, 0.0)],
)
def test_the_share_that_fits_leaves_out_as_few_leading_subgroups(free, num_ranks, share):
    """Of 1000 elements, 12 bytes each, in subgroups of 100; buffers take 100 bytes."""
    room = HostRoom(round(free / cores.HEADROOM), num_ranks)
    buffers = 0 if share == 1 else 100
    assert room.largest_share([100] * 10, buffers) == share
    assert room.largest_share([], buffers) == 1.0


def test_the_docs_say_what_a_parameter_takes():
    """Of types by their bytes: what the check of the memory counts, and what is predicted."""
    docs = Path(__file__).parents[3] / "docs"
    table = re.findall(
        r"^\|.*\| (fp32|16 bits) \| (fp32|16 bits) \| (\d+) \| (\d+) \| (\d+) \| \d+ \|$",
        (docs / "plugin.md").read_text(),
        re.MULTILINE,
    )
    assert len(table) == 3
    for master, moment, *said in table:
        state = cores.bytes_of_state(*(4 if kind == "fp32" else 2 for kind in (master, moment)))
        sums = [cores.bytes_of_gradients(2, accumulation) for accumulation in (1, 8)]
        assert [int(number) for number in said] == [state, *(state + each for each in sums)]
    assert "14 bytes per parameter, 16 with accumulation" in (docs / "design.md").read_text()
    guide = (docs / "studies" / "config-guide.md").read_text()
    assert "14 with this project's update, 16 with" in guide


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Control groups of this process, as files; the machine itself has 5 GiB left of 9."""
    monkeypatch.setattr(cores, "PROC_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(cores, "CGROUP_ROOT", tmp_path)
    machine = SimpleNamespace(available=5 * GIB, total=9 * GIB)
    monkeypatch.setattr(cores.psutil, "virtual_memory", lambda: machine)

    def write(line, files):
        (tmp_path / "cgroup").write_text(f"3:cpu:/x\n{line}\n")
        for name, value in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value * GIB if isinstance(value, int) else value}\n")

    return write


def limited(limit, used, folder="", **stat):
    """Files of a group."""
    files = {"max": limit, "current": used, **stat}
    return {f"{folder}memory.{name}": value for name, value in files.items()}


FIRST_VERSION = {"memory/job/memory.limit_in_bytes": 4, "memory/job/memory.usage_in_bytes": 2}


@pytest.mark.parametrize(
    ("line", "files", "free"),
    [
        *(("0::/", limited(*figures), free) for *figures, free in ((3, 2, 1), (2, 3, 0))),
        *(("0::/", limited(limit, 2), 5) for limit in (30, "max")),
        # A batch job's own limit counts wherever it is set.
        *(
            ("0::/job/step/task", limited(4, 1, folder), 3)
            for folder in ("job/", "job/step/", "job/step/task/")
        ),
        ("4:memory,hugetlb:/job", FIRST_VERSION, 2),
        # Pages that can be dropped are free.
        *(
            ("0::/", limited(4, 3, stat=f"anon 5\n{name} {2 * GIB}\nnoise"), 3)
            for name in ("inactive_file", "total_inactive_file")
        ),
        (None, {}, 5),
    ],
)
def test_the_smaller_of_what_machine_and_control_groups_have_left_is_free(
    groups, line, files, free
):
    if line:
        groups(line, files)
    assert cores.free_host_bytes() == free * GIB


@pytest.mark.parametrize(
    ("status", "ranks", "spare"),
    [
        ("VmPeak:\t    9 kB\nVmHWM:\t 3145728 kB\nVmRSS:\t 1048576 kB\n", 1, 3),
        ("VmHWM:\t 3145728 kB\nVmRSS:\t 1048576 kB\n", 2, 0.5),
        ("VmHWM:\t 9437184 kB\nVmRSS:\t 1048576 kB\n", 1, 0),
        ("", 5, 1),
    ],
)
def test_what_a_rank_had_at_its_peak_is_not_spare(groups, monkeypatch, status, ranks, spare):
    groups("0::/", {"status": status})
    monkeypatch.setattr(cores, "PROC_STATUS", cores.CGROUP_ROOT / "status")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert cores.spare_host_bytes() == spare * GIB


def test_a_peak_of_this_process_itself_is_seen(groups, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    groups("0::/", {})
    array = bytearray(b"1") * 2**28
    del array
    assert 0 < cores.spare_host_bytes() < 5 * GIB - 2**27


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
    assert cores.local_ranks() == ranks
