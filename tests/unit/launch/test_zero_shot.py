"""What launch.zero_shot asks of its folder, and what it gives lm-eval and keeps of its answer."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest

from configs.errors import ConfigError
from launch import zero_shot

ASKED = {}


def evaluate(**given):
    ASKED.update(given)
    if given["tasks"] == ["unreachable"]:
        raise ConnectionError("cannot reach the hub\nlong story")
    return {
        "results": {"one": {"acc,none": 0.5, "acc_stderr,none": "N/A"}},
        "n-samples": {"one": {"original": 9, "effective": 6}},
        "versions": {"one": 2},
        "lm_eval_version": "1.2",
    }


@pytest.fixture
def export(tmp_path, monkeypatch):
    """An exported folder, and an lm-eval that knows two tasks; the real one is another test's."""
    for name in ("config.json", "tokenizer.json", "export.json"):
        (tmp_path / name).write_text('{"iteration": 7}')

    def manager(include_path):
        return SimpleNamespace(all_tasks=["one", "unreachable", *([include_path] * 9)])

    modules = {
        "lm_eval": {"simple_evaluate": evaluate},
        "lm_eval.tasks": {"TaskManager": manager},
        "lm_eval.utils": {"make_table": lambda found: f"|one|{found['results']}"},
    }
    for name, content in modules.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: "found")
    return tmp_path


def test_the_model_is_judged_without_examples_and_its_figures_are_kept(export, capsys):
    assert zero_shot.main([str(export), "--tasks", "one", "--limit", "6"]) == 0
    assert ASKED["model_args"] == {"pretrained": str(export)}
    assert (ASKED["tasks"], ASKED["num_fewshot"], ASKED["limit"]) == (["one"], 0, 6)
    found = json.loads((export / "zero-shot.json").read_text())
    assert found["export"] == {"iteration": 7}
    assert found["results"]["one"]["acc,none"] == 0.5
    assert "|one|" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"zero-shot\.json: already there"):
        zero_shot.main([str(export), "--tasks", "one"])


@pytest.mark.parametrize(
    ("lost", "tasks", "message"),
    [
        ("config.json", "one", "no config.json; make it with python -m launch.export"),
        ("tokenizer.json", "one", "no tokenizer.json; texts need it; export a run whose data"),
        ("", "one,two", "--tasks two: neither lm-eval nor --include has it"),
        ("", "unreachable", "--tasks unreachable: cannot reach the hub; run it where there is a"),
    ],
)
def test_what_cannot_be_judged_is_refused(export, lost, tasks, message):
    if lost:
        (export / lost).unlink()
    with pytest.raises(ConfigError, match=message):
        zero_shot.main([str(export), "--tasks", tasks])
    assert not (export / "zero-shot.json").exists()


def test_the_published_tasks_are_the_default():
    assert zero_shot.PUBLISHED.split(",") == [
        *("lambada_openai", "hellaswag", "piqa", "mathqa", "winogrande", "race")
    ]
