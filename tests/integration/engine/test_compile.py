"""Compiled models: the bits of stock, and no graph broken where stock breaks none."""

import pytest

WAYS = [
    "engine.compile",
    # Another compiler behind the same graphs takes minutes.
    pytest.param("every layer", marks=pytest.mark.exhaustive),
    pytest.param("inductor", marks=pytest.mark.exhaustive),
]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_model_equals_stock_in_bits_and_graphs(check_rows, tmp_path, way):
    check_rows("compiled", 2, ROWS_ONLY=way, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
