"""Checkpoints that another number of ranks loads than saved them."""

import pytest

SAVED_BY, LOADED_BY = (1, 2, 4), (1, 2, 3, 4)
FEW = {(2, 1), (2, 3)}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def saved(check_rows, tmp_path_factory):
    """``saved(RANKS)`` -> the folder with the checkpoints of so many ranks."""
    folder, done = tmp_path_factory.mktemp("checkpoints"), set()

    def save(num_ranks):
        if num_ranks not in done:
            done.add(num_ranks)
            check_rows("reshard", num_ranks, ROWS_ONLY="^save", CHECKPOINTS=str(folder))
        return str(folder)

    return save


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [
        pytest.param(n, m, marks=[] if (n, m) in FEW else pytest.mark.exhaustive)
        for n in SAVED_BY
        for m in LOADED_BY
    ],
)
def test_what_is_loaded_equals_what_is_converted_and_loaded(check_rows, saved, saved_by, loaded_by):
    folder, rows = saved(saved_by), f"^load .* of {saved_by}$"
    check_rows("reshard", loaded_by, ROWS_ONLY=rows, CHECKPOINTS=folder)
