"""The guide is what its sources say today, and its own example loads."""

import json
import re

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from in_process import VERSION, ask, explain_or_advise

from ds_config import guide
from ds_config.explain import explain

TEXT = guide.FILE.read_text(encoding="utf-8")
pytestmark = pytest.mark.skipif(
    f"For DeepSpeed {VERSION}." not in TEXT, reason="the guide is of another DeepSpeed"
)


def test_the_guide_is_not_out_of_date():
    assert guide.guide(ask({})) == TEXT, "python -m ds_config guide"


def test_the_guides_example_is_accepted_and_loads():
    (example,) = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    table = json.loads(example)
    found = explain(table, ask(table))
    assert found.is_accepted
    assert not [note for note in found.warnings if "does nothing" in note.text]
    DeepSpeedConfig(table)


def test_every_key_is_in_the_guide():
    for key, fact in ask({}).keys.items():
        if key[0] != "bfloat16":
            assert f"`{key[-1]}`" in TEXT or f"stage3_{key[-1]}`" in TEXT or _heads(key, fact), key


def _heads(key, fact):
    return f"### {'.'.join(key)}" in TEXT or (fact.removed and ".".join(key) in TEXT)


def test_the_guide_is_written_where_it_is_asked_to_be(tmp_path, capsys):
    assert explain_or_advise(["guide", "--out", tmp_path / "guide.md"]) == 0
    (tmp_path / "mine.md").write_text("mine")
    assert explain_or_advise(["guide", "--out", tmp_path / "mine.md"]) == 2
    assert (tmp_path / "mine.md").read_text() == "mine"
    assert "mine.md: is already there" in capsys.readouterr().err
    assert (tmp_path / "guide.md").read_text(encoding="utf-8") == TEXT
    assert explain_or_advise(["guide", "--out", tmp_path / "none" / "guide.md"]) == 2
    assert "No such file" in capsys.readouterr().err
