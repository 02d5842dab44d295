"""The cases of ``cases.toml``: what is measured, and DeepSpeed's JSON of each."""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("cases.toml")
TINY = {
    "gpt2": {"n_embd": 64, "n_layer": 1, "n_head": 2},
    "t5": {"d_model": 64, "d_kv": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2},
}
"""What is made small of a model that only loads libraries; of other kinds :data:`_TINY`."""
_TINY = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}


def load_cases() -> dict[str, list[dict[str, Any]]]:
    """Cases by set (``fitted``, ``judged``), every field filled."""
    table = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return {name: [_filled(case, table) for case in table[name]] for name in ("fitted", "judged")}


def _filled(case: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    full = {**table["defaults"], **case}
    model = table["models"][full["model"]]
    return {
        **full,
        "model_name": full["model"],
        "model": model,
        "tiny": {"vocab_size": 128, **TINY.get(model["model_type"], _TINY)},
        "threads": 1,
        "ds_config": _ds_config(full),
    }


def _ds_config(case: dict[str, Any]) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": case["stage"]}
    if case["offload"] in ("optimizer", "both"):
        zero["offload_optimizer"] = {"device": "cpu"}
    if case["offload"] == "both":
        zero["offload_param"] = {"device": "cpu"}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": case["micro_batch"],
        "gradient_accumulation_steps": case["accumulation"],
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {**zero, **case["zero"]},
    }
    if case["dtype"] != "fp32":
        config[case["dtype"]] = {"enabled": True}
    if case["engine"] == "ours":
        config["deep_optimizer_states"] = {"enabled": True, "policy": case["policy"]}
    return config


def key_of(case: dict[str, Any]) -> str:
    """Names a case among results; another one as soon as anything of it changes."""
    text = json.dumps(case, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def name_of(case: dict[str, Any]) -> str:
    """A case in words, as the table shows it."""
    parts = [case["model_name"], f"zero{case['stage']}"]
    parts += [] if case["offload"] == "none" else [f"offload {case['offload']}"]
    parts += [f"{case['engine']} {case['policy']}"] if case["engine"] != "stock" else []
    parts += [case["dtype"], f"{case['micro_batch']} x {case['sequence']}"]
    parts += ["checkpointing"] if case["checkpointing"] else []
    parts += ["eager"] if case["attention"] == "eager" else []
    parts += [f"accumulation {case['accumulation']}"] if case["accumulation"] > 1 else []
    parts += [f"{case['ranks']} ranks"] if case["ranks"] > 1 else []
    return ", ".join([*parts, *(f"{name} {value:,}" for name, value in case["zero"].items())])
