"""What the adapter promises of itself: one writer for each field, and nobody else knows DeepSpeed.

Both are read off the source, and each check is shown a source that breaks the promise.
"""

import ast
from collections import defaultdict
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

OF_TENSORS = {"data", "grad"}
"""Attributes of any tensor, which is nobody's object."""

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


def assigned(target):
    """Attributes that an assignment's target names: ``(object, attribute)``."""
    if isinstance(target, ast.Attribute):
        yield ast.unparse(target.value), target.attr
    elif isinstance(target, ast.Starred):
        yield from assigned(target.value)
    elif isinstance(target, (ast.Tuple, ast.List)):
        for element in target.elts:
            yield from assigned(element)


def targets(node):
    """Attributes to which a class or a module assigns anywhere inside."""
    for inner in ast.walk(node):
        if isinstance(inner, (ast.Assign, ast.Delete)):
            found = inner.targets
        elif isinstance(inner, ast.AnnAssign):
            found = [inner.target] if inner.value is not None else []
        elif isinstance(inner, (ast.AugAssign, ast.For, ast.NamedExpr)):
            found = [inner.target]
        elif isinstance(inner, ast.withitem):
            found = [inner.optional_vars] if inner.optional_vars is not None else []
        elif isinstance(inner, ast.Call) and ast.unparse(inner.func) in ("setattr", "delattr"):
            owner, name, *_ = inner.args
            yield ast.unparse(owner), ast.literal_eval(name)
            continue
        else:
            continue
        for target in found:
            yield from assigned(target)


def fields_with_two_writers(sources):
    """Fields that two classes of these sources assign to, with the classes' names.

    A class writes its own fields through ``self``, so that those of two classes are two, unless one
    inherits from the other. A field of another object is one wherever it is written.
    """
    classes = {
        node.name: node
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    }
    own = {name: {a for o, a in targets(node) if o == "self"} for name, node in classes.items()}

    def ancestors(name):
        for base in map(ast.unparse, classes[name].bases):
            if base in classes:
                yield from (base, *ancestors(base))

    writers = defaultdict(set)
    for name, node in classes.items():
        for base in ancestors(name):
            for field in own[name] & own[base]:
                writers[field] |= {name, base}
        for owner, field in targets(node):
            if owner != "self" and field not in OF_TENSORS:
                writers[field] |= {name}
                writers[field] |= {other for other in own if field in own[other]}
    return {field: names for field, names in writers.items() if len(names) > 1}


@pytest.mark.parametrize(("stages", "others"), [("zero12", "zero3"), ("zero3", "zero12")])
def test_each_field_is_written_by_one_class(stages, others):
    """Of the adapter of some stages, and of what both share."""
    paths = [path for path in ADAPTER if others not in (path.stem, path.parent.name)]
    assert any(stages in (path.stem, path.parent.name) for path in paths)
    assert fields_with_two_writers(path.read_text() for path in paths) == {}


@pytest.mark.parametrize("kind", [InterleavedFlatOptimizer, InterleavedZeroOptimizer])
def test_one_class_alone_inherits_from_deepspeeds(kind):
    stock = {base for base in kind.__mro__ if "deepspeed" in base.__module__}
    ours = [base for base in kind.__mro__ if base not in stock]
    assert ours == [kind, object]


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n def f(self): self._x = 1\nclass B(A):\n def g(self): self._x += 1",
        "class A:\n def f(self): self._x = 1\nclass M(A): pass\nclass B(M):\n"
        " def g(self): self._x = 2",
        "class A:\n def f(self): self._x = 1\nclass B:\n def g(self): self._a._x = 2",
        "class A:\n def f(self, o): o.a, (o.x, *o.y) = 1\nclass B:\n def g(self, o): del o.x",
        "class A:\n def f(self): self._x: int = 1\nclass B:\n def g(self, a): setattr(a, '_x', 1)",
        "class A:\n def f(self): self._x = 1\nclass B(A):\n def g(self):\n  with h() as self._x: 0",
    ],
    ids=["inherited", "of a grandparent", "another's", "a third's", "setattr", "with"],
)
def test_a_second_writer_is_found(source):
    """Negative control."""
    assert [sorted(names) for names in fields_with_two_writers([source]).values()] == [["A", "B"]]


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


@pytest.mark.parametrize("path", sorted(KNOW_DEEPSPEED - set(ADAPTER)), ids=lambda path: path.name)
def test_the_list_names_nobody_in_vain(path):
    assert internals_in(path.read_text())


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
