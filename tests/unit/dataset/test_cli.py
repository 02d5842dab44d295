import json
import lzma
import os
import sys
from dataclasses import replace

import pytest
from programs import prepare as main

from configs.files import ROOT
from dataset import fetch
from dataset.cli import WEB_PACKAGES
from dataset.tokenizer import ByteLevelBpe


class Recipe:
    """Stands for the recipe on datatrove, of which one file was damaged."""

    DAMAGED = "damaged: "
    Cleaning = staticmethod(lambda *_: None)

    def __init__(self, counts):
        self.clean = self.decontaminate = lambda *_: counts


@pytest.mark.parametrize("damage", ["a.jsonl: 7 of 9 records were no documents", ""])
@pytest.mark.parametrize("command", ["clean", "decontaminate"])
def test_a_recipe_ends_as_prepare_does_where_a_file_is_damaged(
    tmp_path, monkeypatch, capsys, text, command, damage
):
    counts = {"read": 2, "bad lines": 7, **({f"damaged: {damage}": 1} if damage else {})}
    monkeypatch.setattr("dataset.cli.web_steps", lambda: Recipe(counts))
    words = [command, "--input", str(text), "--output", str(tmp_path / "out")]
    more = ["--evaluation", str(text)] if command == "decontaminate" else []
    assert main([*words, *more]) == bool(damage)
    out, err = capsys.readouterr()
    assert out == f"{tmp_path}/out/*.jsonl.gz\n"
    lines = [f"dataset {command}: {damage}"] if damage else []
    assert [
        line for line in err.splitlines() if "damage" in line or "no documents" in line
    ] == lines


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "some text.jsonl"
    path.write_text("".join(json.dumps({"text": f"the cat number {n}"}) + "\n" for n in range(9)))
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prepare", "oscar-1gb", "--input", "x"], "give 'oscar-1gb' or --input, not both"),
        (["prepare", "--tokenizer", "train-bpe"], "--tokenizer: only with --input"),
        (["prepare", "--input", "{text}"], "--output-prefix P: give it"),
        (["prepare", "--input", "{text}", "--output-prefix", "p"], "--tokenizer NAME: give one"),
        (["PREP", "--tokenizer", "bert"], "--tokenizer bert: not one of gpt2-bpe"),
        (["PREP", "--tokenizer", "GPT2BPETokenizer"], "gpt2-bpe: give --vocab-file FILE"),
        (["PREP", "--tokenizer", "sentencepiece"], "give --tokenizer-model FILE"),
        (["PREP", "--tokenizer", "sentencepiece", "--tokenizer-model", "no"], "no: no such file"),
        (
            ["PREP", "--tokenizer", "train-bpe", "--vocab-size", "256"],
            "vocab_size = 256: at least 257",
        ),
        (["PREP", "--tokenizer", "train-bpe", "--json-keys", "a", "a"], "'a' is there twice"),
        (["PREP", "--tokenizer", "train-bpe", "--json-keys", "../x"], "not fit to be part"),
        (["merge", "a", "--output-prefix", "b"], "give two prefixes or more"),
        (["inspect", "no/such"], "give the prefix that"),
        (
            ["PREP", "--tokenizer", "sentencepiece", "--tokenizer-model", "{text}"],
            "some text.jsonl is not a SentencePiece model",
        ),
        (
            ["prepare", "--input", "{text}", "--tokenizer", "train-bpe", "--output-prefix=/proc/a"],
            "--output-prefix /proc/a: cannot be written: ",
        ),
        (
            ["decontaminate", "--input", "{text}", "--output", "o", "--evaluation", "no.jsonl"],
            "--evaluation no.jsonl: no such file",
        ),
        ([], "required: command"),
        (["inspect"], "required: PREFIX"),
        (["prepare", "--workers", "0"], "'0': give a whole number, 1 or more"),
        (["prepare", "--part-mb", "-1"], "'-1': give a number of MiB above 0"),
        (["merge", "--outptu", "x"], "'--outptu': did you mean '--output-prefix'?"),
        (["prepare", "--output-prefix", "out/"], "'out/': end it with a name"),
        (["inspect", "/"], "'/': give a pair's path without .bin and .idx"),
        (["merge", "a", "b", "--output-prefix", "out/.."], "'out/..': end it with a name"),
        (["prepare", "imagenet"], "invalid choice: 'imagenet'"),
        (["clean", "--near-duplicates", "1"], "'1': give a number between 0 and 1"),
    ],
)
def test_wrong_use_gets_a_line_and_exit_code_2(
    text, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    if arguments[:1] == ["PREP"]:
        arguments = ["prepare", "--input", "{text}", "--output-prefix", "p", *arguments[1:]]
    assert main([argument.format(text=text) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["some text.jsonl"]


def test_prepare_inspect_and_merge_by_hand(text, tmp_path, capsys):
    """As a user does it, with a folder that has a blank in its name."""
    folder = tmp_path / "my data"
    given = ["prepare", "--input", str(text), "--tokenizer", "train-bpe", "--vocab-size", "280",
             "--append-eod", "--dataset-impl", "mmap", "--workers", "1"]  # fmt: skip
    assert main([*given, "--output-prefix", str(folder / "a")]) == 0
    out, err = capsys.readouterr()
    prefix = folder / "a_text_document"
    assert out == f"{prefix}\n"
    assert "a_text_document: 9 documents, " in err
    assert main(["inspect", f"{prefix}.bin", "--document", "3"]) == 0
    out, _ = capsys.readouterr()
    assert "document 3 begins:\nthe cat number 3<|endoftext|>\n" in out
    assert out.endswith("checks      all passed\n")
    assert main(["merge", str(prefix), str(prefix), "--output-prefix", f"{folder}/b.bin"]) == 0
    assert capsys.readouterr().out == f"{folder / 'b'}\n"
    assert main(["inspect", str(folder / "b")]) == 0
    raw = (folder / "b.bin").read_bytes()
    (folder / "b.bin").write_bytes(raw[:-2])
    assert main(["inspect", str(folder / "b")]) == 1
    assert "DAMAGED" in capsys.readouterr().out


def test_names_of_any_bytes_are_read_and_told_without_steering_the_terminal(tmp_path, capsys):
    path = tmp_path / os.fsdecode(b"a\n\x1b[31m\xff.jsonl")
    text = {"text": "the cat \x1b[2J sat"}
    path.write_text(f"broken\n{json.dumps(text)}\n")
    given = ["prepare", "--tokenizer", "train-bpe", "--vocab-size", "270", "--workers", "1"]
    prefix = tmp_path / "o" / "x_text_document"
    assert main([*given, "--output-prefix", str(tmp_path / "o/x"), "--input", str(path)]) == 0
    assert capsys.readouterr().out == f"{prefix}\n"
    (line,) = (tmp_path / "o" / "x.bad-lines.txt").read_text().splitlines()
    assert line.startswith(f"{tmp_path}/a??[31m?.jsonl:1: not JSON: ")
    assert main([*given, "--output-prefix", "y", "--input", f"{path}.none"]) == 2
    assert "\x1b" not in capsys.readouterr().err
    assert main(["inspect", str(prefix)]) == 0
    assert "the cat ?[2J sat" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("number", "words"),
    [(1, ["1 record without text was", "1 bad line was"]),
     (2, ["2 records without text were", "2 bad lines were"])],
)  # fmt: skip
def test_one_record_is_told_as_one(number, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("dataset.prepare.ordered", lambda work, items, _: (work(i) for i in items))
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "the cat"}\n' + ('{"text": ""}\n' + "no JSON\n") * number)
    given = ["prepare", "--tokenizer", "train-bpe", "--vocab-size", "262", "--input", str(path)]
    assert main([*given, "--output-prefix", str(tmp_path / "o" / "x")]) == 0
    err = capsys.readouterr().err
    assert all(f"\n{word} left out" in err for word in words)


@pytest.mark.parametrize(
    ("num_bad", "num_good", "code"), [(5, 9, 0), (6, 9, 1), (6, 5_994, 0), (7, 5_993, 1)]
)
def test_a_file_of_which_more_than_a_few_lines_are_no_documents_is_told(
    tmp_path, monkeypatch, capsys, num_bad, num_good, code
):
    monkeypatch.setattr("dataset.prepare.ordered", lambda work, items, _: (work(i) for i in items))
    good = '{"text": "the cat sat"}\n'
    (tmp_path / "good.jsonl").write_text(good * 3_000)
    (tmp_path / "bad.jsonl").write_text(good * num_good + "no JSON\n" * num_bad)
    given = ["prepare", "--tokenizer", "train-bpe", "--vocab-size", "262", "--input",
             f"{tmp_path}/*.jsonl", "--output-prefix", str(tmp_path / "o" / "x")]  # fmt: skip
    said = f"bad.jsonl: {num_bad} of {num_good + num_bad:,} records were no documents; see "
    for _ in range(2):  # a finished job is found, with what is wrong with it
        assert main(given) == code
        out, err = capsys.readouterr()
        assert out == f"{tmp_path}/o/x_text_document\n"
        assert (said in err, "good.jsonl: " in err) == (code == 1, False)


@pytest.fixture
def small_gpt2(tmp_path, monkeypatch):
    """A folder with a small vocabulary in GPT-2's two files, by a user's hand."""
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    model = json.loads(ByteLevelBpe.learn(["the cat sat"] * 3, 270)._json)["model"]
    folder = tmp_path / "by hand"
    folder.mkdir()
    (folder / "gpt2-vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "".join(f"{a} {b}\n" for a, b in model["merges"])
    (folder / "gpt2-merges.txt").write_text("#version: 0.2\n" + merges)
    return folder


def oscar(cache, url, *words):
    given = ["--cache-dir", str(cache), "--workers", "1", *words]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", url)
        return main(["prepare", "oscar-1gb", *given])


def trust(monkeypatch):
    for name in ("GPT2_VOCABULARY", "GPT2_MERGES"):
        monkeypatch.setattr(fetch, name, replace(getattr(fetch, name), sha256=None))


def test_oscar_is_made_of_files_put_there_by_hand(tmp_path, monkeypatch, capsys, small_gpt2):
    cache, by_hand = tmp_path / "c", ("--data-dir", str(small_gpt2))
    assert oscar(cache, "http://127.0.0.1:1", *by_hand) == 2
    assert "wrong SHA-256" in capsys.readouterr().err  # it is not GPT-2's
    trust(monkeypatch)
    assert oscar(cache, "http://127.0.0.1:1", *by_hand) == 2
    err = capsys.readouterr().err
    assert f"put these files into {small_gpt2}" in err
    assert "oscar-1GB.jsonl.xz  from http://127.0.0.1:1/bigscience/misc-test-data/" in err
    lines = '{"id": 0, "text": "the cat"}\n{"id": 1, "text": "sat"}\n'
    (small_gpt2 / "oscar-1GB.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    assert oscar(cache, "http://127.0.0.1:1", *by_hand) == 0
    out, err = capsys.readouterr()
    prefix = cache / "oscar-1gb" / "oscar-1gb_text_document"
    assert (out, "2 documents" in err) == (f"{prefix}\n", True)
    assert main(["inspect", str(prefix)]) == 0
    assert "the cat<|endoftext|>" in capsys.readouterr().out


def test_without_the_packages_of_the_recipe_a_line_says_which(text, tmp_path, monkeypatch, capsys):
    # A submodule that was imported before is found without a look at its package.
    for name in [name for name in sys.modules if name.partition(".")[0] == "datatrove"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "datatrove", None)
    monkeypatch.delitem(sys.modules, "dataset.web", raising=False)
    monkeypatch.delattr("dataset.web", raising=False)
    assert main(["clean", "--input", str(text), "--output", str(tmp_path / "o")]) == 2
    assert "needs packages that are not here" in capsys.readouterr().err
    pins = (ROOT / "requirements" / "dev.txt").read_text().splitlines()
    assert set(WEB_PACKAGES.split()) <= set(pins)
