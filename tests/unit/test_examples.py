"""What the examples take of this project is there; that they train is another test's."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
OF_THE_PROJECT = ("deep_optimizer_states", "launch", "examples")


def tree_of(name):
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    if name.endswith(".ipynb"):
        cells = json.loads(text)["cells"]
        text = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    return ast.parse(text)


def names_defined_in(module):
    """Top-level names of a module of this project, and the modules of a package."""
    place = "/".join(module.split("."))
    paths = [r / f"{place}{end}" for r in (ROOT, ROOT / "src") for end in (".py", "/__init__.py")]
    [path] = [path for path in paths if path.is_file()]
    names = {p.stem for p in path.parent.iterdir()} if path.name == "__init__.py" else set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
        names |= {node.name} if isinstance(node, ast.ClassDef | ast.FunctionDef) else set()
    return names


@pytest.mark.parametrize("name", ["imdb_lightning.py", "hf_trainer.py", "imdb_lightning.ipynb"])
def test_what_an_example_imports_is_there(name):
    imported = [
        (node.module, alias.name)
        for node in ast.walk(tree_of(name))
        if isinstance(node, ast.ImportFrom) and node.module.startswith(OF_THE_PROJECT)
        for alias in node.names
    ]
    assert imported
    assert [found for found in imported if found[1] not in names_defined_in(found[0])] == []


def test_the_values_that_trainer_fills_in_are_shown_by_their_paths():
    """Without transformers, which take seconds to import."""
    tree = tree_of("hf_trainer.py")
    own = [node for node in tree.body if getattr(node, "name", "") == "auto_values"]
    found = {"Any": Any}
    exec(compile(ast.Module(own, []), "hf_trainer.py", "exec"), found)
    asked = {"batch": "auto", "zero": {"stage": 3, "bucket": "auto"}, "bf16": {"on": "auto"}}
    used = {"batch": 16, "zero": {"stage": 3, "bucket": 4096}, "bf16": None, "more": 1}
    values = {"batch": 16, "zero.bucket": 4096, "bf16.on": None}
    assert found["auto_values"](asked, used) == values
