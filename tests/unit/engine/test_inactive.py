"""The stale gradients against a model of what stock does: one fp32 tensor, scaled in place."""

import torch
from hypothesis import given, strategies as st

from deep_optimizer_states.inactive import InactiveGradients

windows = st.lists(
    st.tuples(st.booleans(), st.booleans(), st.floats(0.0, 2.0, width=32)), min_size=1, max_size=12
)


@given(windows)
def test_any_history_gives_stocks_gradient(history):
    """``history``: whether the parameter took part, whether the step was skipped, its factor."""
    home = torch.zeros(4, dtype=torch.bfloat16)
    inactive = InactiveGradients(lambda key: home)
    stock = torch.zeros(4)
    for number, (is_active, is_skipped, factor) in enumerate(history):
        if is_active:
            home.copy_(torch.randn(4, generator=torch.Generator().manual_seed(number)))
            stock.copy_(home)
        if is_skipped:
            inactive.skipped([0] if is_active else [])
            continue
        if not is_active:
            used = inactive.collect([0]).get(0, torch.zeros(4))
            assert torch.equal(used, stock)
        stock.mul_(factor)
        inactive.stepped([0] if is_active else [], factor)


def test_an_active_parameter_keeps_no_copy():
    home = torch.ones(4, dtype=torch.bfloat16)
    inactive = InactiveGradients(lambda key: home)
    inactive.stepped([0], 0.5)
    inactive.collect([0])
    assert inactive.current(0) is not None
    inactive.stepped([0], 0.5)
    assert inactive.current(0) is None
