"""Our arithmetic against DeepSpeed's own compiled op."""

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from deepspeed.ops.op_builder import CPUAdamBuilder

from deep_optimizer_states.adapter.stock_adam import pow_on_repeat_of_op, tail_of_op
from deep_optimizer_states.core.kernels import host
from deep_optimizer_states.core.kernels.adam import AdamTensors, BetaPowers, adam_scalars
from deep_optimizer_states.core.kernels.host import (
    LEAST_PER_THREAD,
    HostAdam,
    InstructionSet,
    Tail,
    TeamSizes,
    best_instruction_set,
)
from deep_optimizer_states.errors import KernelError


@pytest.fixture(scope="module")
def tail():
    return tail_of_op(CPUAdamBuilder().load(), True)


def test_the_tail_is_found_under_another_default_type(tail):
    torch.set_default_dtype(torch.bfloat16)
    try:
        again = tail_of_op.__wrapped__(CPUAdamBuilder().load(), True)  # not what was found before
    finally:
        torch.set_default_dtype(torch.float32)
    assert again == tail


class ScalarOp:
    """An op built without vectors: every element goes through the code of the tail."""

    def create_adam(self, *settings):
        pass

    def destroy_adam(self, opt_id):
        pass

    def adam_update(self, opt_id, step, *rest):
        lr, *betas, eps, decay, _bias, master, grad, exp_avg, exp_avg_sq = rest
        group = make_group(lr=lr, betas=betas, eps=eps, weight_decay=decay)
        powers = BetaPowers(group["betas"])
        for number in range(1, step + 1):
            scalars = adam_scalars(group, powers.at(number, group["betas"]), 1.0, True)
        everything = AdamTensors(master, exp_avg, exp_avg_sq, grad, torch.empty_like(master))
        HostAdam(1).step(everything, scalars, 0, 1)


def test_an_op_without_vectors_is_all_tail():
    tail = tail_of_op(ScalarOp(), True)
    assert tail.mode == 1
    assert [tail.start(numel) for numel in (1, 8207, 8208, 8209, 10**9)] == [0] * 5


class CountingOp(ScalarOp):
    """An op that counts steps by a rule of its own, as releases of DeepSpeed differ in it."""

    def __init__(self, at):
        self._at = at

    def create_adam(self, opt_id, *settings):
        self._powers = self._at()

    def adam_update(self, opt_id, step, *rest):
        lr, *betas, eps, decay, _bias, master, grad, exp_avg, exp_avg_sq = rest
        group = make_group(lr=lr, betas=betas, eps=eps, weight_decay=decay)
        scalars = adam_scalars(group, self._powers.at(step, betas), 1.0, True)
        everything = AdamTensors(master, exp_avg, exp_avg_sq, grad, torch.empty_like(master))
        HostAdam(1).step(everything, scalars, 0, 1)


class AlwaysPow:
    """Powers of an op that multiplies nothing up."""

    def at(self, step, betas):
        return BetaPowers((0.5, 0.5)).at(step, betas)  # the betas change at every call


BETAS = (0.9, 0.999)


@pytest.mark.parametrize("rule", [False, True])
def test_how_the_op_counts_a_step_that_comes_again_is_found(rule):
    op = CountingOp(lambda: BetaPowers(BETAS, rule))
    assert pow_on_repeat_of_op(op, True) == rule


def test_an_op_that_counts_steps_in_a_third_way_is_refused():
    with pytest.raises(KernelError, match="corrects the bias of its moments in a way that is not"):
        pow_on_repeat_of_op(CountingOp(AlwaysPow), True)


@pytest.fixture
def stock():
    """``step(opt_id, step, group, tensors)`` on the real op."""
    op, created = CPUAdamBuilder().load(), set()

    def step(group, decoupled, count, tensors):
        if not created:
            op.create_adam(7001, group["lr"], *group["betas"], 1e-8, 0.0, decoupled, False)
            created.add(7001)
        settings = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
        op.adam_update(7001, count, *settings, group["bias_correction"], *tensors)

    yield step
    for opt_id in created:
        op.destroy_adam(opt_id)


def step_ours(tail, state, grad, weights, scalars, num_threads=1):
    weights = torch.empty_like(grad, dtype=torch.float32) if weights is None else weights
    tensors = AdamTensors(*state, grad, weights)
    HostAdam(tail.mode).step(tensors, scalars, tail.start(tensors.numel), num_threads)


def make_group(**kwargs):
    defaults = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    return {**defaults, "bias_correction": True, **kwargs}


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 15, 16, 2048, 5003])
def test_host_kernel_repeats_the_op_over_many_steps(stock, tail, decoupled, grad_dtype, numel):
    group, generator = make_group(), torch.Generator().manual_seed(numel)
    master = torch.randn(numel, generator=generator)
    theirs = [master.clone(), torch.zeros(numel), torch.zeros(numel)]
    ours = [master.clone(), torch.zeros(numel), torch.zeros(numel)]
    weights = torch.empty(numel, dtype=torch.bfloat16)
    powers, scale = BetaPowers(group["betas"]), 0.37
    for step in range(1, 60):
        group["lr"] = 1e-3 * (1 + step % 5)
        grad = torch.randn(numel, generator=generator).to(grad_dtype)
        stock(group, decoupled, step, [theirs[0], grad.float() * scale, *theirs[1:]])
        scalars = adam_scalars(group, powers.at(step, group["betas"]), scale, decoupled)
        step_ours(tail, ours, grad, weights, scalars, num_threads=2)
    assert all(map(torch.equal, ours, theirs))
    assert torch.equal(weights, theirs[0].bfloat16())


@pytest.mark.parametrize("steps", [(1, 2, 3), (7, 8, 9), (3, 3, 4, 4), (5, 2, 3)])
def test_beta_powers_follow_jumps_and_repeats_of_the_step(stock, tail, steps):
    group, generator = make_group(betas=(0.87, 0.993)), torch.Generator().manual_seed(1)
    theirs = [torch.randn(33, generator=generator), torch.zeros(33), torch.zeros(33)]
    ours = [tensor.clone() for tensor in theirs]
    powers = BetaPowers(group["betas"], pow_on_repeat_of_op(CPUAdamBuilder().load(), True))
    for number, step in enumerate(steps):
        if number == 2:
            group["betas"] = (0.8, 0.9)
        grad = torch.randn(33, generator=generator)
        stock(group, True, step, [theirs[0], grad, *theirs[1:]])
        scalars = adam_scalars(group, powers.at(step, group["betas"]), 1.0, True)
        step_ours(tail, ours, grad, None, scalars)
    assert all(map(torch.equal, ours, theirs))


def test_another_tail_gives_other_bits(tail):
    """Negative control: the rounding of the tail is seen."""
    group = make_group()
    results = []
    for variant in (tail, Tail(16, 2 if tail.mode != 2 else 0)):
        state = [torch.linspace(-1, 1, 15), torch.full((15,), 0.3), torch.full((15,), 0.7)]
        powers = BetaPowers(group["betas"])
        for step in range(1, 20):
            scalars = adam_scalars(group, powers.at(step, group["betas"]), 1.0, True)
            grad = torch.linspace(0.1, 1.3, 15) / step
            step_ours(variant, state, grad, None, scalars)
        results.append(torch.cat(state))
    assert not torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_are_rounded_as_torch_rounds(tail, dtype):
    values = torch.cat([torch.randn(9000), torch.tensor([0.0, -0.0, 1e-40, 3e38, -1e38])])
    zeros = torch.zeros_like(values)
    weights = torch.empty_like(values, dtype=dtype)
    group = make_group(lr=0.0, weight_decay=0.0)
    scalars = adam_scalars(group, BetaPowers(group["betas"]).at(1, group["betas"]), 1.0, True)
    kept = values.clone()
    step_ours(tail, (kept, zeros.clone(), zeros.clone()), zeros, weights, scalars)
    assert torch.equal(weights, kept.to(dtype))


def test_wrong_tensors_are_refused(tail):
    group = make_group()
    scalars = adam_scalars(group, BetaPowers(group["betas"]).at(1, group["betas"]), 1.0, True)
    good = [torch.zeros(8) for _ in range(4)]
    with pytest.raises(KernelError, match="8 elements"):
        step_ours(tail, good[:3], torch.zeros(7), good[3], scalars)
    grad = torch.zeros(8, dtype=torch.int32)
    with pytest.raises(KernelError, match="int32"):
        step_ours(tail, good[:3], grad, good[3], scalars)
    with pytest.raises(KernelError, match=r"weights is .* on meta"):
        step_ours(tail, good[:3], torch.zeros(8), good[3].to("meta"), scalars)


def test_missing_compiler_is_explained(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelError, match=r"no-such-compiler.*CXX"):
        host.build()
    assert not list(tmp_path.rglob("*.so"))


def test_failed_build_shows_the_compilers_words(tmp_path, monkeypatch):
    broken = tmp_path / "broken.cpp"
    broken.write_text("int main( {\n")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ext"))
    monkeypatch.setattr(host, "_SOURCES", (broken,))
    with pytest.raises(KernelError, match=r"broken\.cpp"):
        host.build()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_folder_that_takes_no_build_is_named(tmp_path, monkeypatch, number):
    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number), str(tmp_path))

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(host.tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(KernelError, match=f"{os.strerror(number)}.*TORCH_EXTENSIONS_DIR"):
        host.build()


def test_a_disk_that_fills_up_while_building_keeps_nothing(tmp_path, monkeypatch):
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nulimit -f 8\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ext"))
    with pytest.raises(KernelError, match="failed on the host Adam kernel"):
        host.build()
    assert not [path for path in (tmp_path / "ext").rglob("*") if path.is_file()]


def test_a_damaged_build_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    library = host.build()
    library.write_bytes(library.read_bytes()[:100])
    host._load.cache_clear()
    try:
        with pytest.raises(KernelError, match=f"delete {library}"):
            HostAdam(0)
    finally:
        host._load.cache_clear()


def test_build_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    first = host.build()
    stamp = first.stat().st_mtime_ns
    assert host.build() == first
    assert first.stat().st_mtime_ns == stamp


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_instruction_set_gives_the_same_bits(tail, dtype, decoupled):
    numel, group = 5003, make_group()
    generator = torch.Generator().manual_seed(6)
    start = [torch.randn(numel, generator=generator), torch.zeros(numel), torch.zeros(numel)]
    grads = [torch.randn(numel, generator=generator).to(dtype) for _ in range(5)]
    results = []
    for instruction_set in range(best_instruction_set() + 1):
        adam = HostAdam(tail.mode, InstructionSet(instruction_set))
        weights, powers = torch.empty(numel, dtype=dtype), BetaPowers(group["betas"])
        state = (tensor.clone() for tensor in start)
        tensors = AdamTensors(*state, torch.empty_like(grads[0]), weights)
        for step, grad in enumerate(grads, start=1):
            tensors.grad.copy_(grad)
            scalars = adam_scalars(group, powers.at(step, group["betas"]), 0.3, decoupled)
            adam.step(tensors, scalars, tail.start(numel), num_threads=1)
        results.append(torch.cat([t.view(torch.uint8) for t in vars(tensors).values()]))
    assert all(torch.equal(result, results[0]) for result in results)


def test_an_instruction_set_that_the_cpu_lacks_is_refused(monkeypatch):
    monkeypatch.setattr(host, "best_instruction_set", lambda: InstructionSet.PORTABLE)
    with pytest.raises(KernelError, match="no AVX512, only PORTABLE"):
        HostAdam(0, InstructionSet.AVX512)
    assert HostAdam(0).instruction_set is InstructionSet.PORTABLE


@pytest.mark.parametrize("tile_numel", [16, 48, 4096])
def test_tiles_give_the_bits_of_the_whole(tail, tile_numel):
    numel = 1003
    group, generator = make_group(), torch.Generator().manual_seed(4)
    state = [torch.randn(numel, generator=generator), torch.zeros(numel), torch.zeros(numel)]
    grad = torch.randn(numel, generator=generator).bfloat16()
    scalars = adam_scalars(group, BetaPowers(group["betas"]).at(1, group["betas"]), 0.3, True)
    whole, tiled = ([tensor.clone() for tensor in state] for _ in range(2))
    step_ours(tail, whole, grad, None, scalars)
    tensors = AdamTensors(*tiled, grad, torch.empty(numel))
    for start in range(0, numel, tile_numel):
        tile = tensors.narrow(start, min(tile_numel, numel - start))
        tail_start = min(max(tail.start(numel) - start, 0), tile.numel)
        HostAdam(tail.mode).step(tile, scalars, tail_start, num_threads=1)
    assert all(map(torch.equal, tiled, whole))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_team_has_the_ops_bits(stock, tail, dtype):
    numel = 3 * LEAST_PER_THREAD + 1003
    group, generator = make_group(), torch.Generator().manual_seed(5)
    master = torch.randn(numel, generator=generator)
    theirs = [master, torch.zeros(numel), torch.zeros(numel)]
    ours = [tensor.clone() for tensor in theirs]
    grad = torch.randn(numel, generator=generator).to(dtype)
    weights = torch.empty(numel, dtype=torch.bfloat16)
    stock(group, True, 1, [theirs[0], grad.float(), *theirs[1:]])
    scalars = adam_scalars(group, BetaPowers(group["betas"]).at(1, group["betas"]), 1.0, True)
    step_ours(tail, ours, grad, weights, scalars, num_threads=3)
    assert all(map(torch.equal, ours, theirs))
    assert torch.equal(weights, theirs[0].bfloat16())


def test_a_small_tile_forms_no_team_and_a_large_one_does(tail):
    """Threads are counted as the system sees them; OpenMP has a team for each calling thread."""
    group = make_group()
    scalars = adam_scalars(group, BetaPowers(group["betas"]).at(1, group["betas"]), 1.0, True)
    numel, adam, new = 4 * LEAST_PER_THREAD, HostAdam(tail.mode), []
    large = AdamTensors(*(torch.zeros(numel) for _ in range(5)))
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

    caller = threading.Thread(target=run)
    caller.start()
    caller.join()
    assert new == [0, 3]


def test_the_kernels_wait_decides_the_next_team(tail):
    group = make_group()
    scalars = adam_scalars(group, BetaPowers(group["betas"]).at(1, group["betas"]), 1.0, True)
    numel, adam, asked = 4 * LEAST_PER_THREAD, HostAdam(tail.mode), []
    tile = AdamTensors(*(torch.zeros(numel) for _ in range(5)))

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


def test_one_interrupt_does_not_end_a_large_tiles_team():
    teams = TeamSizes()
    teams.learn(2, 100 * MS)
    assert teams.choose(LARGE, 2) == 2  # 67 ms gained


def test_teams_come_back_when_the_cores_are_free_again():
    teams, used = TeamSizes(), []
    for tile in range(1000):
        used.append(teams.choose(SMALL, 2))
        is_busy = tile < 400
        teams.learn(used[-1], 10 * MS if is_busy and used[-1] == 2 else 0.0)
    assert 1 <= used[:400].count(2) <= 10  # tried now and then, at 10 ms each
    assert set(used[600:]) == {2}


def test_two_sizes_are_judged_apart():
    teams = TeamSizes()
    for _ in range(8):
        teams.learn(4, 10 * MS)
    assert [teams.choose(SMALL, most) for most in (2, 4)] == [2, 2]
