"""Sequence parallelism is bitwise equal to stock; pipelines are refused as stock refuses them."""

import pytest
import torch

ENOUGH_GPUS = not torch.cuda.is_available() or torch.cuda.device_count() > 1
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not ENOUGH_GPUS, reason="needs two CUDA devices"),
]


def test_sequences_equal_stock_and_pipelines_are_refused(check_rows):
    check_rows("parallel", 1 + 2 * 3 + 1, num_ranks=2, extent="all")
