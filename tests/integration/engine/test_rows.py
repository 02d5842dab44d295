"""Groups of rows that are checks: rules, failures, refusals, checkpoints, backward, residency.

Pipelines and sequence parallelism are rows like any other as well. A row that two ranks run need
not be run by one as well: extent ``alone`` has those that nobody else runs.
"""

import pytest
import torch

ON_CUDA = torch.cuda.is_available()
EMULATED = pytest.mark.skipif(ON_CUDA, reason="breaks the emulated device, or its rules")
TWO = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks need two GPUs or none")
BY_ONE = "few" if torch.cuda.device_count() == 1 else "alone"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two ranks save here what one rank loads."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize(
    ("group", "num_ranks", "extent"),
    [
        pytest.param("rules", 1, "few", marks=EMULATED),
        pytest.param("rules", 2, "few", marks=EMULATED),
        pytest.param("failures", 1, "few", marks=EMULATED),
        pytest.param("failures", 2, "few", marks=EMULATED),
        pytest.param("weights", 1, "few", marks=EMULATED),
        pytest.param("setup", 1, "few", marks=EMULATED),
        ("background", 1, BY_ONE),
        pytest.param("background", 1, "few", marks=pytest.mark.exhaustive),
        pytest.param("background", 2, "few", marks=TWO),
        pytest.param("background", 4, "few", marks=[pytest.mark.exhaustive, EMULATED]),
        ("backward", 1, BY_ONE),
        pytest.param("backward", 1, "few", marks=pytest.mark.exhaustive),
        pytest.param("backward", 2, "few", marks=TWO),
        pytest.param("stays", 1, BY_ONE, marks=EMULATED),
        pytest.param("stays", 2, "few", marks=EMULATED),
        pytest.param("stays", 1, "all", marks=[pytest.mark.exhaustive, EMULATED]),
        pytest.param("checkpoints", 2, "few", marks=TWO),
        pytest.param("checkpoints", 1, "few", marks=TWO),
        pytest.param("parallel", 2, "all", marks=TWO),
    ],
)
def test_every_row_holds(check_rows, checkpoints, group, num_ranks, extent):
    check_rows(group, num_ranks, extent, CHECKPOINTS=str(checkpoints))
