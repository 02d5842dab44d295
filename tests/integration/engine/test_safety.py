"""After a failure, an interruption or a broken load: nothing wrong is saved, trained on or kept.

And what is refused in which words, where memory goes, and which files need not be written.
"""

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(torch.cuda.is_available(), reason="breaks the emulated device"),
]


@pytest.mark.parametrize(("num_ranks", "num_rows"), [(1, 25), (2, 1)])
def test_failures_and_interruptions_leave_nothing_wrong(check_rows, num_ranks, num_rows):
    check_rows("failures", num_rows, num_ranks)


def test_refusals_name_the_setting_and_memory_is_what_is_promised(check_rows):
    check_rows("setup", 39)
