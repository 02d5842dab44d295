"""The guide is what its sources say today, and its own example loads."""

import json
import re

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from in_process import VERSION, ask, explain_or_advise

from deep_optimizer_states.config import Settings
from ds_config import guide
from ds_config.explain import explain

TEXT = guide.FILE.read_text(encoding="utf-8")
pytestmark = pytest.mark.skipif(
    f"For DeepSpeed {VERSION}." not in TEXT, reason="the guide is of another DeepSpeed"
)


def test_the_guide_is_not_out_of_date():
    assert guide.guide(ask({})) == TEXT, "python -m ds_config guide"


def test_the_plugins_page_lists_every_key_of_its_block():
    page = guide.PLUGIN_FILE.read_text(encoding="utf-8")
    assert guide.plugin_page(page) == page, "python -m ds_config guide"
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| \S", page, re.MULTILINE)
    defaults = {name: json.loads(default) for name, default in rows}
    assert defaults == Settings().model_dump()


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
    page = guide.PLUGIN_FILE.read_text(encoding="utf-8")
    monkeypatch.setattr(guide, "PLUGIN_FILE", tmp_path / "plugin.md")
    guide.PLUGIN_FILE.write_text("before\n<!-- keys -->\nold\n<!-- end of keys -->\nafter\n")
    assert explain_or_advise(["guide"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'guide.md'}\n{tmp_path / 'plugin.md'}\n"
    assert guide.FILE.read_text(encoding="utf-8") == TEXT
    written = guide.PLUGIN_FILE.read_text(encoding="utf-8")
    assert written.startswith("before\n")
    assert written.endswith("after\n")
    assert "old" not in written
    assert written.removeprefix("before\n").removesuffix("after\n") in page
