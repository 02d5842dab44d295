import json
import os
from pathlib import Path

import pytest

from configs.study import make_point
from launch.ds_json import deepspeed_config

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "deepspeed"
HYBRID = {"engine": "stride", "stride": 2}
POINTS = {
    "tiny-stock": {"model": "tiny"},
    "tiny-all-host": {"model": "tiny", "engine": "all-host"},
    "tiny-stride": {"model": "tiny", **HYBRID},
    "7B-stock-dp4": {"model": "7B"},
    "7B-stride5": {"model": "7B", "engine": "stride", "stride": 5, "dp": 1},
    "20B-twinflow": {"model": "20B", "offload_ratio": 0.8, "tp": 2},
    "20B-twinflow-stride": {"model": "20B", "offload_ratio": 0.8, "engine": "H", "stride": 2},
    "13B-fp32-sums-no-clipping": {"model": "13B", "grad_accum_dtype": "fp32", "clip_grad": 0},
}


@pytest.mark.parametrize("name", POINTS)
def test_the_json_of_a_point_is_the_golden_one(name):
    config = deepspeed_config(make_point(POINTS[name]))
    path = GOLDEN / f"{name}.json"
    if os.environ.get("GOLDEN_REWRITE"):
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    assert config == json.loads(path.read_text(encoding="utf-8"))


def test_every_golden_file_is_checked():
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(POINTS)


def test_types_stages_and_places_are_said_in_deepspeeds_words():
    fields = {"dtype": "fp16", "zero_stage": 2, "offload_optimizer": "none"}
    config = deepspeed_config(make_point({"model": "tiny", **fields}))
    assert config["fp16"] == {"enabled": True, "loss_scale": 0}
    assert not {"bf16", "data_types"} & config.keys()
    assert config["zero_optimization"]["stage"] == 2
    assert "offload_optimizer" not in config["zero_optimization"]
    config = deepspeed_config(
        make_point({"model": "tiny", "dtype": "fp32", "offload_param": "cpu"})
    )
    assert not {"bf16", "fp16", "data_types"} & config.keys()
    assert config["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": True}
