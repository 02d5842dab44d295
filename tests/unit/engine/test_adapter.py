"""Only the adapter and the reader of state know DeepSpeed's internals, as the source shows."""

import ast
from pathlib import Path

import pytest

from deep_optimizer_states.adapter.guard import FINGERPRINTS
from deep_optimizer_states.adapter.homes import AnyStock
from deep_optimizer_states.adapter.zero3.stock import Stock
from deep_optimizer_states.adapter.zero12.stock import Stock as FlatStock

ROOT = Path(__file__).resolve().parents[3]
PLUGIN = ROOT / "src" / "deep_optimizer_states"
KNOW_DEEPSPEED = {*(PLUGIN / "adapter").rglob("*.py"), PLUGIN / "state_reader.py"}
KNOW_ONE_THING = {
    ("benchmarks/memory/rank.py", "ds_numel"),
    ("benchmarks/memory/rank.py", "ds_tensor"),
    ("launch/train_loop/deepspeed_adapter.py", "_config"),
    ("launch/train_loop/deepspeed_adapter.py", "ds_numel"),
    ("launch/train_loop/runtime.py", "deepspeed.runtime.zero.muon.muon_optimizer"),
}
"""What others know of them: a partitioned parameter's size and tensor, a switch of memory lines,
and a module that is slow to import."""
WORDS_OF_MANY = {
    *("dtype", "module", "clip_grad", "loss_scale", "optimizer", "step", "destroy", "zero_grad"),
    *("state_dict", "load_state_dict", "reduce_bucket_size", "gradient_accumulation_steps"),
    "save_checkpoint",
}
"""Names of DeepSpeed's that everybody calls, or that mean something else elsewhere: torch has them,
or its JSON."""
NAMES = {
    *(name for methods in FINGERPRINTS.values() for name in methods),
    *(n for kind in (AnyStock, FlatStock, Stock) for n in (*kind.__annotations__, *vars(kind))),
    *("fp32_partitioned_groups_flat", "fp16_partitioned_groups", "averaged_gradients"),
    *("grad_position", "sub_group_process_groups", "parameter_offload", "backup_optimizer"),
    *("ds_id", "ds_tensor", "ds_numel", "ds_status", "ds_process_group", "partition_numel"),
    *("ds_opt_adam", "_config", "tput_timer", "basic_optimizer"),
}
INTERNALS = {name for name in NAMES if not name.endswith(("__", "_abc_impl", "_is_protocol"))}
INTERNALS -= WORDS_OF_MANY


def internals_in(source):
    """DeepSpeed's internals that a source names."""
    found, modules = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
            if node.attr.startswith("_") and ast.unparse(node.value).endswith("optimizer"):
                modules.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
            modules |= {node.value} if node.value.startswith("deepspeed.runtime.") else set()
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            base = f"{getattr(node, 'module', None) or ''}.".lstrip(".")
            names = {base + alias.name for alias in node.names}
            modules |= {name for name in names if f"{name}.".startswith("deepspeed.runtime.")}
    return (found & INTERNALS) | modules


def test_only_the_listed_files_know_deepspeeds_internals():
    folders = [PLUGIN, *(ROOT / name for name in ("launch", "benchmarks", "parse", "plots"))]
    paths = {path for folder in folders for path in folder.rglob("*.py")} - KNOW_DEEPSPEED
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in paths
        for name in internals_in(path.read_text())
    }
    assert found == KNOW_ONE_THING
    assert internals_in((PLUGIN / "state_reader.py").read_text())


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("def f(engine): return engine.optimizer.fp16_groups", "fp16_groups"),
        ("def f(p): return getattr(p, 'ds_id', 0)", "ds_id"),
        ("def f(engine): return engine.optimizer._schedule.tiles", "_schedule"),
        ("def f():\n from deepspeed.runtime.zero import stage3", "deepspeed.runtime.zero.stage3"),
        ("from deepspeed import runtime", "deepspeed.runtime"),
        ("import deepspeed.runtime.engine as e", "deepspeed.runtime.engine"),
        ("importlib.import_module('deepspeed.runtime.utils')", "deepspeed.runtime.utils"),
    ],
)
def test_who_else_knows_them_is_found(source, name):
    """Negative control."""
    assert internals_in(source) == {name}
