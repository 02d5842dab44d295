"""Negative controls of every wait and rule: what is left out shows, and what is kept does not."""

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.is_available(), reason="rules of the emulated device"),
]


@pytest.mark.parametrize(("num_ranks", "num_rows"), [(1, 18), (2, 1)])
def test_without_a_rule_the_result_differs(check_rows, num_ranks, num_rows):
    check_rows("rules", num_rows, num_ranks)
