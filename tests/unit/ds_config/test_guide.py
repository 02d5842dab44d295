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


def test_the_guide_is_written_anew(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(guide, "FILE", tmp_path / "guide.md")
    (tmp_path / "memory.md").touch()
    assert explain_or_advise(["guide"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'guide.md'}\n"
    assert guide.FILE.read_text(encoding="utf-8") == TEXT
