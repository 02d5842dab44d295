"""Who reads a parameter waits for its tiles, once; here with a barrier that only notes it."""

import copy
import io
import os
import pickle
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.nn import (
    Linear,
    Parameter,
    Sequential,
    TransformerEncoder,
    TransformerEncoderLayer,
    functional as F,
)

from deep_optimizer_states.adapter.in_flight import MOST_COMPILED, InFlight, WeightsInFlight
from deep_optimizer_states.errors import UpdateError


class Barrier:
    """Notes who was waited for; fails if told to."""

    def __init__(self):
        self.waited_for, self.fails = [], False
        self.background = SimpleNamespace(overlooks_failure=False, check=lambda: None)

    def use(self, keys):
        if self.fails:
            raise UpdateError("the update failed")
        self.waited_for += keys


class Fixture:
    def __init__(self, make=lambda: Sequential(Linear(3, 3), Linear(3, 3))):
        self.model, self.barrier = make(), Barrier()
        self.params = list(self.model.parameters())
        self.weights = WeightsInFlight(lambda: self.model, self.params, self.barrier)
        self.weights.put_up()

    @property
    def waited_for(self):
        names = {id(param): name for name, param in self.model.named_parameters()}
        return [names[key] for key in self.barrier.waited_for]


@pytest.fixture
def fixture():
    return Fixture()


def save(param):
    torch.save(param, io.BytesIO())


def set_data(param):
    param.data = torch.zeros(3, 3)


READS = {
    "an operation": lambda param: F.linear(torch.ones(1, 3), param),
    "a list": lambda param: torch._foreach_norm([param]),
    "an operand on the right": lambda param: torch.ones(3, 3) @ param,
    "a method": lambda param: param.norm(),
    "data": lambda param: param.data,
    "detach": lambda param: param.detach(),
    "numpy": lambda param: param.detach().numpy(),
    "an address": lambda param: param.data_ptr(),
    "storage": lambda param: param.untyped_storage(),
    "assignment": set_data,
    "copy": copy.copy,
    "deep copy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": save,
    "text": repr,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_waits_once_and_leaves_a_plain_parameter(fixture, read):
    param = fixture.model[1].weight
    for _ in range(2):
        read(param)
    assert fixture.waited_for == ["1.weight"]
    assert type(param) is Parameter
    assert isinstance(fixture.model[0].weight, InFlight)


def set_grad(param):
    param.grad = torch.ones(3, 3)
    param.grad = None
    del param.grad


LOOKS = {
    "gradients": set_grad,
    "zero_grad()": lambda param: torch.optim.SGD([param], 0.1).zero_grad(),
    "sizes": lambda param: (param.shape, param.size(), param.numel(), param.dim(), param.ndim),
    "kinds": lambda param: (param.dtype, param.device, param.is_floating_point(), param.layout),
    "requires_grad": lambda param: param.requires_grad,
    "who it is": lambda param: (hash(param), {param: 1}[param], isinstance(param, Parameter)),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_what_reads_no_weight_waits_for_none(fixture, look):
    look(fixture.model[1].weight)
    assert fixture.waited_for == []


def test_a_module_waits_for_its_own_parameters_when_it_runs(fixture):
    def see(_module, _args):
        seen.append(fixture.waited_for)

    seen = []
    for layer in fixture.model:
        layer.register_forward_pre_hook(see)
    fixture.model(torch.ones(1, 3))
    own = ["0.weight", "0.bias"]
    assert seen == [own, [*own, "1.weight", "1.bias"]]
    assert not fixture.weights.is_up


def test_in_evaluation_it_waits_for_all_below(fixture):
    fixture.model.eval()
    fixture.model[0].register_forward_pre_hook(lambda *_: seen.append(fixture.waited_for))
    seen = []
    fixture.model(torch.ones(1, 3))
    assert len(seen[0]) == 4


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_of_the_model_is_a_model_like_any_other(fixture, make_copy):
    copied = make_copy(fixture.model)
    assert {type(param) for param in copied.parameters()} == {Parameter}
    fixture.weights.put_up()
    fixture.barrier.waited_for.clear()
    copied(torch.ones(1, 3))
    assert fixture.waited_for == []


def test_a_failure_is_raised_at_every_read_until_it_is_overlooked(fixture):
    param = fixture.model[0].weight
    fixture.barrier.fails = True
    for read in (lambda: param + 1, lambda: fixture.model(torch.ones(1, 3)), lambda: param.data):
        with pytest.raises(UpdateError, match="the update failed"):
            read()
    fixture.barrier.background.overlooks_failure = True
    param.detach()
    assert type(param) is Parameter


def test_nothing_is_left_in_the_model(fixture):
    before = set(vars(fixture.model[0].weight))
    fixture.weights.take_down()
    assert {type(param) for param in fixture.params} == {Parameter}
    assert set(vars(fixture.model[0].weight)) == before
    assert not any(module._forward_pre_hooks for module in fixture.model.modules())
    fixture.model(torch.ones(1, 3))
    assert fixture.waited_for == []


def test_a_function_that_was_compiled_by_itself_waits(fixture):
    compiled = torch.compile(lambda weight, x: (x @ weight).sum(), backend="eager")
    weight, x = fixture.model[0].weight, torch.ones(2, 3)
    expected = compiled(weight.detach(), x)
    for _ in range(2):
        fixture.weights.put_up()
        fixture.barrier.waited_for.clear()
        assert compiled(weight, x) == expected
        assert "0.weight" in fixture.waited_for
        assert type(weight) is Parameter


def test_a_function_that_compiles_as_a_whole_gets_plain_parameters_until_step_waits(fixture):
    compiled = torch.compile(lambda weight, x: x @ weight, backend="eager", fullgraph=True)
    weight, x = fixture.model[0].weight, torch.ones(2, 3)
    fixture.weights.give_back()
    compiled(weight, x)  # the compiler is imported by whoever asks for it first
    num_steps = 0
    while fixture.weights.may_wait:
        fixture.weights.put_up()
        fixture.barrier.waited_for.clear()
        assert torch.equal(compiled(weight, x), x @ weight)
        assert "0.weight" in fixture.waited_for
        num_steps += 1
    assert num_steps == MOST_COMPILED


def test_what_a_child_of_fork_compiles_waits_for_nobody(fixture):
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))  # imports the compiler
    fixture.weights.put_up()
    fixture.barrier.waited_for.clear()
    child = os.fork()
    if not child:
        code = 1
        try:
            torch.compile(lambda x: x + 2, backend="eager")(torch.ones(1))
            code = len(fixture.barrier.waited_for)
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_a_compiler_that_meets_a_failed_update_says_so_and_compiles_later(fixture):
    compiled = torch.compile(lambda weight, x: x @ weight, backend="eager", fullgraph=True)
    weight, x = fixture.model[0].weight, torch.ones(2, 3)
    compiled(weight.detach(), x)
    fixture.weights.put_up()
    fixture.barrier.fails = True
    with pytest.raises(Exception, match="the update failed"):
        compiled(weight, x)
    fixture.barrier.fails = False
    assert torch.equal(compiled(weight, x), x @ weight)


@pytest.fixture
def shorter(monkeypatch):
    """Counts how often torch's encoder layer takes its shorter way."""
    counted = mock.Mock(wraps=torch._transformer_encoder_layer_fwd)
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", counted)
    return counted


@pytest.mark.parametrize("part", ["model", "encoder", "layer"])
def test_an_encoder_layer_takes_its_shorter_way_in_evaluation(shorter, part):
    """Which it does only if it has no hook; so nobody waits for single tiles of such a model."""
    model = Sequential(TransformerEncoder(encoder_layer(), 2), Linear(4, 4)).eval()
    weights = WeightsInFlight(lambda: model, model.parameters(), Barrier())
    assert not weights.may_wait
    called = {"model": model, "encoder": model[0], "layer": model[0].layers[1]}[part]
    num_layers = sum(isinstance(it, TransformerEncoderLayer) for it in called.modules())
    with torch.no_grad():
        called(torch.ones(1, 2, 4))
        assert shorter.call_count == num_layers
        copy.deepcopy(called)(torch.ones(1, 2, 4))
    assert shorter.call_count == 2 * num_layers


def encoder_layer():
    return TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)


class Scaled(Parameter):
    """Of a library."""


def with_own_class():
    layer = Linear(3, 3)
    layer.weight = Scaled(torch.zeros(3, 3))
    return Sequential(layer)


def compiled_in_place():
    layer = Linear(3, 3)
    layer.compile(backend="eager")
    return Sequential(layer)


def compiled_forward():
    layer = Linear(3, 3)
    layer.forward = torch.compile(layer.forward, backend="eager")
    return Sequential(layer)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "may_wait"),
    [
        (lambda: Sequential(Linear(3, 3)), True),
        (with_own_class, False),
        (compiled_in_place, False),
        (compiled_forward, False),
        (lambda: Sequential(torch.compile(Linear(3, 3), backend="eager")), False),
        (lambda: Sequential(torch.jit.script(Linear(3, 3))), False),
        (lambda: Sequential(encoder_layer()), False),
    ],
    ids=[
        "plain",
        "own class",
        "compiled in place",
        "compiled forward",
        "compiled",
        "scripted",
        "torch's encoder layer",
    ],
)
def test_nobody_can_wait_for_single_tiles_where_reads_are_not_seen(make, may_wait):
    model = make()
    weights = WeightsInFlight(lambda: model, model.parameters(), Barrier())
    assert weights.may_wait is may_wait
