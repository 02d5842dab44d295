"""The host kernel's builds, and how many threads step a tile."""

import errno
import os
from pathlib import Path

import pytest
import torch
from engine_updates import TAIL, first_scalars, start_thread

from deep_optimizer_states.core.kernels import host
from deep_optimizer_states.core.kernels.adam import AdamTensors, first_difference
from deep_optimizer_states.core.kernels.host import LEAST_PER_THREAD, HostAdam, TeamSizes
from deep_optimizer_states.errors import KernelError


@pytest.fixture(autouse=True)
def extensions(tmp_path, monkeypatch):
    """Whatever is built lies here."""
    folder = tmp_path / "ext"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(folder))
    return folder


def files_in(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def compiler_that_fills_the_disk(tmp_path, monkeypatch):
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nulimit -f 8\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))


def no_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")


def broken_source(tmp_path, monkeypatch):
    (tmp_path / "broken.cpp").write_text("int main( {\n")
    monkeypatch.setattr(host, "SOURCES", (tmp_path / "broken.cpp",))


def full_folder(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path))

    monkeypatch.setattr(host.tempfile, "TemporaryDirectory", refuse)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (no_compiler, r"no-such-compiler.*CXX"),
        (broken_source, r"broken\.cpp"),
        (full_folder, "No space left on device.*TORCH_EXTENSIONS_DIR"),
        (compiler_that_fills_the_disk, "failed on the host Adam kernel"),
    ],
)
def test_a_build_that_fails_says_why_and_keeps_nothing(
    tmp_path, extensions, monkeypatch, spoil, words
):
    spoil(tmp_path, monkeypatch)
    with pytest.raises(KernelError, match=words):
        host.build()
    assert files_in(extensions) == []


def test_a_build_is_kept_and_a_damaged_one_named():
    library = host.build()
    stamp = library.stat().st_mtime_ns
    assert host.build() == library
    assert library.stat().st_mtime_ns == stamp
    library.write_bytes(library.read_bytes()[:100])
    host._load.cache_clear()
    try:
        with pytest.raises(KernelError, match=f"delete {library}"):
            HostAdam(0)
    finally:
        host._load.cache_clear()


def zeros(numel):
    return AdamTensors(*(torch.zeros(numel) for _ in range(5)))


def test_a_small_tile_forms_no_team_and_a_large_one_does(monkeypatch):
    """Threads are counted as the system sees them; OpenMP has a team for each calling thread."""
    monkeypatch.undo()  # the kernel that is there
    scalars, adam, new = first_scalars(), HostAdam(TAIL.mode), []
    numel = 4 * LEAST_PER_THREAD
    large = zeros(numel)
    tiles = [large.narrow(4096 * tile, 4096) for tile in range(numel // 4096)]

    def threads():
        return {int(task.name) for task in Path("/proc/self/task").iterdir()}

    def run():
        before = threads()
        for tile in tiles:
            adam.step(tile, scalars, 4096, num_threads=4)
        new.append(len(threads() - before))
        adam.step(large, scalars, numel, num_threads=4)
        new.append(len(threads() - before))

    start_thread(run)()
    assert new == [0, 3]


def test_the_kernels_wait_decides_the_next_team(monkeypatch):
    monkeypatch.undo()
    scalars, adam, asked = first_scalars(), HostAdam(TAIL.mode), []
    numel = 4 * LEAST_PER_THREAD
    tile = zeros(numel)

    def busy_cores(*arguments):
        asked.append(arguments[11])
        return 0.010 if arguments[11] > 1 else 0.0

    adam._function = busy_cores
    for most in (2, 2, 2, 1):
        adam.step(tile, scalars, numel, num_threads=most)
    assert asked == [2, 1, 1, 1]


MS = 1e-3
SMALL, LARGE = 8 * LEAST_PER_THREAD, 2**27


@pytest.mark.parametrize(
    ("numel", "num_threads", "team"),
    [
        (4096, 16, 1),
        (2 * LEAST_PER_THREAD - 1, 2, 1),
        (2 * LEAST_PER_THREAD, 2, 2),
        (2 * LEAST_PER_THREAD, 16, 2),
        (15 * LEAST_PER_THREAD, 16, 8),
        (LARGE, 16, 16),
        (LARGE, 7, 7),
        (3 * LEAST_PER_THREAD, 6, 3),
        (LARGE, 1, 1),
        (0, 4, 1),
    ],
)
def test_every_thread_of_a_team_has_enough_to_do(numel, num_threads, team):
    assert TeamSizes().choose(numel, num_threads) == team


def test_a_team_that_waits_longer_than_it_gains_is_halved():
    teams = TeamSizes()
    for _ in range(8):
        teams.learn(8, 5 * MS)
    assert teams.choose(SMALL, 8) == 4
    assert teams.choose(LARGE, 8) == 8  # 17 ms gained
    for _ in range(8):
        teams.learn(4, 5 * MS)
        teams.learn(2, 5 * MS)
    assert teams.choose(SMALL, 8) == 1


def test_teams_come_back_when_the_cores_are_free_again():
    teams, used = TeamSizes(), []
    for tile in range(1000):
        used.append(teams.choose(SMALL, 2))
        is_busy = tile < 400
        teams.learn(used[-1], 10 * MS if is_busy and used[-1] == 2 else 0.0)
    assert 1 <= used[:400].count(2) <= 10  # tried now and then, at 10 ms each
    assert set(used[600:]) == {2}


def test_scalars_reach_the_kernel_by_name():
    """And not by the order in which Python happens to keep them."""
    scalars, found = first_scalars(), []
    turned = object.__new__(type(scalars))
    vars(turned).update(reversed(vars(scalars).items()))
    for given in (scalars, turned):
        tensors = AdamTensors(*(torch.linspace(0.1, 1, 8) for _ in range(5)))
        HostAdam(TAIL.mode).step(tensors, given, 8, num_threads=1)
        found.append(tensors)
    assert first_difference(*found) is None
    names = host._load().dos_scalar_names().decode().split()
    assert sorted(names) == sorted(vars(scalars))
