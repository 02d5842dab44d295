"""Work in backward: what comes between backward and ``step()`` ends in stock's bits or an error."""

import contextlib
import functools
import itertools
from unittest import mock

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, set_z3_leaf_modules
from engines import STRIDE, WIDTH, Net, Trial, answer, lanes_left, moving, play, same
from rows import Rows
from rows_failures import updates_end_when_waited_for
from rows_table import CASES, FIRST_CASE, ONE_LAYER_A_BUCKET, THRICE, evaluate_between
from seams import EmulatedDevice, Memory, TileCache, UpdatePhase, cache, inside

ROWS = Rows()
CASE = CASES[FIRST_CASE].changed(config={"gradient_clipping": 0})
EARLY = {**STRIDE, "step_before_norm": True}
LIMIT = 60_000
STAYS = {**STRIDE, "policy": "all-host", "device_memory_bytes": LIMIT}
AUTO = {**STAYS, "device_memory_bytes": "auto"}
GOOD = 3
"""Steps until a checkpoint is saved; backward works from the third on."""
given = []
"""Numbers of tiles that each update was handed before ``step()``."""


def run(report, extent, folder):
    launch = UpdatePhase.launch

    def counted_launch(update, *args):
        given.append(len(update._begun.tile_queue.handed_over) if update.is_begun else 0)
        launch(update, *args)

    with (
        mock.patch.object(UpdatePhase, "launch", counted_launch),
        # What is sent is then a matter of memory, and not of time.
        mock.patch.object(cache, "MOST_UNDER_WAY", 1000),
        mock.patch.object(cache, "LOOK_S", 0.0),
    ):
        ROWS.run(report, extent, folder)


def update_of(engine):
    return inside(engine, "update")


def settle(engine):
    """Let the update end, which the next backward of the window might still meet."""
    if hasattr(engine.optimizer, "background"):
        engine.optimizer.background.wait()


def begin(trial, engine):
    """The first micro-batch of a window."""
    trial.backward(engine)
    settle(engine)
    engine.step()


def one_window(trial, engine):
    """Both micro-batches, without the step that ends them."""
    begin(trial, engine)
    trial.backward(engine)


def train(trial, engine, steps, between=None):
    """Train whole windows, with something done between the last backward and each step."""
    for _ in range(steps):
        one_window(trial, engine)
        if between:
            between(engine)
        trial.step(engine)


def started(trial, block_folder):
    engine = trial.open(CASE)
    trial.train(engine, GOOD, after=lambda engine, _: settle(engine))
    engine.save_checkpoint(block_folder, "good")
    return engine


def train_on(trial, engine, steps=2, between=None):
    trial.train(engine, 0, skip=GOOD)  # the batches that come then
    train(trial, engine, steps, between)


def same_as_stock(trial, engine, folder, steps=2, between=None):
    """Go on, as stock does that loads the checkpoint."""
    trial.forget()
    train_on(trial, engine, steps, between)
    trial.see_state(engine)
    with Trial(None) as stock:
        other = stock.open(CASE)
        assert other.load_checkpoint(folder, "good")[0]
        train_on(stock, other, steps)
    same(trial, stock)
    trial.end(engine)


# Mishaps of an update that has begun before step().


def overflow(trial, engine):
    """The loss is large enough for gradients that are no numbers."""
    begin(trial, engine)
    engine.backward(trial.loss(engine) * torch.inf)
    engine.step()


def set_rates(engine, value):
    for group in engine.optimizer.param_groups:
        group["lr"] = value


def rate_in_place(trial, engine):
    rate = torch.tensor(0.01)
    set_rates(engine, rate)
    one_window(trial, engine)
    rate.fill_(0.5)
    engine.step()


def clipping_at_last(trial, engine):
    one_window(trial, engine)
    engine.optimizer.clip_grad = 1e-3
    engine.step()


def gradient_again(trial, engine):
    """As a parameter that is recomputed twice, each time with a backward of its own."""
    one_window(trial, engine)
    param = engine.module.layers[-1].weight
    inside(engine, "gradients").flush(param.ds_id, torch.ones(param.partition_numel()))


def another_forward(trial, engine):
    one_window(trial, engine)
    engine(torch.ones(4, WIDTH).bfloat16())


def in_first_layer(trial, engine, action):
    """Do something when backward arrives at the first layer, if the update has begun."""

    def act(_grad):
        if update_of(engine).is_begun:
            action()

    hook = engine.module.layers[0].register_forward_hook(
        lambda module, inputs, output: output.register_hook(act) and None
    )
    try:
        one_window(trial, engine)
    finally:
        hook.remove()


def hidden_use(trial, engine):
    def use():
        with deepspeed.zero.GatheredParameters([engine.module.layers[-1].weight]):
            pass

    in_first_layer(trial, engine, use)


def interrupted(trial, engine):
    def interrupt():
        raise KeyboardInterrupt

    in_first_layer(trial, engine, interrupt)


GATHERED = "weights were gathered that backward has updated"
MISHAPS = {
    overflow: "a gradient is not finite",
    rate_in_place: "lr changed from 0.009",
    clipping_at_last: "gradients are to be multiplied by 0.0003",
    another_forward: GATHERED,
    hidden_use: GATHERED,
    gradient_again: "a gradient came after backward had updated its parameter",
    interrupted: "KeyboardInterrupt",
}
left_by_mishaps = []


def left_of_window(engine):
    """Count what stock keeps of a window that is not over."""
    optimizer = engine.optimizer
    return {
        "norms": len(optimizer.norm_for_param_grads),
        "parameters in buckets": sum(len(b.params) for b in optimizer.ipg_buckets.values()),
        "backwards under way": optimizer._backward_active_depth,
        "gradients": sum(param.grad is not None for param in engine.module.parameters()),
        "micro-steps": optimizer.micro_step_id,
    }


def mishap(folder, act, words):
    """It is said and nothing wrong is saved; after it a checkpoint makes everything good."""
    with Trial(EARLY) as trial:
        engine = started(trial, folder)
        assert given[-1] > 0, "nothing was handed over before the norm"
        said = answer(functools.partial(act, trial, engine))
        assert words in said, said
        assert act is interrupted or "step_before_norm" in said
        for refused in (
            *[answer(lambda: engine.save_checkpoint(folder, "bad")) for _ in range(2)],
            answer(lambda: engine.optimizer.state),
        ):
            assert refused.startswith("UpdateError"), refused
        assert (folder / "latest").read_text() == "good"
        left_by_mishaps.append(left_of_window(engine))
        assert engine.load_checkpoint(folder, "good")[0] is not None
        assert not any(left_of_window(engine).values())
        engine.optimizer.clip_grad = 0.0
        same_as_stock(trial, engine, folder)
        assert given[-1] > 0


for act, words in MISHAPS.items():
    ROWS.check(act.__name__.replace("_", " "), act=act, words=words)(mishap)


@ROWS.check("what is left of a window is seen before it is cleared")
def left_before(_folder):
    for what in ("norms", "parameters in buckets", "backwards under way", "micro-steps"):
        assert any(left[what] for left in left_by_mishaps), what


@ROWS.check("looked at between backward and step()")
def looked_at(folder):
    """State and checkpoints are refused, and nothing is loaded in part; the step is whole."""
    said = []

    def look(engine):
        optimizer = engine.optimizer
        load = functools.partial(engine.load_checkpoint, folder, "good")
        said.extend(
            answer(call)
            for call in (
                lambda: optimizer.state,
                lambda: optimizer.fp32_partitioned_groups_flat,
                lambda: engine.save_checkpoint(folder, "bad"),
                lambda: load(load_module_only=True),
                lambda: load(load_optimizer_states=False),
                lambda: load(True, False),
                lambda: optimizer._rigid_load_state_dict({}, False),
            )
        )

    with Trial(EARLY) as trial:
        same_as_stock(trial, started(trial, folder), folder, between=look)
    assert len(said) == 14
    assert all("between backward and engine.step()" in text for text in said), said
    assert (folder / "latest").read_text() == "good"


FACTORS = {
    "clip_grad": (0.0, lambda engine, value: setattr(engine.optimizer, "clip_grad", value)),
    "loss_scale": (1.0, lambda engine, value: engine.optimizer.override_loss_scale(value)),
}
"""Factors that the caller may set by hand: the usual value, and how to set another one."""


@ROWS.check("clip_grad is set between two steps", name="clip_grad")
@ROWS.check("loss_scale is set between two steps", name="loss_scale")
def factor_set(folder, name):
    """It is refused before anything is updated, and taken back then."""
    usual, put = FACTORS[name]
    with Trial(EARLY) as trial:
        engine = started(trial, folder)
        updates = update_of(engine).num_updates
        put(engine, 0.5)
        for _ in range(2):
            said = answer(functools.partial(one_window, trial, engine))
            assert said.startswith(f"ConfigError: engine.optimizer.{name} = 0.5")
            assert 'step_before_norm" to false' in said
        assert not update_of(engine).is_begun
        assert update_of(engine).num_updates == updates
        assert not any(left_of_window(engine).values())
        put(engine, usual)
        same_as_stock(trial, engine, folder)
        assert given[-1] > 0


@ROWS.check("loaded between backward and step()")
def loaded_between(folder):
    """That ends the update that has begun."""
    with Trial(EARLY) as trial:
        engine = started(trial, folder)
        one_window(trial, engine)
        assert update_of(engine).is_begun
        engine.load_checkpoint(folder, "good")
        engine.micro_steps += -engine.micro_steps % engine.gradient_accumulation_steps()
        same_as_stock(trial, engine, folder)


@ROWS.check("destroyed between backward and step()")
def destroyed_between(folder):
    with Trial(EARLY) as trial:
        engine = started(trial, folder)
        one_window(trial, engine)
        assert update_of(engine).is_begun
        trial.end(engine)
    assert lanes_left() == []


# Weights and gradients that work in backward must wait for.


class Detached(torch.nn.Module):
    """Uses its weight last with a gradient, and first without one.

    Its backward has that gradient when it begins, and needs the weight when it ends. The layer in
    between has the bucket of gradients reduced.
    """

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.layer = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        hidden = torch.tanh(self.layer(torch.nn.functional.linear(x, self.weight.detach())))
        return x + torch.nn.functional.linear(hidden, self.weight)


def detached_net():
    return torch.nn.Sequential(*(Detached() for _ in range(4)))


@ROWS.check(
    "a weight waits for its release, not for its gradient alone",
    make=detached_net,
    zero={"reduce_bucket_size": 1000, "sub_group_size": 10**4},
)
@ROWS.check(
    "a tile waits for the gradients of all its parameters",
    zero={"stage3_param_persistence_threshold": 0, "sub_group_size": 10**6},
    tile_numel=2048,
)
def hand_over_in_order(_folder, **changes):
    act = functools.partial(train_five, case=CASE.changed(**changes, is_cut=False))
    ours = play(act, EARLY)
    assert given[-1] > 0
    same(ours, play(act, None))


def train_five(trial, case):
    train(trial, trial.open(case), 5)


def share_midway(engine, micro_step):
    """A layer is used again from the fourth window on, of which no earlier one has told."""
    if micro_step == 3 * engine.gradient_accumulation_steps():
        engine.module.segments = THRICE


def of_a_leaf():
    """Its gradients are reduced after each use of the module, of which the first has none yet."""
    model = Net(segments=THRICE)
    model.layers[1] = torch.nn.Sequential(model.layers[1])
    set_z3_leaf_modules(model, [torch.nn.Sequential])
    return model


TWICE = ((0,), (1,), (2,), (1,), (3,), (4,), (5,))
shared = functools.partial(Net, reentrant=True)
AGAIN = {
    "in three segments": {"make": functools.partial(shared, segments=THRICE)},
    "in two segments": {"make": functools.partial(shared, segments=TWICE)},
    "from a window on": {"make": shared, "before": share_midway},
    "of a leaf module": {"make": of_a_leaf},
}
"""Ways to use a layer again; stock goes by the last gradient in the first micro-batch of a window,
and by their sum in others."""
# The weight is not kept between two uses, which makes backward gather it again.
RELEASED = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}


def use_again(_folder, **changes):
    """A parameter that gets several gradients in a backward is updated once."""
    case = CASE.changed(**changes)

    def act(trial):
        trial.train(trial.open(case), case.steps)

    ours = play(act, EARLY)
    assert given[-1] > 0
    same(ours, play(act, None))


for number, (name, options) in enumerate(AGAIN.items()):
    accumulation, zero = ((1, {}), (2, RELEASED))[number % 2]
    changes = {**options, "accumulation": accumulation, "zero": {**ONE_LAYER_A_BUCKET, **zero}}
    row = f"a layer used again {name}, accumulation {accumulation}"
    ROWS.check(row, 1, 2, **changes)(use_again)


# State that stays on the device.


def write_masters(engine):
    for master in engine.optimizer.fp32_partitioned_groups_flat:
        master.data.mul_(1.5)


def evaluate(engine):
    evaluate_between(engine, 0)


def look_at_masters(engine):
    weight = engine.module.layers[3].weight
    engine.seen = [*getattr(engine, "seen", []), safe_get_full_fp32_param(weight)]


def stay(folder, block=STAYS, between=None, steps=6, memory=None, model=lambda case: {}):
    """Train on, and compare with stock; return the tiles on the device before each step."""
    held = []
    with Trial(block, memory=memory) as trial:
        engine = started(trial, folder)
        cache = update_of(engine).cache

        def watch(engine):
            held.append(len(cache.tiles))
            if between:
                between(engine)
                held.append(len(cache.tiles))
            assert memory is not None or cache.taken_bytes <= LIMIT

        trial.forget()
        train_on(trial, engine, steps, watch)
        trial.see("what was seen", getattr(engine, "seen", []))
    with Trial(None) as stock:
        other = stock.open(CASE)
        assert other.load_checkpoint(folder, "good")[0]
        train_on(stock, other, steps, between)
        stock.see("what was seen", getattr(other, "seen", []))
    same(trial, stock)
    return held


@ROWS.check("state stays as far as a number of bytes goes")
def as_far_as_a_number_goes(folder):
    # 60,000 bytes take tiles of 256 elements and 14 bytes an element, and some smaller ones.
    (held,) = set(stay(folder / "number"))
    assert held >= 16
    assert set(stay(folder / "none", {**STAYS, "device_memory_bytes": 1})) == {0}


@ROWS.check("state that stays goes home where it may be written", between=write_masters)
@ROWS.check("state that stays is there after an evaluation", between=evaluate)
@ROWS.check("state that stays is there after a look at it", between=look_at_masters)
def looked_at_or_written(folder, between):
    held = stay(folder, between=between)
    assert all(held[::2])
    assert all(held[1::2]) == (between is not write_masters)


@ROWS.check("auto takes what is left over, and no more")
def auto_takes_what_is_left(folder):
    """Others take half of the memory in each forward, and more in one of them."""
    memory = Memory(300_000)

    def change(engine):
        memory.take_others(230_000 - memory.others_bytes)
        memory.take_others(-memory.others_bytes)

    held = stay(folder, AUTO, change, steps=8, memory=memory)
    assert max(held) > 0
    assert memory.peak_bytes <= 300_000


class Hungry:
    """Takes device memory in a forward, as a longer batch does."""

    def __init__(self, memory):
        self.memory, self.notes = memory, []

    def forward(self, engine, wanted):
        hook = engine.module.layers[2].register_forward_hook(lambda *_: self.take(wanted))
        try:
            engine(torch.ones(4, WIDTH).bfloat16())
        except torch.OutOfMemoryError as error:
            self.notes += getattr(error, "__notes__", [""])
        finally:
            hook.remove()
            self.memory.take_others(-self.memory.others_bytes)

    def take(self, wanted):
        self.memory.take_others(wanted)


@ROWS.check("a forward that runs out of memory gets it the next time, and is told so")
def the_next_attempt_has_it(folder):
    memory = Memory(10**7)
    hungry = Hungry(memory)

    def attempt(engine):
        with torch.no_grad():
            for _ in range(2):
                hungry.forward(engine, memory.total_bytes - 20_000)

    def between(engine):
        if hasattr(engine.optimizer, "background"):
            attempt(engine)
        else:
            with torch.no_grad():
                engine(torch.ones(4, WIDTH).bfloat16())

    block = {**STAYS, "device_memory_bytes": 10**6}
    held = stay(folder, block, between, steps=1, memory=memory)
    assert held[0] > 0
    assert held[1] == 0
    assert len(hungry.notes) == 1, hungry.notes
    assert "deep_optimizer_states.device_memory_bytes" in hungry.notes[0]


@contextlib.contextmanager
def refused_now_and_then():
    """Refuse a piece of device memory now and then; yields the pieces refused."""
    allocate, pieces, refused = EmulatedDevice.empty_device, itertools.count(1), []

    def empty_device(device, numel, dtype):
        number = next(pieces)
        if number > 200 and number % 23 == 0:
            refused.append(number)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return allocate(device, numel, dtype)

    with mock.patch.object(EmulatedDevice, "empty_device", empty_device):
        yield refused


@ROWS.check("memory that cannot be had is not missed")
def refused(folder):
    with refused_now_and_then() as refused:
        held = stay(
            folder, {**STAYS, "device_memory_bytes": 10**6}, write_masters, 8, Memory(10**6)
        )
    assert refused
    assert max(held) > 0


@ROWS.check("state comes and goes every few steps", 1, 2, policy="dynamic")
@ROWS.check("state comes and goes every few steps, all-host", policy="all-host")
def moved(folder, policy):
    with moving(37):
        held = stay(folder, {**STAYS, "policy": policy}, steps=10)
    assert len(set(held)) > 2, held


@ROWS.check("state is not sent ahead before the last update has brought it home")
def late_flushes(_folder):
    """The update goes on until it is waited for, which the next backward does not do."""
    engines, early, send_ahead = [], [], TileCache.send_ahead

    def watch(cache, order, is_given):
        update = update_of(engines[0])
        early.append(engines[0].optimizer.background.is_running and not update.is_begun)
        send_ahead(cache, order, is_given)

    def act(trial):
        engines[:] = [trial.open(CASE.changed(accumulation=1))]
        trial.train(engines[0], 8)

    block = {**STAYS, "device_memory_bytes": 10**9}
    with mock.patch.object(TileCache, "send_ahead", watch), updates_end_when_waited_for():
        same(play(act, block), play(act, None))
    assert not any(early)
