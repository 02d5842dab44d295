"""Train a larger model under six policies and under stock; write what differs as JSON.

``large_worker.py OUT.json [WIDTH]``, as the only rank. In its size copies and kernels overlap; in
the smaller models they are too short for it. Not a test itself.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration" / "engine"))
import equality_cases
import equality_worker as worker

WIDTH = 2048
"""Of six layers: 25 million parameters."""
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


def main():
    out, width = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else WIDTH
    worker.prepare()
    equality_cases.WIDTH = width
    zero = {"sub_group_size": 3 * width**2 // 2, "reduce_bucket_size": 2 * width**2}
    case = equality_cases.Case(zero=zero)
    *stock, _ = worker.run(case, None)
    found = {}
    for name, block in POLICIES.items():
        *ours, our_class = worker.run(case, {**block, "tile_numel": width**2 // 4})
        assert our_class == worker.CLASSES["3"][1]
        found[name] = worker.differences(ours, stock)
    out.write_text(json.dumps(found))
    worker.leave()


if __name__ == "__main__":
    assert os.environ["WORLD_SIZE"] == "1"
    main()
