"""Checkpoints that another number of ranks loads than saved them."""

import pytest

SAVED_BY, LOADED_BY = (1, 2, 4), (1, 2, 3, 4)
EVERY = "^load "
SOME = (
    "^load (stage 3, bf16|stage 2, frozen parts|stage 3, fp16, two groups"
    "|stage 2, round robin, two groups|nothing that does not fit,)"
)
WHOLE_ALONE = "^load (nothing|a mixture|other counters)"
FEW = {(2, 1): EVERY, (2, 3): SOME, (2, 2): WHOLE_ALONE}
"""What is loaded in `make test`."""
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
    ("saved_by", "loaded_by", "rows"),
    [
        *(pytest.param(n, m, rows, id=f"{n}-{m}-few") for (n, m), rows in FEW.items()),
        *(
            pytest.param(n, m, EVERY, marks=pytest.mark.exhaustive, id=f"{n}-{m}")
            for n in SAVED_BY
            for m in LOADED_BY
            if FEW.get((n, m)) != EVERY
        ),
    ],
)
def test_what_is_loaded_equals_what_is_converted_and_loaded(
    check_rows, saved, saved_by, loaded_by, rows
):
    folder = saved(saved_by)
    only = f"{rows}.*of {saved_by}$"
    check_rows("reshard", loaded_by, ROWS_ONLY=only, CHECKPOINTS=folder)
