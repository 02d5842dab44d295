"""Megatron GPT under the plugin against stock DeepSpeed: the same bits over DP 2 and TP 2.

DP 2 is in `make test` with checkpoints (``test_trainer_checkpoints.py``) and for GPT-2.
"""

import pytest
from trainer_runs import train_together, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
OURS = {"engine": "stride", "stride": 2, "offload_ratio": 0.7}


@pytest.mark.parametrize("degree", [pytest.param("dp", marks=pytest.mark.exhaustive), "tp"])
def test_two_ranks_of_megatron_equal_stock(corpus, tmp_path, degree):
    """Both engines are trained in one pair of processes, ours first as in a user's run."""
    folders = [tmp_path / "ours", tmp_path / "stock"]
    points = [{**engine, degree: 2, "micro_batch_size": 1} for engine in (OURS, {})]
    pairs = zip(folders, points, strict=True)
    files = [str(write_run(folder, corpus, point)) for folder, point in pairs]
    ours, stock = train_together(folders, files, 2)
    assert len(stock["losses"]) == len(stock["norms"]) == 4
    assert len(set(stock["losses"])) > 1
    assert None not in stock["digests"]
    assert ours == stock
