"""Work in backward: memory that state sent ahead may take, and who may get several gradients."""

import pytest
import torch
from deepspeed.runtime.zero.parameter_offload import _init_external_params
from torch.utils.checkpoint import checkpoint

from deep_optimizer_states.adapter.zero3 import ahead
from deep_optimizer_states.adapter.zero3.ahead import MemoryBudget, Uses

TILE = 10


class Memory:
    """A device's, of which ``free`` bytes are left."""

    def __init__(self, free, now=0, peak=0):
        self.free, self.now, self.peak = free, now, peak

    def free_bytes(self):
        return self.free

    def peak_bytes(self):
        return self.now, self.peak


def test_a_number_of_bytes_is_kept_to_whatever_is_free():
    room = MemoryBudget(Memory(free=0), 25, TILE)
    assert room.allows(0, 25)
    assert room.allows(15, 10)
    assert not room.allows(16, 10)
    assert not room.is_short, "who gives a number has weighed it"


@pytest.mark.parametrize(("limit", "looks"), [("auto", 1), (10**6, 3)])
def test_a_gpu_is_not_asked_about_its_memory_for_every_parameter(monkeypatch, limit, looks):
    monkeypatch.setattr(ahead, "LOOK_S", 1000.0)
    room = MemoryBudget(Memory(free=30), limit, TILE)
    assert [room.may_look() for _ in range(3)].count(True) == looks
    monkeypatch.setattr(ahead, "LOOK_S", 0.0)
    assert room.may_look()


def test_auto_takes_what_is_free_now_and_is_short_when_the_margin_is_touched():
    memory = Memory(free=30)
    room = MemoryBudget(memory, "auto", TILE)
    assert room.allows(1000, 30)
    assert not room.allows(0, 31)
    memory.free = 0
    assert not room.is_short
    memory.free = -1
    assert room.is_short


def test_auto_leaves_what_a_layer_takes_between_two_looks(monkeypatch):
    memory = Memory(free=100, peak=90)
    room = MemoryBudget(memory, "auto", TILE)
    monkeypatch.setattr(ahead, "LOOK_S", 0.0)
    for now in (20, 60, 40):
        memory.now = now
        room.look()
    assert room.allows(0, 70)
    assert not room.allows(0, 71), "90 at most, and 60 at a look: 30 come in between"


@pytest.mark.parametrize("limit", ["auto", 10**6])
def test_after_running_out_no_more_is_taken_in_this_window(limit):
    room = MemoryBudget(Memory(free=10**9), limit, TILE)
    room.was_short(800)
    assert not room.allows(0, 1)
    room.next_window()
    assert room.allows(0, 1)


@pytest.mark.parametrize(
    ("taken", "most"),
    [(800, [400, 440]), (0, [0, TILE])],  # it comes back from nothing
)
def test_after_running_out_auto_takes_half_and_then_a_little_more_each_time(taken, most):
    room = MemoryBudget(Memory(free=10**9), "auto", TILE)
    room.was_short(taken)
    for limit in most:
        room.next_window()
        assert room.allows(0, limit)
        assert not room.allows(0, limit + 1)


# Parameters that get one gradient in a backward are not taken for those that may get several; the
# others are in `integration/engine/rows_backward.py`, where the bits show them.


class Model(torch.nn.Module):
    """Layers by name; the caller says how each forward uses them, / for a checkpoint of its own."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in "abc"})
        for number, param in enumerate(self.parameters()):
            param.ds_id = number
        for module in self.modules():
            _init_external_params(module)

    def forward(self, words):
        x = torch.ones(2, requires_grad=True)
        for word in words.split():
            layer = self.layers[word[-1]]
            x = checkpoint(layer, x, use_reentrant=True) if word.startswith("/") else layer(x)
        return x.sum()


@pytest.mark.parametrize(
    ("words", "several"), [("a b a", ""), ("/a /b /c", ""), ("/a /b /a", "a"), ("/a /b a", "a")]
)
def test_a_parameter_used_again_where_a_backward_of_its_own_runs_may_get_several(words, several):
    model = Model()
    uses = Uses(model)
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, _: uses.count(module))

    def with_several():
        layers = model.layers.items()
        return "".join(name for name, layer in layers if uses.give_several(layer.weight.ds_id))

    with torch.no_grad():
        uses.begin_forward()
        model("a")  # builds no graph
    uses.begin_forward()
    loss = model(words)
    assert with_several() == several
    uses.begin_backward()
    loss.backward()
    uses.begin_forward()
    model("/a /b")
    assert with_several() == "", "the next forward begins anew"
