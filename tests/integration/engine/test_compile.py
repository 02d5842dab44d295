"""Compiled models: the bits of stock, and no graph broken where stock breaks none."""

import json
from pathlib import Path

import pytest
from ranks import run_ranks

WORKER = Path(__file__).with_name("compile_worker.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


WAYS = [
    pytest.param(["engine.compile()"], id="eager"),
    pytest.param(["every layer"], id="layers", marks=pytest.mark.exhaustive),
    pytest.param(["inductor"], id="inductor", marks=pytest.mark.exhaustive),
]
"""What is compiled in one process. Another compiler behind the same graphs takes minutes."""


@pytest.fixture(scope="module", params=WAYS)
def report(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compile")
    out = folder / "report.json"
    run_ranks(WORKER, out, *request.param, TORCHINDUCTOR_CACHE_DIR=str(folder))
    report = json.loads(out.read_text())
    assert report.keys() == {*request.param, "weights gathered too early"}
    return report


def test_a_compiled_model_equals_stock_in_bits_and_graphs(report):
    for way in report.keys() - {"weights gathered too early"}:
        assert report[way]["differences"] == []
        assert report[way]["graphs"] == report[way]["stock's graphs"]
        assert report[way]["graphs"][0] > 0


def test_the_comparison_finds_weights_that_were_gathered_too_early(report):
    """The negative control: without the wait of just-in-time forward the result is not stock's."""
    assert report["weights gathered too early"]
