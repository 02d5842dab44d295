"""Work in backward: what comes between backward and ``step()`` ends in stock's bits or an error."""

import pytest
import torch

RANKS = [(1, 38)]
if not torch.cuda.is_available() or torch.cuda.device_count() > 1:
    RANKS.append((2, 14))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("num_ranks", "num_rows"), RANKS)
def test_work_in_backward_is_stocks_or_told_and_made_good(check_rows, num_ranks, num_rows):
    check_rows("backward", num_rows, num_ranks)
