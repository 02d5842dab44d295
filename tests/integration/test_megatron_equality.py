"""Megatron GPT under the plugin against stock DeepSpeed: the same bits over DP 2 and TP 2."""

import pytest
from trainer_runs import train_together, write_corpus, write_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ENGINES = {
    "vanilla": {},
    "hybrid with a resident share": {"engine": "hybrid", "stride": 2, "offload_ratio": 0.7},
}


@pytest.mark.parametrize("degree", ["dp", "tp"])
def test_two_ranks_of_megatron_equal_stock(tmp_path, degree):
    """Both engines are trained in one pair of processes, ours first as in a user's run."""
    corpus = tmp_path / "data" / "corpus"
    corpus.parent.mkdir()
    write_corpus(corpus)
    folders, files = [], []
    for name, fields in reversed(ENGINES.items()):
        folders.append(tmp_path / name)
        folders[-1].mkdir()
        point = {**fields, degree: 2, "micro_batch_size": 1}
        files.append(str(write_run(folders[-1], corpus, point)))
    ours, stock = train_together(folders, files, 2)
    assert len(stock["losses"]) == len(stock["norms"]) == 4
    assert len(set(stock["losses"])) > 1
    assert None not in stock["digests"]
    assert ours == stock
