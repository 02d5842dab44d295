"""What launch.zero_shot says and asks before lm-eval is imported."""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from configs.errors import ConfigError
from launch import zero_shot
from launch.hosts.launchers import free_port


@pytest.fixture(autouse=True)
def no_switches(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hub(monkeypatch):
    """A hub that knows nothing, and the requests that it got."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_words):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield asked
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def export(tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def test_a_hub_that_answers_anything_is_reached(hub):
    assert zero_shot._is_online()
    assert len(hub) == 1


def test_a_hub_that_does_not_answer_is_said_to(monkeypatch, capsys):
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    assert not zero_shot._is_online()
    assert "the hub does not answer" in capsys.readouterr().err


def test_who_switched_the_network_off_is_not_asked_again(hub, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    assert not zero_shot._is_online()
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "0")
    assert zero_shot._is_online()
    assert len(hub) == 1


def test_the_published_tasks_are_the_default(export):
    options = zero_shot._read([str(export)])
    assert options.tasks.split(",") == [
        *("lambada_openai", "hellaswag", "piqa", "mathqa", "winogrande", "race")
    ]
    assert options.out == export / "zero-shot-001.json"
    options.out.touch()
    assert zero_shot._read([str(export)]).out == export / "zero-shot-002.json"


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("config.json", "no config.json; make it with python -m launch.export"),
        ("tokenizer.json", "no tokenizer.json, which texts need; export with --data-prefix"),
    ],
)
def test_a_folder_that_cannot_be_judged_is_refused(export, lost, message):
    (export / lost).unlink()
    with pytest.raises(ConfigError, match=message):
        zero_shot._read([str(export)])


def test_no_figures_are_overwritten(export):
    with pytest.raises(ConfigError, match="already there"):
        zero_shot._read([str(export), "--out", str(export / "config.json")])


def test_figures_lose_filters_and_errors():
    result = {"alias": "x", "acc,none": 0.25, "acc_stderr,none": "N/A", "name": "x"}
    assert zero_shot._figures(result) == {"acc": 0.25}


@pytest.mark.parametrize("is_online", [True, False])
def test_the_exported_model_is_judged_without_examples_and_its_figures_are_kept(
    export, monkeypatch, capsys, is_online
):
    """lm-eval itself is another test's."""

    def evaluate(**given):
        asked.update(given)
        return {
            "results": {"one": {"acc,none": 0.5, "acc_stderr,none": "N/A"}},
            "n-samples": {"one": {"original": 9, "effective": 6}},
            "versions": {"one": 2},
            "lm_eval_version": "1.2",
        }

    asked, offline = {}, ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(simple_evaluate=evaluate))
    monkeypatch.setattr(zero_shot.importlib.util, "find_spec", lambda _name: "found")
    monkeypatch.setattr(zero_shot, "_is_online", lambda: is_online)
    monkeypatch.setattr(zero_shot, "_load", lambda options: [options.tasks])
    monkeypatch.setattr(zero_shot.os, "environ", dict(os.environ))
    (export / "export.json").write_text('{"iteration": 7}')
    out = export / "found.json"
    words = [str(export), "--tasks", "one", "--limit", "6", "--device", "cpu", "--out", str(out)]
    assert zero_shot.main(words) == 0
    assert [zero_shot.os.environ.get(name) for name in offline] == [None if is_online else "1"] * 2
    assert asked["model_args"] == {"pretrained": str(export)}
    assert (asked["tasks"], asked["num_fewshot"], asked["limit"]) == (["one"], 0, 6)
    found = json.loads(out.read_text())
    assert found["export"] == {"iteration": 7}
    assert found["num_samples"] == {"one": 6}
    assert found["results"] == {"one": {"acc": 0.5}}
    assert "one   6        acc     0.5" in capsys.readouterr().out


def test_a_table_has_a_line_a_figure():
    record = {
        "num_samples": {"one": 6, "other": 20},
        "results": {"one": {"acc": 0.5, "sample_len": 6.0}, "other": {"bits_per_byte": 1.25}},
    }
    assert zero_shot.table(record).splitlines() == [
        "task   samples  metric         figure",
        "one    6        acc            0.5",
        "other  20       bits_per_byte  1.25",
    ]
