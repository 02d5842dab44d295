"""Hand-written logs in every form that is read, each with its expected records beside it.

``python tests/golden/parse/test_golden.py`` from the root, with the root on PYTHONPATH, rewrites
the expectations; read the difference before keeping it.
"""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from parse.log import read_log

HERE = Path(__file__).resolve().parent
LOGS = sorted(HERE.rglob("*.log"))


def expectation(path):
    return HERE / "expected.json" if path.parent == HERE else path.with_suffix(".json")


def as_data(path):
    log = read_log(path)
    records = [dataclasses.asdict(record) for record in log.iterations]
    for record in records:
        record |= record.pop("printed")
        for name, value in record.items():
            if isinstance(value, float) and math.isnan(value):
                record[name] = "nan"
    return {
        "settings": log.settings,
        "world_size": log.world_size,
        "vocab_size": log.vocab_size,
        "parameters": log.parameters,
        "device": log.device,
        "ends_mid_line": log.ends_mid_line,
        "notes": log.notes,
        "rejects": [[reject.line, reject.reason] for reject in log.rejects],
        "memory": [{k: v for k, v in row.items() if v is not None} for row in log.memory],
        "iterations": [{k: v for k, v in r.items() if v not in (None, {})} for r in records],
    }


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem[:20])
def test_a_log_gives_the_expected_records(path):
    assert as_data(path) == json.loads(expectation(path).read_text())


if __name__ == "__main__":
    for log_path in LOGS:
        expectation(log_path).write_text(json.dumps(as_data(log_path), indent=2) + "\n")
