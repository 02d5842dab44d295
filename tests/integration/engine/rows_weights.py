"""Weights at stages 1 and 2 while an update is in flight: whoever reads or writes one waits."""

import contextlib
import copy
import functools
import io
import sys
from unittest import mock

import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
)
from engines import (
    STRIDE,
    WIDTH,
    Case,
    Net,
    Trial,
    answer,
    broken,
    differences,
    go_on,
    make_folder,
    play,
    play_late,
    same,
)
from rows import Rows, stock_of
from seams import in_flight, inside, zero12
from torch.nn import functional as F

ROWS = Rows()
run = ROWS.run
AT_1, AT_2 = Case(accumulation=1, zero={"stage": 1}), Case(accumulation=1, zero={"stage": 2})


def outputs(engine, model=None):
    """Of a fixed batch."""
    x = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.bfloat16, device=engine.device)
    return (model or engine.module)(x.reshape(4, WIDTH))


def step_in_flight(trial, engine):
    """A window whose update goes on a while after its step() has returned."""
    trial.hold(engine)
    trial.train(engine, 1)
    trial.let_go(engine)


def between_steps(act=None, case=AT_2):
    """Do something while each of four updates is in flight, and train on with what it leaves.

    With nothing to do, the next forward comes while they are.
    """

    def played(trial):
        engine = trial.open(case)
        for _ in range(4):
            step_in_flight(trial, engine)
            if act is not None:
                act(trial, engine)
                trial.see_state(engine)

    return played


# Reads and writes outside of a forward.


def read_by_hand(trial, engine):
    trial.see("weights", [parameter.detach().clone() for parameter in engine.module.parameters()])


def write_by_hand(trial, engine):
    for number, parameter in enumerate(engine.module.parameters()):
        if number % 2:
            parameter.data.mul_(0.5)
        else:
            with torch.no_grad():
                torch._foreach_add_([parameter], 0.01)


def save_by_hand(trial, engine):
    file = io.BytesIO()
    torch.save(engine.module.state_dict(), file)
    file.seek(0)
    trial.see("saved weights", list(torch.load(file).values()))


def copy_by_hand(trial, engine):
    """As an average of weights is kept. The copy is a model like any other."""
    copied = copy.deepcopy(engine.module)
    assert {type(parameter) for parameter in copied.parameters()} == {torch.nn.Parameter}
    trial.see("outputs of the copy", outputs(engine, copied))


def read_state(trial, engine):
    for parameter in engine.module.parameters():
        trial.see("master weights", safe_get_full_fp32_param(parameter))
        trial.see("moments", safe_get_full_optimizer_state(parameter, "exp_avg"))
        trial.see("gradient", safe_get_full_grad(parameter))


def write_state(trial, engine):
    weight = engine.module.layers[1].weight
    safe_set_full_fp32_param(weight, torch.full_like(weight, 0.01, dtype=torch.float32))
    safe_set_full_grad(weight, torch.full_like(weight, 0.02, dtype=torch.float32))


def gradients_by_group(trial, engine):
    for gradients in engine.optimizer.offload_gradient_dict.values():
        trial.see("gradients", [gradients[idx] for idx in range(len(gradients))])


def gradients_after_ctrl_c(trial, engine):
    """Ctrl-C comes while a gradient is multiplied with what it owes; stock multiplies none here."""
    names = ("__mul__", "mul_")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(
                mock.patch.object(torch.Tensor, name, side_effect=KeyboardInterrupt)
            )
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))
        next(iter(engine.optimizer.offload_gradient_dict.values()))[0]
    gradients_by_group(trial, engine)


def masters_by_group(trial, engine):
    """Read and written where torch's own optimizers have their parameters."""
    see_masters(trial, engine, lambda masters: [] + masters)  # noqa: RUF005 - as sum() does


def masters_and_more(trial, engine):
    see_masters(trial, engine, lambda masters: masters + [])  # noqa: RUF005


def see_masters(trial, engine, take):
    for group in engine.optimizer.param_groups:
        trial.see("master weights", [master.detach().clone() for master in take(group["params"])])
        with torch.no_grad():
            group["params"][0].clamp_(-0.1, 0.1)


def parameter_of_a_parameter(trial, engine):
    again = [torch.nn.Parameter(it) for it in engine.module.parameters()]
    assert {type(it) for it in again} == {torch.nn.Parameter}
    trial.see("weights", [it.detach().clone() for it in again])


def evaluate(trial, engine):
    engine.eval()
    with torch.no_grad():
        trial.see("outputs in evaluation", engine(torch.ones(4, WIDTH, dtype=torch.bfloat16)))
    engine.train()


def load_weights(trial, engine):
    weights = {name: torch.full_like(it, 0.01) for name, it in engine.module.state_dict().items()}
    engine.module.load_state_dict(weights)
    engine.optimizer.refresh_fp32_params()


BY_HAND = (
    *(read_by_hand, write_by_hand, save_by_hand, copy_by_hand, parameter_of_a_parameter),
    *(evaluate, load_weights),
)
OF_STATE = (
    *(read_state, write_state, masters_by_group, masters_and_more),
    *(gradients_by_group, gradients_after_ctrl_c),
)
for number, act in enumerate((*BY_HAND, *OF_STATE)):
    case = AT_1 if number % 3 == 0 else AT_2
    ROWS.compare(f"{act.__name__} between steps, stage {case.stage}")(between_steps(act, case))


# Forwards that do not call every module that owns what they read.


class Tied(torch.nn.Module):
    """Its first layer reads the weight of the last one, whose forward comes later."""

    def __init__(self):
        super().__init__()
        self.layers = Net(3).layers
        self.last = torch.nn.Linear(WIDTH, WIDTH)
        self.layers[1].weight = self.layers[0].weight

    def forward(self, x):
        x = F.linear(x, self.last.weight)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return self.last(x)


class Attending(torch.nn.Module):
    """Torch's attention reads the weights of its output layer without calling it."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(self.make_layer() for _ in "abcd")
        self.first, self.last = torch.nn.Linear(WIDTH, 8), torch.nn.Linear(8, WIDTH)

    def make_layer(self):
        return torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def run(self, layer, x):
        return layer(x, x, x, need_weights=False)[0]

    def forward(self, x):
        x = self.first(x)[None]
        for layer in self.layers:
            x = self.run(layer, x)
        return self.last(x[0])


class Encoding(Attending):
    """Torch's encoder layers look for hooks, so that step() waits."""

    def make_layer(self):
        return torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def run(self, layer, x):
        return layer(x)


class Recurrent(torch.nn.Module):
    """Torch's LSTM keeps its weights in a list beside its parameters."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.LSTM(WIDTH, WIDTH) for _ in "ab")

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)[0] + x
        return x


class Uncalled(Net):
    """Its layers are run without a call of theirs."""

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer.forward(x)) + x
        return x


for make in (Tied, Attending, Recurrent, Uncalled):
    played = between_steps(case=AT_2.changed(make=make))
    ROWS.compare(f"a model that is {make.__name__}")(played)


def shorter_ways(trial, name, play):
    with mock.patch.object(torch, name, wraps=getattr(torch, name)) as shorter:
        play(trial)
    assert shorter.call_count or trial.block, "stock takes none"
    trial.see("shorter ways", [shorter.call_count])


@ROWS.compare("torch's shorter way of attention in evaluation")
def evaluate_attention(trial):
    played = between_steps(evaluate, AT_2.changed(make=Attending))
    shorter_ways(trial, "_native_multi_head_attention", played)


@ROWS.compare("torch's shorter way of encoder layers in evaluation")
def evaluate_encoder(trial):
    def played(trial):
        engine = trial.open(AT_2.changed(make=Encoding))
        for _ in range(4):
            trial.train(engine, 1)
            assert type(next(engine.module.parameters())) is torch.nn.Parameter, "nobody waited"
            evaluate(trial, engine)

    shorter_ways(trial, "_transformer_encoder_layer_fwd", played)


def transformed(trial, engine):
    """Behind the wrappers of torch.func no call names a parameter."""
    parameters = dict(engine.module.named_parameters())

    def loss(weights):
        called = torch.func.functional_call(
            engine.module, weights, (torch.ones(4, WIDTH).bfloat16(),)
        )
        return called.float().sum()

    trial.see("gradients by torch.func", list(torch.func.grad(loss)(parameters).values()))


ROWS.compare("functional_call under torch.func.grad")(between_steps(transformed))


@ROWS.compare("reentrant checkpointing, accumulation")
def recompute(trial):
    case = AT_2.changed(make=functools.partial(Net, reentrant=True), accumulation=2)
    between_steps(case=case)(trial)


@ROWS.compare("a backward of a graph that is older than the update")
def older_graph(trial):
    engine = trial.open(AT_2)
    for _ in range(3):
        first, second = trial.loss(engine), trial.loss(engine)
        engine.backward(first)
        trial.hold(engine)
        trial.step(engine)
        trial.let_go(engine)
        engine.backward(second)
        trial.step(engine)


@ROWS.compare("torch.autograd.grad of a graph that is older than the update")
def gradient_of_an_older_graph(trial):
    """Of weights that no module of it read."""
    engine = trial.open(AT_2)
    for _ in range(3):
        x = torch.ones(4, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        first, second = (engine.module.layers[number].weight for number in (0, 5))
        old = F.linear(torch.tanh(F.linear(x, first)), second)
        step_in_flight(trial, engine)
        trial.see("gradient", torch.autograd.grad(old.float().sum(), x)[0])


@ROWS.compare("a backward of another engine through weights that are older")
def play_against_each_other(trial):
    """As a generator's backward goes through the discriminator, which has stepped meanwhile."""
    one, other = (trial.open(AT_2) for _ in range(2))
    for _ in range(3):
        made = outputs(one)
        other.module.requires_grad_(False)
        judged = other.module(made)
        other.module.requires_grad_(True)
        other.backward(other(made.detach()).float().pow(2).mean())
        trial.hold(other)
        trial.step(other)
        trial.let_go(other)
        one.backward(judged.float().pow(2).mean())
        trial.step(one)


@ROWS.compare("an error in forward, then the same batch")
def forward_fails(trial):
    engine = trial.open(AT_2)
    trial.train(engine, 1)
    for layer in (0, 2, 6):
        step_in_flight(trial, engine)
        engine.module.fails_at, engine.module.error = layer, ZeroDivisionError("the user's own")
        assert answer(lambda: outputs(engine)) == "ZeroDivisionError: the user's own"
        trial.see("outputs", outputs(engine))


# Checkpoints, failures and ends.


@ROWS.compare("saved right after a step, loaded right after another")
def save_and_load(trial):
    engine, folder = trial.open(AT_2), make_folder()
    with contextlib.redirect_stdout(sys.stderr):
        step_in_flight(trial, engine)
        engine.save_checkpoint(folder)
        trial.train(engine, 1)
        step_in_flight(trial, engine)
        engine.load_checkpoint(folder)
    trial.see_state(engine)
    trial.train(engine, 2)


@ROWS.compare("destroyed with an update in flight")
def destroy_in_flight(trial):
    """The model is left with weights that are whole, and with nothing of ours."""
    engine = trial.open(AT_2)
    model = engine.module
    for _ in range(2):
        step_in_flight(trial, engine)
    trial.end(engine)
    assert {type(parameter) for parameter in model.parameters()} == {torch.nn.Parameter}
    trial.see("hooks", [len(module._forward_pre_hooks) for module in model.modules()])
    trial.see("weights", [parameter.detach() for parameter in model.parameters()])


@ROWS.check("an update that failed is raised by whoever needs its weights")
def update_fails(folder):
    with Trial(STRIDE) as trial:
        engine = trial.open(AT_2)
        trial.train(engine, 2)
        engine.save_checkpoint(folder, "two")
        with broken("CPU lane"):
            trial.train(engine, 1)
            weight = engine.module.layers[0].weight
            calls = {
                "a read by hand": lambda: weight.sum(),
                "a module by itself": lambda: outputs(engine, engine.module.layers[1]),
                "forward": lambda: trial.loss(engine),
                "weights": engine.module.state_dict,
                "a copy": lambda: copy.deepcopy(engine.module),
            }
            for name, call in (*calls.items(), *calls.items()):
                said = answer(call)
                assert said.startswith("UpdateError"), (name, said)
                assert "out of luck" in said, (name, said)
        assert engine.load_checkpoint(folder, "two")[0] is not None
        trial.forget()
        trial.train(engine, 3, skip=2)
        trial.see_state(engine)
        same(trial, go_on(AT_2, None, folder, "two", steps=3, skip=2))
        trial.end(engine)


@ROWS.check("tiles are updated in the order in which they were first read")
def order_of_reads(_folder):
    class Backwards(Net):
        def forward(self, x):
            for layer in reversed(self.layers):
                x = torch.tanh(layer(x)) + x
            return x

    with Trial(STRIDE) as trial:
        engine = trial.open(AT_2.changed(make=Backwards))
        trial.train(engine, 3)
        order, update = inside(engine, "launcher").order, inside(engine, "weights")
        tiles = update._barrier._tiles_of
        last = tiles[id(engine.module.layers[5].weight)]
        assert list(order[: len(last)]) == list(last)
        assert sorted(order) == [*range(len(order))]
        trial.end(engine)


# Where reads are not seen.


class Half(torch.nn.Module):
    """Two layers, one of which was given another form."""

    def __init__(self, change):
        super().__init__()
        self.layers = Net(3).layers
        self.changed = change(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH)))

    def forward(self, x):
        x = self.changed(x)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


class Scaled(torch.nn.Parameter):
    """A parameter of a library's own class."""


def of_own_class(module):
    weight = module[0].weight
    module[0].weight = Scaled(weight.detach())
    return module


UNSEEN = {"scripted": torch.jit.script, "of a class of its own": of_own_class}
"""What is compiled: see ``rows_calls``."""


def train_unseen(trial, form):
    engine = trial.open(AT_2.changed(make=functools.partial(Half, UNSEEN[form])))
    for _ in range(4):
        trial.micro_step(engine)


train_scripted, train_own_class = (functools.partial(train_unseen, form=form) for form in UNSEEN)
for form, act in zip(UNSEEN, (train_scripted, train_own_class), strict=True):
    ROWS.compare(f"a layer that is {form}")(act)


# Negative controls: each part of the mechanism left out must show.


def left_out(_folder, act, patches):
    """The last of the patches leaves it out; the others let nobody else wait in its place."""
    expected = stock_of(act)
    with contextlib.ExitStack() as stack:
        for patch in patches[:-1]:
            stack.enter_context(mock.patch.object(*patch))
        same(play_late(act, STRIDE), expected)
        stack.enter_context(mock.patch.object(*patches[-1]))
        assert differences(play_late(act, STRIDE), expected) != []


bring_home = zero12.LateScaled.bring_home


def bring_home_at_once(gradients, runs):
    with mock.patch.object(gradients, "_wait"):
        bring_home(gradients, runs)


@ROWS.check("left out: the wait of gradients that stay on the device")
def gradients_of_an_update_in_flight(_folder):
    """It has their places until it ends."""

    def act(trial):
        engine = trial.open(AT_2)
        for _ in range(3):
            step_in_flight(trial, engine)
        gradients_by_group(trial, engine)

    block = {**STRIDE, "policy": "all-host", "device_memory_bytes": 10**9}
    expected = stock_of(act)
    same(play_late(act, block), expected)
    with mock.patch.object(zero12.LateScaled, "bring_home", bring_home_at_once):
        assert differences(play_late(act, block), expected) != []


@ROWS.compare("gradients written in inference mode, of a layer that is left out then")
def write_in_inference_mode(trial):
    def write(engine, micro_step):
        engine.module.skipped = (2,) if micro_step >= 2 else ()
        weight = engine.module.layers[2].weight
        if micro_step == 2:
            with torch.inference_mode():
                safe_set_full_grad(weight, torch.full_like(weight, 0.01, dtype=torch.float32))

    trial.train(trial.open(AT_2), 5, before=write)


@ROWS.check("the device steps gradients that were read and not those that were written")
def step_looked_at(_folder):
    def write(parameter):
        safe_set_full_grad(parameter, safe_get_full_grad(parameter))

    for act, is_stepped_there in ((safe_get_full_grad, True), (write, False)):
        with Trial(STRIDE) as trial:
            engine = trial.open(AT_2)
            trial.backward(engine)
            for parameter in engine.module.parameters():
                act(parameter)
            trial.step(engine)
            engine.optimizer.background.wait()
            plan = inside(engine, "launcher").executor.last_plan
            assert bool(plan.device_tiles) == is_stepped_there


@ROWS.check("left out: the hook, of torch.func")
def transformed_without_hooks(_folder):
    """It reads while the update is held, which is let go after it."""

    def act(trial):
        engine = trial.open(AT_2)
        trial.train(engine, 1)
        trial.hold(engine)
        trial.train(engine, 1)
        transformed(trial, engine)
        trial.release(engine)

    without_hook = mock.patch.object(in_flight._BeforeForward, "__call__", return_value=None)
    with mock.patch.object(*NOT_BEFORE_AUTOGRAD), without_hook:
        assert differences(play(act, STRIDE), play(act, None)) != []


def put_up_in_name(weights):
    weights._waiting, weights.is_up = dict(weights._params), True


def own_alone(hook, _module, _args):
    for parameter in hook._own:
        if isinstance(parameter, in_flight.InFlight):
            hook._weights.let_through(parameter)


NOT_BEFORE_AUTOGRAD = (zero12.InterleavedFlatOptimizer, "before_autograd", lambda _self: 0)
NO_CLASS = (in_flight.WeightsInFlight, "put_up", put_up_in_name)
for name, (act, patches) in {
    "class, of a read by hand": (between_steps(read_by_hand), [NO_CLASS]),
    "class, of a write by hand": (between_steps(write_by_hand), [NO_CLASS]),
    "hook, of all below in evaluation": (
        evaluate_attention,
        [(in_flight._BeforeForward, "__call__", own_alone)],
    ),
    "look for scripted modules": (
        train_scripted,
        [(in_flight, "is_read_unseen", lambda _module: False)],
    ),
    "wait of backward, of an older graph": (older_graph, [NOT_BEFORE_AUTOGRAD]),
    "wait of torch.autograd.grad": (gradient_of_an_older_graph, [NOT_BEFORE_AUTOGRAD]),
    "wait of another engine's backward": (play_against_each_other, [NOT_BEFORE_AUTOGRAD]),
    "wait of safe_get_*": (
        between_steps(read_state),
        [NO_CLASS, (zero12, "call_after", lambda _prepare, call: call)],
    ),
}.items():
    ROWS.check(f"left out: the {name}", act=act, patches=patches)(left_out)
