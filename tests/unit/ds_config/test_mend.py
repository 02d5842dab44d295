"""``--fix``: a corrected copy needs no second correction, and says of each loss what it was."""

import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import ask, explain_or_advise, told

from ds_config.installed import release_keys
from ds_config.mend import fixed

NAMES = sorted({name for key in release_keys()[0] for name in key})
BLOCKS = ["zero_optimization", "offload_optimizer", "fp16", "aio", "optimizer", "params"]
OLD = ["cpu_offload", "all_reduce_bucket_size", "reduce_bucket_size", "max_grad_norm", "elasticity"]
ODD = ["", "a.b", "stagee", "_comment", "deep_optimizer_states", "frobnicate"]
KEYS = st.sampled_from([*BLOCKS, *OLD, *ODD]) | st.sampled_from(NAMES)
SCALARS = st.sampled_from(
    [None, True, False, 0, 3, -1, 2.5, 1e9, "auto", "4", "5e8", "true", "inf", "cpu", "text", [2, 3], []]
)
VALUES = st.recursive(SCALARS, lambda inner: st.dictionaries(KEYS, inner, max_size=4), max_leaves=12)
DOCUMENTS = st.dictionaries(KEYS, VALUES, max_size=4)


@pytest.fixture(scope="module", autouse=True)
def silent():
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def leaves(table, at=()):
    for name, value in table.items():
        if isinstance(value, dict):
            yield from leaves(value, (*at, name))
        else:
            yield (*at, name), value


@settings(max_examples=80, derandomize=True)
@given(DOCUMENTS)
def test_a_corrected_copy_needs_no_second_one_and_loses_nothing_in_silence(table):
    result, changes = fixed(table, ask(table))
    found = told(result)
    assert not [n for n in (*found.unknown, *found.faults, *found.warnings) if n.mend]
    assert fixed(result, ask(result)) == (result, [])
    kept = dict(leaves(result))
    said = {change.partition(": ")[0] for change in changes}
    for key, value in leaves(table):
        parts = {".".join(key[: end + 1]) for end in range(len(key))}
        assert (key in kept and kept[key] == value) or parts & said, key
    json.dumps(result, allow_nan=False)
