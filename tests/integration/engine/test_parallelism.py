"""Sequence parallelism is bitwise equal to stock; pipelines are refused as stock refuses them."""

import json
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

WORKER = Path(__file__).with_name("parallelism_worker.py")
ENOUGH_GPUS = not torch.cuda.is_available() or torch.cuda.device_count() > 1
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not ENOUGH_GPUS, reason="needs two CUDA devices"),
]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What each rank found, by name."""
    folder = tmp_path_factory.mktemp("parallelism")
    run_ranks(WORKER, folder / "report", num_ranks=2)
    return [json.loads((folder / f"report.{rank}.json").read_text()) for rank in range(2)]


def test_sequence_parallelism_equals_stock(reports):
    for report in reports:
        compared = {key: found for key, found in report["sequences"].items() if " | " in key}
        assert len(compared) == 2 * 3
        assert not any(compared.values()), compared


def test_the_comparison_finds_weights_that_were_gathered_too_early(reports):
    """The negative control: without the wait of just-in-time forward the result is not stock's."""
    assert all(report["sequences"]["weights gathered too early"] for report in reports)


def test_a_pipeline_without_the_block_trains_as_before_install(reports):
    for report in reports:
        assert report["losses after install()"] == report["stock's losses"]
        assert len(set(report["stock's losses"])) > 1


def test_a_pipeline_with_stage_3_gets_the_error_of_stock_and_leaves_no_lane_behind(reports):
    for report in reports:
        assert "ZeRO-3 are incompatible with pipeline" in report["stock, stage 3"]
        assert report["stage 3"] == report["stock, stage 3"]
        assert report["lanes after refusals"] == []


def test_a_pipeline_with_stage_1_and_the_block_is_refused_by_name(reports):
    for report in reports:
        assert "ConfigError" in report["stage 1"]
        assert "PipelineModule" in report["stage 1"]
