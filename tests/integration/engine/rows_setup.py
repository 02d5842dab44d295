"""Refusals and their words, and memory."""

import contextlib
import functools
from unittest import mock

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_grad, safe_get_full_optimizer_state, safe_set_full_grad
from engines import POLICIES, SMALL_TILES, STRIDE, WIDTH, Case, Trial, answer, play, same
from late import late
from limited_device import Memory
from rows import Rows
from rows_table import CASES, FIRST_CASE, at_stage, tiny_net, two_groups
from seams import (
    EmulatedDevice,
    Faults,
    HostRoom,
    UpdateError,
    Wait,
    check_device_adam,
    homes,
    inside,
    launcher,
    read_state,
    steppers,
)

ROWS = Rows()
run = ROWS.run
ONE = Case(accumulation=1)
AT_STAGE_2 = CASES[f"ZeRO-2: {FIRST_CASE}"]


# Refusals.


def net_of_two_types():
    model = tiny_net()
    model.layers[1].to(torch.bfloat16)
    return model


def groups_of_two_types(model):
    return [{"params": list(model.layers[idx].parameters())} for idx in (0, 1)]


def little_memory():
    """The machine shows 1 KiB of free memory."""
    return mock.patch.object(homes, "free_host_bytes", return_value=1024)


def other_bits(grad_dtype):
    """A device that is off in the last elements; nor does it close well, which must not hide why
    it was refused."""
    adam, close = EmulatedDevice.adam, EmulatedDevice.close

    def step(self, tensors, scalars, tail):
        adam(self, tensors, scalars, 0 if tensors.grad.dtype == grad_dtype else tail)

    def close_badly(self):
        close(self)
        raise UpdateError("waited for lane H2D")

    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(steppers, "check_device_adam", check_device_adam))
    stack.enter_context(mock.patch.object(EmulatedDevice, "adam", step))
    stack.enter_context(mock.patch.object(EmulatedDevice, "close", close_badly))
    return stack


def set_gradient(trial, engine):
    weight = engine.module.layers[1].weight
    safe_set_full_grad(weight, torch.zeros_like(weight))


def hook_and_step(trial, engine):
    engine.basic_optimizer.register_step_post_hook(lambda *_: None)
    trial.micro_step(engine)


def ask_within_a_window(trial, engine):
    trial.backward(engine)
    safe_get_full_grad(engine.module.layers[1].weight)


def refuse(_folder, words, case=ONE, block=None, then=None, under=contextlib.nullcontext):
    """Open an engine and do ``then``, which is answered in these words, parted by ``|``."""
    trial = Trial({**STRIDE, **(block or {})})

    def act():
        engine = trial.open(case)
        if then:
            trial.micro_step(engine)
            then(trial, engine)

    with under():
        said = answer(act)
    for engine in list(trial._engines):
        answer(functools.partial(trial.end, engine))
    assert [word for word in words.split("|") if word not in said] == [], said


@ROWS.check("where the device has other bits no state stays on it under policy all-host")
def no_state_on_it(_folder):
    block = {**POLICIES["all-host"], "device_memory_bytes": "auto"}
    with Trial(block, memory=Memory(10**8)) as trial:
        with other_bits(torch.bfloat16):
            engine = trial.open(CASES[FIRST_CASE])
        assert not inside(engine, "cache").is_on
    with Trial(block, memory=Memory(10**8)) as trial:
        assert inside(trial.open(CASES[FIRST_CASE]), "cache").is_on


NATIVE = functools.partial(mock.patch.dict, "os.environ", DS_PIN_MEMORY_BACKEND="native")
PINNED = ("DS_PIN_MEMORY_BACKEND = native", {"under": NATIVE})
PAGEABLE = at_stage(3, {"zero": {"offload_optimizer": {"device": "cpu", "pin_memory": False}}})
UNMANAGED = Case(config={"managed_gradient_accumulation": False})
TWO_TYPES = {"make": net_of_two_types, "groups": groups_of_two_types}
TWO_TYPES["config"] = {"bf16": {"enabled": False}}
DEVICE_BITS = 'KernelError|has not the bits|policy "all-host"'
HOOKED = "ConfigError|register_step_post_hook|engine.step()"
EARLY = {"case": UNMANAGED.changed(config={**UNMANAGED.config, "gradient_clipping": 0.0})}
EARLY["block"] = {"step_before_norm": True}
MORE_THAN_SHOWN = {"block": {"host_memory_bytes": 2**20}, "under": little_memory}
BITS_OF = {dtype: functools.partial(other_bits, dtype) for dtype in (torch.bfloat16, torch.float32)}
for name, words, given in (
    ("steps in backward of windows that the caller ends", "true needs managed_gradient", EARLY),
    (
        "gradients set at stage 3",
        "ConfigError|gradients cannot be set|enabled",
        {"then": set_gradient},
    ),
    (
        "a gradient within a window that the caller ends",
        "ConfigError: a gradient was asked for between",
        {"case": UNMANAGED, "then": ask_within_a_window},
    ),
    ("a hook on the step", HOOKED, {"then": hook_and_step}),
    ("a hook on the step at stage 2", HOOKED, {"case": AT_STAGE_2, "then": hook_and_step}),
    ("a device with other bits", DEVICE_BITS, {"under": BITS_OF[torch.bfloat16]}),
    (
        "a device with other bits in fp32",
        DEVICE_BITS,
        {"block": POLICIES["ratio 0.5"], "under": BITS_OF[torch.float32]},
    ),
    (
        "less memory than is needed",
        "HostMemoryError|0.0 GiB are free|host_memory_bytes",
        {"under": little_memory},
    ),
    (
        "two types at stage 2",
        "ConfigError|torch.bfloat16 and torch.float32: convert the model to one",
        {"case": at_stage(2, TWO_TYPES)},
    ),
    ("DeepSpeed's page locks", *PINNED),
    ("DeepSpeed's page locks at stage 2", PINNED[0], {"case": AT_STAGE_2, **PINNED[1]}),
    ("nothing: no page locks", "no error", {"case": PAGEABLE, **PINNED[1]}),
    ("nothing: more memory than the machine shows", "no error", MORE_THAN_SHOWN),
):
    ROWS.check(f"refused: {name}", words=words, **given)(refuse)


# Updates that are repeated, held or watched.


FOUND = "UpdateError: update 1 since the start, tile"


@ROWS.check("an update that goes wrong is found", word=FOUND, verify_every=1000)
@ROWS.check("an update that is not repeated is not", word="no error", verify_every=0)
def go_wrong(_folder, word, verify_every):
    """Slots are stepped before they are filled; a repeated sample of the update shows it."""
    with late("H2D"):
        faults = Faults(without=frozenset({Wait.PREFETCHED}))
        trial = Trial({**STRIDE, "verify_every": verify_every}, faults)
        engine = trial.open(ONE)
        said = answer(functools.partial(trial.train, engine, 2))
        answer(functools.partial(trial.end, engine))
    assert word in said, said


@ROWS.check("step() waits for persistent parameters and for no others")
def return_early(_folder):
    case = ONE.changed(zero={"sub_group_size": 10**9}, is_cut=False)
    with Trial({"enabled": True, "policy": "all-host", "verify_every": 0}) as trial:
        engine = trial.open(case)
        for _ in range(2):
            trial.hold(engine, lambda tensors: tensors.numel > 2 * WIDTH)
            trial.micro_step(engine)
            assert engine.optimizer.background.is_running
            trial.release(engine)
            engine.optimizer.background.wait()


# Memory.


@contextlib.contextmanager
def host_memory():
    """What the lanes hand out, and the bytes that were asked for before."""
    asked, given = [], []

    def ask(room, host_numel, buffer_bytes, remedy):
        asked.append(host_numel * room.state_bytes + buffer_bytes)

    def recording(name):
        take = getattr(EmulatedDevice, name)

        def take_and_note(self, *args):
            given.append(take(self, *args))
            return given[-1]

        return mock.patch.object(EmulatedDevice, name, take_and_note)

    with (
        mock.patch.object(HostRoom, "check", ask),
        recording("host_home"),
        recording("empty_host"),
    ):
        yield asked, given


def bytes_of(tensors):
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())


BIT16_STATE = next(name for name, case in CASES.items() if case.states == "bf16")
TAKEN = {
    "stage 3": (ONE, 14),
    "stage 3, accumulation": (Case(), 16),
    "stage 3, fp32 sums": (Case(config={"data_types": {"grad_accum_dtype": "fp32"}}), 20),
    "stage 3, weights on the host": (CASES["offload_param"], 16),
    "stage 3, 16-bit state": (CASES[BIT16_STATE], 10),
    "stage 1, accumulation": (AT_STAGE_2.changed(zero={"stage": 1}), 14),
    "stage 2": (AT_STAGE_2.changed(accumulation=1), 14),
    "stage 2, accumulation": (AT_STAGE_2, 16),
}


@ROWS.check("host memory is asked for as it is taken")
def memory_as_taken(_folder):
    for name, (case, num_bytes) in TAKEN.items():
        for policy in ("stride 2", "ratio 0.5") if case.stage == 3 else ("stride 2",):
            with host_memory() as (asked, given), Trial(POLICIES[policy]) as trial:
                engine = trial.open(case)
                trial.train(engine, 2)
                sums = getattr(engine.optimizer, "accumulated_grads_in_cpu", {})
                taken = [*given, *sums.values()]
                staged = engine.optimizer._launcher.executor._staging
                assert bool(staged) == (case is not CASES["offload_param"])
                state = bytes_of(taken) - bytes_of([own.tensors[0] for own in staged])
                assert asked == [bytes_of(taken)], (name, policy)
                numel = sum(part.numel for part in inside(engine, "homes")._slices)
                if policy == "stride 2":
                    assert round(state / numel, 1) == num_bytes, (name, state / numel)


@ROWS.check("pages are locked unless that is not wanted and never twice")
def lock_pages(_folder):
    for stage, given, locks in (
        (3, {}, True),
        (3, {"pin_memory": True}, True),
        (3, {"pin_memory": False}, False),
        (2, {}, True),
        (2, {"pin_memory": False}, False),
    ):
        zero = {"stage": stage, "offload_optimizer": {"device": "cpu", **given}}
        # What stock's constructor would lock below stage 3, nobody would free.
        pin_memory = mock.patch.object(type(get_accelerator()), "pin_memory")
        with (
            Trial(STRIDE) as trial,
            pin_memory if stage == 2 else contextlib.nullcontext() as locked,
        ):
            engine = trial.open(ONE.changed(zero=zero))
            assert inside(engine, "lanes").locks_pages is locks
            if stage == 2:
                assert engine.optimizer.cpu_offload_pin_memory is locks
                assert locked.call_count == 0


def weights_at_home(_folder, policy):
    """The update writes them there with ``offload_param``, and sends them nowhere."""
    with Trial(POLICIES[policy]) as trial:
        engine = trial.open(CASES["offload_param"])
        optimizer, (memory,) = engine.optimizer, engine.optimizer.param_groups_fp16_flat_cpu_memory
        before = memory.clone()
        trial.train(engine, 3)
        optimizer.background.wait()
        kept = [*optimizer.fp16_partitioned_groups_flat]
        kept += [param.ds_tensor for group in optimizer.fp16_groups for param in group]
        assert {t.untyped_storage().data_ptr() for t in kept} == {memory.data_ptr()}
        assert not torch.equal(before, memory)
        assert inside(engine, "schedule").staging_numel == 0
        plan = str(inside(engine, "launcher").executor.last_plan)
        for absent in ("WTS", "H2D", "D2H") if policy == "all-host" else ("WTS",):
            assert absent not in plan


for policy in ("all-host", "stride 2", "ratio 0.5", "dynamic"):
    ROWS.check(f"weights stay in stock's memory, {policy}", policy=policy)(weights_at_home)


# Policy ``auto``.


def settle_by_iterations(_folder, stage, shared_s, alone_s, policy):
    """A clock tells that iterations of one way are shorter; it ends there, with stock's bits."""
    settle, found, clock = launcher.settle_policy, {"now": 1.0}, mock.Mock()
    case = CASES[FIRST_CASE] if stage == 3 else AT_STAGE_2

    def act(trial):
        engine = trial.open(case)
        if trial.block:
            split = inside(engine, "launcher").executor.split

            def tell():
                found["now"] += alone_s if split.cpu_only else shared_s
                return found["now"]

            clock.perf_counter.side_effect = tell
        trial.train(engine, 9)
        if trial.block:
            found["plan"] = str(inside(engine, "launcher").executor.last_plan)
            found["chosen"] = [one[:2] for one in engine.optimizer.chosen_policies]

    with (
        mock.patch.object(launcher, "settle_policy", lambda *given: settle(*given[:2], True)),
        mock.patch.object(launcher, "time", clock),
    ):
        ours = play(act, {**SMALL_TILES})
    same(ours, play(act, None))
    # Three iterations of each way are measured before.
    assert found["chosen"] == [(1, "auto"), (7, policy)]
    assert ("GPU" in found["plan"]) is (policy == "dynamic")


for stage, times, policy in (
    (3, (2.0, 1.0), "all-host"),
    (3, (1.0, 2.0), "dynamic"),
    (2, (2.0, 1.0), "all-host"),
):
    ROWS.check(
        f"auto becomes {policy} at stage {stage}",
        stage=stage,
        shared_s=times[0],
        alone_s=times[1],
        policy=policy,
    )(settle_by_iterations)


@ROWS.check("auto is all-host without a GPU, and says so")
def auto_without_gpu(_folder):
    with Trial({**SMALL_TILES}) as trial:
        engine = trial.open(ONE)
        trial.train(engine, 1)
        ((update, policy, why),) = engine.optimizer.chosen_policies
        assert (update, policy) == (1, "all-host")
        assert "without a GPU" in why
        assert inside(engine, "schedule").slot_numel == 0


# State as others read it.


@ROWS.compare("state is read as of stock")
def read_by_reader(trial):
    engine = trial.open(AT_STAGE_2)
    for steps in (0, 2):
        trial.train(engine, steps)
        (state,) = read_state(engine)
        for name, tensors in vars(state).items():
            trial.see(name, list(tensors))
    assert len(state.moments) == 2


@ROWS.check("moments of every group, where stock has those of the first alone")
def moments_by_parameter(_folder):
    """The line of docs/plugin.md that says so is about this."""
    for block in (None, STRIDE):
        with Trial(block) as trial:
            engine = trial.open(at_stage(2, {"groups": two_groups}))
            trial.train(engine, 2)
            optimizer = engine.optimizer
            last = optimizer.optimizer.state[optimizer.single_partition_of_fp32_groups[1]]
            param = two_groups(engine.module)[1]["params"][0]
            said = answer(lambda: safe_get_full_optimizer_state(param, "exp_avg").tolist())  # noqa: B023
            if block:
                moments = last["exp_avg"][: param.numel()].view(param.shape)
                assert moments.any()
                assert said == f"no error: {moments.tolist()}"
            else:
                assert said == "ValueError: exp_avg not found in optimizer state fragment"


AUTOCAST = {"bf16": {"enabled": False}, "torch_autocast": {"enabled": True, "dtype": "float16"}}
# Last: DeepSpeed keeps autocast switched on to the process's end.
ROWS.check(
    "refused: autocast in fp16",
    words="ConfigError|torch_autocast in fp16|bfloat16",
    case=ONE.changed(config=AUTOCAST),
)(refuse)
