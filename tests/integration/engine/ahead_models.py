"""Models whose weights or gradients work in backward must wait for.

Not a test itself, see ``ahead_worker``.
"""

import functools

import torch
from deepspeed.utils import set_z3_leaf_modules
from equality_cases import THRICE, WIDTH, Net


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


class Partly(Net):
    """Of its segments some are not recomputed."""

    def __init__(self, kept, **options):
        super().__init__(reentrant=True, **options)
        self.kept = kept

    def forward(self, x):
        for number, segment in enumerate(self.segments):
            run = self._run if number in self.kept else self._run_or_checkpoint
            x = run(segment, x)
        return x


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
    "in one segment": {"make": functools.partial(shared, segments=((0,), (1, 2, 1), (3,), (4, 5)))},
    "in two segments": {"make": functools.partial(shared, segments=TWICE)},
    "in three segments": {"make": functools.partial(shared, segments=THRICE)},
    "in a segment, and before it": {"make": functools.partial(Partly, (1,), segments=TWICE)},
    "in a segment, and after it": {"make": functools.partial(Partly, (3, 4), segments=TWICE)},
    "from a window on": {"make": shared, "before": share_midway},
    "of a leaf module": {"make": of_a_leaf},
}
"""Ways to use a layer again; stock goes by the last gradient in the first micro-batch of a window,
and by their sum in others."""
RELEASED = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
"""The weight is not kept between two uses, which makes backward gather it again."""
