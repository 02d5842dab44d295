"""What the adapter promises of itself: one writer for each field, and nobody else knows DeepSpeed.

Both are read off the source, and each check is shown a source that breaks the promise.
"""

import ast
from pathlib import Path

import pytest

from deep_optimizer_states.adapter.guard import FINGERPRINTS
from deep_optimizer_states.adapter.homes import AnyStock
from deep_optimizer_states.adapter.zero3.optimizer import InterleavedZeroOptimizer
from deep_optimizer_states.adapter.zero3.stock import Stock
from deep_optimizer_states.adapter.zero12 import InterleavedFlatOptimizer, Stock as FlatStock

ROOT = Path(__file__).resolve().parents[3]
PLUGIN = ROOT / "src" / "deep_optimizer_states"
ADAPTER = sorted((PLUGIN / "adapter").rglob("*.py"))


KNOW_DEEPSPEED = {
    *ADAPTER,
    PLUGIN / "state_reader.py",
}
"""Files that may know DeepSpeed's internals."""

KNOW_ONE_THING = {
    ("benchmarks/memory/rank.py", "ds_numel"),
    ("benchmarks/memory/rank.py", "ds_tensor"),
    ("launch/trainer/deepspeed_adapter.py", "_config"),
    ("launch/trainer/deepspeed_adapter.py", "ds_numel"),
    ("launch/trainer/runtime.py", "deepspeed.runtime.zero.muon.muon_optimizer"),
}
"""What others know of them: a partitioned parameter's size and tensor, a switch of memory lines,
and a module that is slow to import."""

WORDS_OF_MANY = {
    "dtype",
    "module",
    "clip_grad",
    "loss_scale",
    "optimizer",
    "step",
    "destroy",
    "zero_grad",
    "state_dict",
    "load_state_dict",
    "reduce_bucket_size",
    "gradient_accumulation_steps",
}
"""Names of DeepSpeed's that mean something else elsewhere: torch has them, or its JSON."""

INTERNALS = {
    *(name for methods in FINGERPRINTS.values() for name in methods),
    *(
        name
        for kind in (AnyStock, FlatStock, Stock)
        for name in (*kind.__annotations__, *vars(kind))
    ),
    *("fp32_partitioned_groups_flat", "fp16_partitioned_groups", "averaged_gradients"),
    *("grad_position", "sub_group_process_groups", "parameter_offload", "backup_optimizer"),
    *("ds_id", "ds_tensor", "ds_numel", "ds_status", "ds_process_group", "partition_numel"),
    *("ds_opt_adam", "_config", "tput_timer", "basic_optimizer"),
} - WORDS_OF_MANY
INTERNALS = {name for name in INTERNALS if not name.endswith(("__", "_abc_impl", "_is_protocol"))}


@pytest.mark.parametrize("kind", [InterleavedFlatOptimizer, InterleavedZeroOptimizer])
def test_one_class_alone_inherits_from_deepspeeds(kind):
    stock = {base for base in kind.__mro__ if "deepspeed" in base.__module__}
    ours = [base for base in kind.__mro__ if base not in stock]
    assert ours == [kind, object]


def internals_in(source):
    """DeepSpeed's internals that a source names."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found |= {node.attr} & INTERNALS
            if node.attr.startswith("_") and ast.unparse(node.value).split(".")[-1] == "optimizer":
                found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} & INTERNALS
            if node.value.startswith("deepspeed.runtime."):
                found.add(node.value)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if is_internal(alias.name)}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in names if is_internal(name)}
    return found


def is_internal(module):
    return module == "deepspeed.runtime" or module.startswith("deepspeed.runtime.")


def all_files():
    folders = [PLUGIN, *(ROOT / name for name in ("launch", "benchmarks", "parse", "plots"))]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def test_only_the_listed_files_know_deepspeeds_internals():
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in all_files()
        if path not in KNOW_DEEPSPEED
        for name in internals_in(path.read_text())
    }
    assert found == KNOW_ONE_THING


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def f(engine): return engine.optimizer.fp16_groups", "fp16_groups"),
        ("def f(p): return getattr(p, 'ds_id', 0)", "ds_id"),
        ("def f(engine): return engine.optimizer._schedule.tiles", "_schedule"),
        (
            "def f():\n from deepspeed.runtime.zero import stage3",
            "deepspeed.runtime.zero.stage3",
        ),
        ("from deepspeed import runtime", "deepspeed.runtime"),
        ("import deepspeed.runtime.engine as e", "deepspeed.runtime.engine"),
        ("importlib.import_module('deepspeed.runtime.utils')", "deepspeed.runtime.utils"),
    ],
)
def test_who_else_knows_them_is_found(source, name):
    """Negative control."""
    assert internals_in(source) == {name}
