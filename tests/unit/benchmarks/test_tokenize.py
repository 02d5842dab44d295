"""The command line of the tokenizers' benchmark; nothing is measured here."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import tokenize
from configs.cli import run_command
from configs.errors import ConfigError
from dataset.files import DatasetError
from dataset.tokenizer import ByteLevelBpe

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Flags that are right, their files in the current folder."""
    monkeypatch.chdir(tmp_path)
    model = json.loads(ByteLevelBpe.learn(["the cat sat"] * 3, 262)._json)["model"]
    merges = "".join(f"{a} {b}\n" for a, b in model["merges"])
    (tmp_path / "v.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "m.txt").write_text("#version: 0.2\n" + merges)
    (tmp_path / "wrong.json").write_text("{}")
    (tmp_path / "open.json").write_text(
        json.dumps({word: n for word, n in model["vocab"].items() if word != "<|endoftext|>"})
    )
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "t.jsonl").write_text('{"text": "the cat"}\n')
    (tmp_path / "megatron.py").write_text("")
    return ["--text", "t.jsonl", "--vocab-file", "v.json", "--merge-file", "m.txt",
            "--megatron-tokenizer", "megatron.py"]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--text", "nope"], "--text nope: no such file"),
        (["--text", "empty.jsonl"], "--text empty.jsonl: holds no lines"),
        (["--megatron-tokenizer", "no.py"], "--megatron-tokenizer no.py: no such file"),
        (
            ["--megatron-tokenizer", str(tokenize.MEGATRON_TOKENIZER)],
            "no such file; `python third_party/fetch.py megatron-deepspeed` fetches one",
        ),
        (["--workers", "0"], "--workers: '0': give a whole number, 1 or more"),
        (["--repeats", "0"], "--repeats: '0': give a whole number, 1 or more"),
        (["--megabytes", "nan"], "--megabytes nan: give a number above 0"),
        (["--vocab-file", "wrong.json"], "wrong.json and m.txt are no vocabulary with its merges"),
        (["--vocab-file", "open.json"], "open.json: has no <|endoftext|>"),
    ],
)
def test_wrong_values_are_said_in_a_line(given, flags, said, monkeypatch):
    def side(*_):
        raise AssertionError("started before the command line was checked")

    monkeypatch.setattr(tokenize, "measure_side", side)
    with pytest.raises(ConfigError) as refused:
        tokenize.main([*given, *flags])
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_what_a_side_says_when_it_fails_is_said_here(given, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    arguments = tokenize._parser().parse_args(given)
    with pytest.raises(DatasetError, match="no such file"):
        tokenize.measure_side(arguments, "ours", tmp_path / "gone.jsonl")


NO_TOKENIZER = [
    ("import nothing_of_this_name", "No module named"),
    ("", "no attribute 'GPT2Tokenizer'"),
]


@pytest.mark.parametrize(("code", "message"), NO_TOKENIZER)
def test_a_file_that_is_no_tokenizer_is_refused_before_a_worker_is_started(
    given, tmp_path, monkeypatch, code, message
):
    def pool(_way):
        raise AssertionError("workers that fail would be started anew for ever")

    # Of megatron-core nothing is needed before; to import it takes seconds.
    builders = SimpleNamespace(DType=None, IndexedDatasetBuilder=None)
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.indexed_dataset", builders)
    monkeypatch.setattr(tokenize.multiprocessing, "get_context", pool)
    (tmp_path / "megatron.py").write_text(code)
    arguments = tokenize._parser().parse_args(given)
    with pytest.raises(
        tokenize.BenchmarkError, match=f"--megatron-tokenizer megatron.py: .*{message}"
    ):
        tokenize._run_megatron(arguments, tmp_path / "t.jsonl", tmp_path / "out")


@pytest.mark.parametrize("are_equal", [False, True])
def test_figures_are_told_of_equal_files_alone(given, monkeypatch, capsys, are_equal):
    def side(_arguments, name, _text):
        return {"seconds": 2.0, "digests": ("" if are_equal else name,), "tokens": 30}

    monkeypatch.setattr(tokenize, "measure_side", side)
    words = [*given, "--repeats", "2", "--megabytes", "0.001"]
    status = run_command(lambda: tokenize.main(words))
    told = capsys.readouterr()
    assert status == (0 if are_equal else 2)
    assert ("2 turns, equal .bin and .idx" in told.out) is are_equal
    assert ("the two sides wrote different files: no figure" in told.err) is not are_equal
