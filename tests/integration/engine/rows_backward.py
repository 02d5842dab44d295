"""Work in backward: what comes between backward and ``step()`` ends in stock's bits or an error."""

import functools
from unittest import mock

import deepspeed
import torch
from deepspeed.utils import set_z3_leaf_modules
from engines import STRIDE, WIDTH, Net, Trial, answer, lanes_left, play, same
from rows import Rows
from rows_table import CASES, FIRST_CASE, ONE_LAYER_A_BUCKET, THRICE
from seams import UpdateLauncher, cache, inside

ROWS = Rows()
CASE = CASES[FIRST_CASE].changed(config={"gradient_clipping": 0})
EARLY = {**STRIDE, "step_before_norm": True}
GOOD = 3
"""Steps until a checkpoint is saved; backward works from the third on."""
given = []
"""Numbers of tiles that each update was handed before ``step()``."""


def run(report, extent, folder):
    launch = UpdateLauncher.launch

    def counted_launch(launcher, *args):
        given.append(len(launcher._begun.work) if launcher.is_begun else 0)
        launch(launcher, *args)

    with (
        mock.patch.object(UpdateLauncher, "launch", counted_launch),
        # What is sent is then a matter of memory, and not of time.
        mock.patch.object(cache, "MOST_UNDER_WAY", 1000),
        mock.patch.object(cache, "LOOK_S", 0.0),
    ):
        ROWS.run(report, extent, folder)


def update_of(engine):
    return inside(engine, "launcher")


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
