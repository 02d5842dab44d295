"""The oldest supported DeepSpeed, laid over this environment: every feature beside its own stock.

The newest is this environment's own; `make compat` runs those between them, and other Pythons.
"""

import os

import pytest

from benchmarks.compat import documents, environments
from benchmarks.compat.runs import run_equality, versions_of
from deep_optimizer_states.deepspeed_guard import CHECKED_VERSIONS

OLDEST = CHECKED_VERSIONS[0]
NOT_FEATURES = {"resume", "two engines at once"}
pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def environment():
    try:
        return environments.make(environments.OWN_PYTHON, {"deepspeed": OLDEST})
    except environments.IndexUnreachableError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"DeepSpeed {OLDEST} cannot be fetched here: {error}")


def test_every_feature_equals_stock_of_the_oldest_release_or_is_refused(environment):
    assert versions_of(environment)["deepspeed"] == OLDEST
    found = run_equality(environment, "once", (1,), limit_s=1200)
    assert found.get("reason", "") == ""
    assert found["different"] == []
    lines = documents.EQUALITY_TABLE.read_text().partition("| saved by")[0].splitlines()
    rows = {line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")}
    compared = {*found["features"]}
    assert compared >= NOT_FEATURES
    assert compared.isdisjoint(found["refused"])
    assert (compared | {*found["refused"]}) - NOT_FEATURES == rows - {"feature"} - NOT_FEATURES
