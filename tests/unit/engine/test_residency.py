"""When the memory is looked at, and when state is sent ahead of an update."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.nn import Linear, Sequential, Tanh, TransformerEncoderLayer

from deep_optimizer_states.adapter.residency import LooksInForward, Residency


class Watched:
    """A model of three modules that own parameters, before whose forwards looks are counted."""

    def __init__(self, model=None):
        self.num_looks = 0
        own = Sequential(Linear(2, 2), Tanh(), Sequential(Linear(2, 2)), Linear(2, 2))
        self.model = model or own
        self.looks = LooksInForward(self.model, self.look)

    def look(self):
        self.num_looks += 1


@pytest.fixture
def watched():
    return Watched()


def test_every_module_that_owns_parameters_looks_before_it_runs(watched):
    watched.model(torch.ones(1, 2))
    assert watched.num_looks == 3
    with torch.no_grad():
        watched.model(torch.ones(1, 2))
    assert watched.num_looks == 6
    watched.looks.take_down()
    watched.model(torch.ones(1, 2))
    assert watched.num_looks == 6
    assert not any(module._forward_pre_hooks for module in watched.model.modules())


def test_in_an_encoder_layer_nobody_looks_and_who_contains_it_does():
    """With a hook in it the layer would not take torch's shorter way."""
    watched = Watched(Sequential(Sequential(TransformerEncoderLayer(4, 2, 8)), Tanh()))
    watched.model(torch.ones(1, 2, 4))
    assert watched.num_looks == 2
    assert not any(it._forward_pre_hooks for it in watched.model[0][0].modules())


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_of_the_model_looks_at_nothing(watched, make_copy):
    make_copy(watched.model)(torch.ones(1, 2))
    assert watched.num_looks == 0


def test_nothing_is_moved_inside_of_a_transform(watched):
    """Which forbids to write to what it did not make itself."""
    parameters = {name: it.detach() for name, it in watched.model.named_parameters()}

    def called(weights):
        return torch.func.functional_call(watched.model, weights, (torch.ones(1, 2),)).sum()

    torch.func.grad(called)(parameters)
    assert watched.num_looks == 0
    called(parameters)
    assert watched.num_looks == 3


class Cache:
    """Notes what it is asked for; memory is short if told so."""

    def __init__(self):
        self.asked, self.is_short = [], False

    def look(self):
        return self.is_short

    def __getattr__(self, name):
        return lambda *_: self.asked.append(name)


def residency(num_updates=1, is_running=False, is_begun=False):
    done = []
    cache = Cache()
    update = SimpleNamespace(
        cache=cache, num_updates=num_updates, order=(1, 0), is_begun=is_begun, has_given=None
    )
    background = SimpleNamespace(
        is_running=is_running,
        wait=lambda: done.append("wait"),
        changing=lambda what: torch.no_grad(),
    )
    return Residency(update, background), cache, done


def test_state_is_sent_ahead_in_the_backward_that_ends_a_window_and_after_the_last_update():
    for given, ends_window, is_sent in (
        ({}, True, True),
        ({}, False, False),
        ({"num_updates": 0}, True, False),
        ({"is_running": True}, True, False),
    ):
        keeper, cache, _ = residency(**given)
        keeper.in_backward(ends_window)
        assert cache.asked == ["send_ahead"] * is_sent, given


@pytest.mark.parametrize(
    ("given", "waits"),
    [({}, 0), ({"is_running": True}, 1), ({"is_running": True, "is_begun": True}, 0)],
)
def test_where_memory_is_short_an_update_ends_before_state_goes_home(given, waits):
    keeper, cache, done = residency(**given)
    keeper.look()
    assert (cache.asked, done) == ([], [])
    cache.is_short = True
    keeper.look()
    assert (cache.asked, done) == (["relieve"], ["wait"] * waits)
