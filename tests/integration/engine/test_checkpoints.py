"""Checkpoints of every stage and type go from stock to the plugin and back, bit for bit."""

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two GPUs or none"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two ranks save here what one rank loads."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize(("num_ranks", "num_rows"), [(2, 6), (1, 13)])
def test_training_goes_on_as_stocks_does(check_rows, folder, num_ranks, num_rows):
    check_rows("checkpoints", num_rows, num_ranks, CHECKPOINTS=str(folder))
