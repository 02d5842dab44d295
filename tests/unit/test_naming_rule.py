"""The harness names no engine, no study and no field that a study varies: those are data."""

import ast
import re
from pathlib import Path

import pytest

from configs.study import load_study, study_names

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("configs", "launch", "parse", "plots", "benchmarks")
"""Folders whose Python is held to the rule."""
OWN_WORDS = {
    "launch/train_loop": "trainers may know what they train with",
    "launch/backends": "trainers may know what they train with",
    "launch/frameworks": "trainers may know what they train with",
    "launch/cli.py": "answers Megatron's options by their names",
    "launch/config_n_run.py": "the paper's flags",
    "launch/simulate/workloads.py": "fields of the plugin's performance model",
    "launch/hog.py": "the paper's co-process, which a study names as its companion",
    "parse/log.py": "reads the paper's settings where a log tells them",
    "parse/log_name.py": "reads the paper's settings where a log's name tells them",
    "benchmarks/gpu_check.py": "runs one study and the plugin's own commands",
    "benchmarks/host.py": "asks the plugin itself for its policies",
    "benchmarks/host_worker.py": "asks the plugin itself for its policies",
    "benchmarks/save.py": "asks the plugin itself for its policies",
    "benchmarks/fit.py": "fits the performance model to the paper's figures",
}
"""Files and folders that speak a language of their own, and why."""
NUMPYS = "stride_tricks"
EVERYDAY = {"auto", "ratio", "resident", "stock", "checkpoint", "plugin", "deep-optimizer-states"}
"""Words of other meanings too: a device, a share, memory in use, DeepSpeed, files, the plugin."""


def forbidden_words():
    words = set()
    for name in study_names():
        study = load_study(name)
        words |= {name, *study.engines, *study.fields}
        words |= {alias for engine in study.engines.values() for alias in engine.aliases}
    return {word for word in words - EVERYDAY if len(word) > 1}


def named(source, words):
    """Lines on which code names one of the words: in an identifier or a text, docstrings aside."""
    pattern = re.compile(r"(?<![A-Za-z0-9])(?:" + "|".join(_spellings(words)) + r")(?![A-Za-z0-9])")
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        texts = _identifiers(node)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = None  # a docstring, which ast.walk visits after its statement
        found += [(node.lineno, text) for text in texts if pattern.search(text.replace(NUMPYS, ""))]
    return found


def _spellings(words):
    return sorted(re.escape(word).replace(r"\-", "[-_ ]") for word in words)


def _identifiers(node):
    names = (getattr(node, key, None) for key in ("id", "attr", "arg", "name"))
    return [name for name in names if isinstance(name, str) and hasattr(node, "lineno")]


def targets():
    for folder in TARGETS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            own = (name == key or name.startswith(f"{key}/") for key in OWN_WORDS)
            if not any(own):
                yield name, path


def test_no_file_names_an_engine_a_study_or_its_field():
    words = forbidden_words()
    found = {name: named(path.read_text(encoding="utf-8"), words) for name, path in targets()}
    assert len(found) > 50
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        'if point.engine == "vanilla": pass',
        "x = point.stride",
        "run(subgroup_numel=3)",
        "def is_hybrid(): pass",
        "f(f'{x} all-host')",
        'columns = ["all_host_ms"]',
        "hog_share: float = 0.0",
    ],
)
def test_code_that_names_one_is_found(line):
    assert named(line, forbidden_words())


@pytest.mark.parametrize("line", ['"""Such as `stride 2`."""', "# stride", "strides = 1"])
def test_examples_in_words_and_other_words_are_not(line):
    assert not named(line, forbidden_words())


def test_what_is_exempt_is_there():
    assert [name for name in OWN_WORDS if not (ROOT / name).exists()] == []
