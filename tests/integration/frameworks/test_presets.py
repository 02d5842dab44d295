"""Presets of the frameworks, as they ship: equal to stock in every bit, or refused by a line."""

import json
from importlib.util import find_spec
from pathlib import Path

import presets
import pytest
from presets import EQUAL, PRESETS
from processes import python_path
from ranks import run_ranks

from configs.files import ROOT
from deep_optimizer_states.adapter.guard import loses_gradients

HERE = Path(__file__).parent
DOCS = HERE.parents[2] / "docs" / "frameworks.md"
MISSING = [name for name in ("transformers", "accelerate", "lightning") if not find_spec(name)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Return the outcome of each preset; one process trains them all."""
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)}")
    report = tmp_path_factory.mktemp("presets") / "report"
    path = python_path(Path(presets.__file__).parent, ROOT)
    words = (HERE / "worker.py", "presets", report, report.parent)
    run_ranks(*words, CUDA_VISIBLE_DEVICES="", PYTHONPATH=path)
    return json.loads(report.with_suffix(".0.json").read_text())


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_equal_to_stock_or_refused_by_its_line(outcomes, name):
    expected = PRESETS[name].outcome
    if expected == EQUAL:
        assert outcomes[name] == EQUAL
    else:
        assert outcomes[name].startswith("ConfigError: ")
        assert expected in outcomes[name]


def rows_of_the_docs():
    text = DOCS.read_text(encoding="utf-8")
    lines = [line.strip("| ") for line in text.splitlines() if line.startswith("|")]
    return {cells[0].strip(): cells for cells in (line.split("|") for line in lines)}


def needs_a_change(name):
    preset = PRESETS[name]
    return preset.outcome != EQUAL or preset.users_have[0]


def test_the_docs_count_those_that_are_equal():
    equal = sum(preset.outcome == EQUAL for preset in PRESETS.values())
    assert f"{equal} of the {len(PRESETS)} presets" in DOCS.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in PRESETS if needs_a_change(name)])
def test_the_docs_say_what_becomes_of_it(name):
    cells = rows_of_the_docs()[name]
    preset = PRESETS[name]
    assert cells[1].strip() == preset.source
    release, why = preset.users_have
    becomes = EQUAL if preset.outcome == EQUAL else f"`{preset.outcome}`"
    if release:
        assert preset.config["zero_optimization"]["stage"] < 3
        assert loses_gradients(release)
        becomes += (
            f" under 0.19.5 or newer; refused under {release}, {why}: stock's stages 1 and 2 drop "
            "gradients there"
        )
    assert cells[2].strip() == becomes
