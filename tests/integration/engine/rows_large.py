"""A model of 25 million parameters: in its size copies and kernels overlap."""

import os
from unittest import mock

import engines
from engines import Case, differences, play, training
from rows import Rows

ROWS = Rows()
run = ROWS.run
JUST_IN_TIME = {"enabled": True, "policy": "stride", "stride": 2, "verify_every": 0}
POLICIES = {
    # Its waits are the most delicate ones.
    "stride 2, just in time": JUST_IN_TIME,
    # It repeats every update on the host and compares.
    "stride 2, verified": {**JUST_IN_TIME, "just_in_time_forward": False, "verify_every": 1},
    "dynamic": {"enabled": True, "policy": "dynamic", "verify_every": 0},
    "all-host": {"enabled": True, "policy": "all-host", "just_in_time_forward": False},
    "all-device": {"enabled": True, "policy": "all-device", "verify_every": 0},
    "ratio 0.5": {"enabled": True, "policy": "ratio", "ratio": 0.5, "verify_every": 0},
}


@ROWS.check("six policies")
def six_policies(_folder):
    width = int(os.environ.get("LARGE_WIDTH", "2048"))
    zero = {"sub_group_size": 3 * width**2 // 2, "reduce_bucket_size": 2 * width**2}
    act = training(Case(zero=zero, tile_numel=width**2 // 4))
    with mock.patch.object(engines, "WIDTH", width):
        stock = play(act, None)
        found = {name: differences(play(act, block), stock) for name, block in POLICIES.items()}
    assert not any(found.values()), found
