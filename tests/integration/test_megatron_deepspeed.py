"""The harness drives a real checkout of Megatron-DeepSpeed, where one is given.

MEGATRON_DEEPSPEED_DIR names it, `make third-party NAME=megatron-deepspeed` makes it; it imports
`transformers<5`, `nltk` and `six`, which must be installed.
"""

import json
import os

import pytest
from programs import python, rows_of

CHECKOUT = os.environ.get("MEGATRON_DEEPSPEED_DIR", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_DEEPSPEED_DIR names no checkout"),
]
ENGINES = {"stock": [], "stride": ["--engine", "stride", "--stride", "2"]}


def test_megatron_trains_equally_under_both_engines(tmp_path):
    found = {}
    for name, engine in ENGINES.items():
        command = ["-m", "launch.run", "tiny", *engine, "--dp", "2"]
        command += ["--iterations", "3", "--micro-batch-size", "1", "--device", "cpu"]
        command += ["--trainer", "megatron-deepspeed", "--megatron-dir", CHECKOUT]
        command += ["--results-dir", str(tmp_path / name), "--monitor-interval", "0"]
        done = python(*command)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        (status,) = tmp_path.glob(f"{name}/single/*/run-001/status.json")
        assert json.loads(status.read_text())["status"] == "ok"
        assert python("-m", "parse", status.parent, "--out", tmp_path / "tables").returncode == 0
        found[name] = [row["loss"] for row in rows_of(tmp_path, "iterations")]
    assert len(found["stock"]) == 3
    assert "" not in found["stock"]
    assert found["stride"] == found["stock"]
