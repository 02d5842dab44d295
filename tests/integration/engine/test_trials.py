"""Settings, calls and accidents of DeepSpeed's users: bitwise equal to stock, or told.

Each row is played under stock and one policy by turns, or all of them. See `docs/plugin.md`.
"""

import pytest
import torch

WAYS = [("few", 1), pytest.param("all", 1, marks=pytest.mark.exhaustive)]
"""Each row runs under one policy by turns or all, on so many ranks."""
if not torch.cuda.is_available() or torch.cuda.device_count() > 1:
    WAYS.append(pytest.param("all", 2, marks=pytest.mark.exhaustive))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(("extent", "num_ranks"), WAYS)
@pytest.mark.parametrize("group", ["calls", "settings", "windows"])
def test_every_row_equals_stock(check_rows, group, extent, num_ranks):
    check_rows(group, num_ranks, extent)
