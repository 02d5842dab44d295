"""Which parameters may get several gradients in one backward, as the forward before it shows."""

import pytest
import torch
from deepspeed.runtime.zero.parameter_offload import _init_external_params
from deepspeed.utils import set_z3_leaf_modules
from torch.utils.checkpoint import checkpoint

from deep_optimizer_states.adapter.zero3.ahead import Uses


class Model(torch.nn.Module):
    """Layers by name; the caller says how each forward uses them."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in "abc"})
        self.leaf = torch.nn.Sequential(torch.nn.Linear(2, 2))
        set_z3_leaf_modules(self, [torch.nn.Sequential])
        for module in self.modules():
            _init_external_params(module)

    def forward(self, *segments):
        x = torch.ones(2, requires_grad=True)
        for segment in segments:
            x = self.checkpointed(segment, x) if segment.startswith("/") else self.run(segment, x)
        return x.sum()

    def run(self, names, x):
        for name in names:
            x = self.leaf(x) if name == "L" else self.layers[name](x)
        return x

    def checkpointed(self, names, x):
        """Each / is one checkpoint more around the layers."""
        run = self.checkpointed if names.startswith("//") else self.run
        return checkpoint(run, names[1:], x, use_reentrant=True)


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def uses(model):
    found = Uses(model)
    for number, param in enumerate(model.parameters()):
        param.ds_id = number
    for module in model.modules():
        # As DeepSpeed, which counts a leaf module as a whole.
        if module is not model.leaf[0]:
            module.register_forward_pre_hook(lambda module, _: found.count(module))
    return found


def forward(model, uses, *segments):
    uses.begin_forward()
    return model(*segments)


def with_several(model, uses):
    """Names of the layers of which a parameter may get several gradients."""
    layers = {**model.layers, "L": model.leaf}
    return "".join(
        name
        for name, layer in layers.items()
        if any(uses.give_several(param.ds_id) for param in layer.parameters())
    )


@pytest.mark.parametrize(
    ("forwards", "several"),
    [
        (["a b a"], ""),
        (["/a /b /c"], ""),
        (["/a /b /a"], "a"),
        (["a /b /ac"], "a"),
        (["/a /b a"], "a"),
        (["//a //b /c"], ""),
        (["//a //b /a"], "a"),
        (["L"], ""),
        (["L a L"], "L"),
        (["/a /b", "/a"], "a"),  # forwards of one backward count together
    ],
)
def test_a_parameter_used_again_where_a_backward_of_its_own_runs_may_get_several(
    model, uses, forwards, several
):
    with torch.no_grad():
        forward(model, uses, "a")  # builds no graph
    loss = sum(forward(model, uses, *words.split()) for words in forwards)
    assert with_several(model, uses) == several
    uses.begin_backward()
    loss.backward()
    assert with_several(model, uses) == several, "what backward computes again counts too"
    forward(model, uses, "/a", "/b")
    assert with_several(model, uses) == "", "the next forward begins anew"
