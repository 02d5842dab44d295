"""Groups of rows that are checks: ordering rules, failures, refusals, checkpoints, backward.

Pipelines and sequence parallelism are rows like any other as well.
"""

import pytest
import torch

ON_CUDA = torch.cuda.is_available()
EMULATED = pytest.mark.skipif(ON_CUDA, reason="breaks the emulated device, or its rules")
TWO = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two GPUs or none")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two ranks save here what one rank loads."""
    return tmp_path_factory.mktemp("checkpoints")


def of(group, num_ranks, extent="few", marks=()):
    """One group on so many ranks, given out by itself; those of checkpoints share a folder."""
    alone = group if group == "checkpoints" else f"{group} on {num_ranks}"
    marks = [pytest.mark.xdist_group(f"rows: {alone}"), *marks]
    return pytest.param(group, num_ranks, extent, marks=marks)


@pytest.mark.parametrize(
    ("group", "num_ranks", "extent"),
    [
        of("rules", 1, marks=[EMULATED]),
        of("rules", 2, marks=[EMULATED]),
        of("failures", 1, marks=[EMULATED]),
        of("failures", 2, marks=[EMULATED]),
        of("setup", 1, marks=[EMULATED]),
        of("background", 1),
        of("background", 2, marks=[TWO]),
        of("background", 4, marks=[pytest.mark.exhaustive, EMULATED]),
        of("backward", 1),
        of("backward", 2, marks=[TWO]),
        of("checkpoints", 2, marks=[TWO]),
        of("checkpoints", 1, marks=[TWO]),
        of("parallel", 2, "all", marks=[TWO]),
    ],
)
def test_every_row_holds(check_rows, checkpoints, group, num_ranks, extent):
    check_rows(group, num_ranks, extent, CHECKPOINTS=str(checkpoints))
