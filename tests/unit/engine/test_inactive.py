"""The stale gradients against a model of what stock does: one tensor, scaled in place.

It has the type of the master weights.
"""

import torch
from hypothesis import given, strategies as st

from deep_optimizer_states.adapter.zero3.gradients import InactiveGradients

windows = st.lists(
    st.tuples(st.booleans(), st.booleans(), st.floats(0.0, 2.0, width=32)), min_size=1, max_size=12
)


@given(windows, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_any_history_gives_stocks_gradient(history, dtype):
    """``history``: whether the parameter took part, whether the step was skipped, its factor."""
    home = torch.zeros(4, dtype=torch.bfloat16)
    inactive = InactiveGradients(lambda key: home, dtype)
    stock = torch.zeros(4, dtype=dtype)
    for number, (is_active, is_skipped, factor) in enumerate(history):
        if is_active:
            home.copy_(torch.randn(4, generator=torch.Generator().manual_seed(number)))
            stock.copy_(home)
        if is_skipped:
            inactive.skipped([0] if is_active else [])
            assert torch.equal(inactive.value(0), stock)
            continue
        if not is_active:
            used = inactive.collect([0]).get(0, torch.zeros(4, dtype=dtype))
            assert torch.equal(used, stock)
        stock.mul_(torch.tensor(factor))
        inactive.stepped([0] if is_active else [], factor)
        assert torch.equal(inactive.value(0), stock)
