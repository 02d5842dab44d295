"""Work in backward: parameters that may get several gradients."""

import pytest
import torch
from deepspeed.runtime.zero.parameter_offload import _init_external_params
from torch.utils.checkpoint import checkpoint

from deep_optimizer_states.adapter.zero3.ahead import Uses

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
