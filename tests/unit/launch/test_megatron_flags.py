import itertools
import os
from pathlib import Path

import pytest

from configs.study import make_point
from launch.backends.megatron_deepspeed import MegatronDeepSpeed, megatron_flags
from launch.ds_json import deepspeed_config

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "megatron"
FILES = Path("/run"), "/data/text_document"
OURS = MegatronDeepSpeed(Path("/x"))
POINTS = {
    "tiny-cpu": ({"model": "tiny"}, False),
    "7B-gpu": ({"model": "7B", "tp": 2, "dp": 2}, True),
}


@pytest.mark.parametrize("name", POINTS)
def test_the_flags_of_a_point_are_the_golden_ones(name):
    table, on_gpu = POINTS[name]
    flags = megatron_flags(make_point(table), *FILES, on_gpu)
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("GOLDEN_REWRITE"):
        path.write_text("\n".join(flags) + "\n")
    assert flags == path.read_text().splitlines()


def test_every_knob_of_the_point_is_in_the_flags():
    fields = {
        "seed": ("--seed", "7"),
        "lr": ("--lr", "0.001"),
        "min_lr": ("--min-lr", "0.0001"),
        "lr_warmup_iterations": ("--lr-warmup-iters", "3"),
        "weight_decay": ("--weight-decay", "0.2"),
        "adam_beta1": ("--adam-beta1", "0.8"),
        "adam_beta2": ("--adam-beta2", "0.99"),
        "adam_eps": ("--adam-eps", "1e-06"),
        "clip_grad": ("--clip-grad", "0.5"),
        "split": ("--split", "90,5,5"),
        "iterations": ("--train-iters", "9"),
    }
    table = {name: given for name, (_, given) in fields.items()}
    point = make_point({"model": "tiny", "activation_checkpointing": False, **table})
    flags = megatron_flags(point, *FILES, False)
    pairs = list(itertools.pairwise(flags))
    assert all(pair in pairs for pair in fields.values())
    # The tokenizer counts its end of document to the vocabulary itself.
    assert ("--vocab-size", str(point.model.vocab_size - 1)) in pairs
    assert not [flag for flag in flags if "checkpoint-act" in flag]


def test_what_the_flags_cannot_say_is_refused():
    assert OURS.refuse(make_point({"model": "tiny", "engine": "H", "stride": 1})) == []
    point = make_point({"model": "tiny", "attention": "sdpa", "save_interval": 5})
    first, second = OURS.refuse(point)
    assert first == (
        "attention = 'sdpa': --trainer megatron-deepspeed knows 'local' alone; give that"
    )
    assert second.startswith("save_interval = 5: ")


def test_deepspeeds_config_leaves_the_optimizer_to_the_flags():
    point = make_point({"model": "tiny", "engine": "stride", "stride": 2})
    ours = deepspeed_config(point)
    del ours["optimizer"]
    assert OURS.ds_config(point) == ours
    stock = OURS.ds_config(make_point({"model": "tiny"}))
    assert "deep_optimizer_states" not in stock
