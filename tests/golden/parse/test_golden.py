"""A hand-written log with everything the paper's logs do: expected records beside it.

``python tests/golden/parse/test_golden.py`` from the root, with the root on PYTHONPATH, rewrites
the expectation; read the difference before keeping it.
"""

import dataclasses
import json
import math
from pathlib import Path

from parse.log_lines import read_log

HERE = Path(__file__).resolve().parent
EXPECTED = HERE / "expected.json"


def as_data():
    log = read_log(next(HERE.glob("*.log")))
    records = [dataclasses.asdict(record) for record in log.iterations]
    for record in records:
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
        "rejects": [[reject.line_number, reject.reason] for reject in log.rejects],
        "iterations": [{k: v for k, v in r.items() if v is not None} for r in records],
    }


def test_the_miniature_log_gives_the_expected_records():
    assert as_data() == json.loads(EXPECTED.read_text())


if __name__ == "__main__":
    EXPECTED.write_text(json.dumps(as_data(), indent=2) + "\n")
