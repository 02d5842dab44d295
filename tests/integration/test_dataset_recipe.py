"""Pages to training text by Megatron's OpenWebText recipe, as a user types it."""

import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import wait_for
from programs import python

if "CI" not in os.environ:
    pytest.importorskip("datatrove")

ROOT = Path(__file__).resolve().parents[2]
SENTENCES = (
    "The {0} of the old harbour was painted {1} again before the {2} came back in spring.",
    "Nobody in the village remembered why the {0} had been closed for so many {1} years.",
    "She wrote a long letter about the {2} and the {0}, and he answered with a {1} poem.",
    "In those days the {1} train went twice a week to the {0}, and the {2} went with it.",
)
WORDS = (
    "gate", "house", "bell", "tower", "church", "market", "bridge", "mill", "school", "garden",
    "river", "meadow", "ship", "boat", "road", "inn", "forest", "hill", "castle", "wall",
)  # fmt: skip
TASK = "Which of the seven grey horses in the long stable was sold to the miller on that Monday?"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def article(seed, num_sentences=40):
    rng = random.Random(seed)
    return " ".join(
        rng.choice(SENTENCES).format(*(f"{rng.choice(WORDS)} {rng.choice(WORDS)}" for _ in "abc"))
        for _ in range(num_sentences)
    )


def command(*arguments):
    return [sys.executable, "-m", "dataset", *map(str, arguments)]


def run(*arguments):
    """Run a command; return what it counted and its records."""
    done = python("-m", "dataset", *arguments)
    assert done.returncode == 0, done.stderr
    counted = [re.fullmatch(r"([a-z].*?) +([\d,]+)", line) for line in done.stderr.splitlines()]
    counts = {found[1]: int(found[2].replace(",", "")) for found in counted if found}
    place = Path(done.stdout.rstrip("\n"))
    texts = [gzip.decompress(path.read_bytes()) for path in sorted(place.parent.glob(place.name))]
    return counts, [json.loads(line) for text in texts for line in text.splitlines()]


def pages(folder, texts):
    """Write one file a page, as trafilatura does."""
    folder.mkdir()
    for number, text in enumerate(texts):
        page = {"text": text, "source": f"http://example.org/{number}"}
        (folder / f"{number:02}.json").write_text(json.dumps(page))
    return folder / "*.json"


def test_the_recipe_from_pages_to_training_text(tmp_path):
    texts = [article(n) for n in range(10)]
    texts[3] = f"{article(3)} {TASK.upper()} {article(53)}"
    texts += [
        texts[0].replace("again", "anew", 1),
        article(60, 4),
        "Der Hund schläft im Haus. " * 60,
    ]
    source = pages(tmp_path / "pages", texts)
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"question": ["What is it?", TASK]}))
    # One process here, which takes a third of the time, and one a core below.
    words = ("--input", source, "--output", tmp_path / "kept", "--workers", 1)
    counts, kept = run("clean", *words)
    assert counts == {
        "read": 13, "bad lines": 0, "dropped: language": 1, "dropped: too short": 1,
        "dropped: near-duplicate": 1, "written": 10,
    }  # fmt: skip
    assert {page["source"] for page in kept} < {f"http://example.org/{n}" for n in range(11)}
    evaluation = ("--evaluation", tmp_path / "tasks.jsonl", "--evaluation-keys", "question")
    source = tmp_path / "kept" / "*.jsonl.gz"
    counts, trained = run(
        "decontaminate", "--input", source, "--output", tmp_path / "train", *evaluation
    )
    assert counts == {"read": 10, "bad lines": 0, "dropped: contaminated": 1, "written": 9}
    assert trained == [page for page in kept if TASK.upper() not in page["text"]]


def test_of_a_damaged_file_the_recipe_says_which_and_how_much(tmp_path):
    """A task counts it, in the words that prepare has for it."""
    from dataset.readers import find
    from dataset.web import DAMAGED, Files

    good = '{"text": "the cat sat"}\n'
    (tmp_path / "bad.jsonl").write_text(good * 9 + "no JSON\n" * 6)
    (tmp_path / "good.jsonl").write_text(good * 9 + "no JSON\n" * 5)
    step = Files(find([f"{tmp_path}/*.jsonl"]), "text")
    assert len(list(step.run())) == 18
    (said,) = (name for name in step.stats.to_dict()["stats"] if name.startswith(DAMAGED))
    assert said == f"{DAMAGED}{tmp_path}/bad.jsonl: 6 of 15 records were no documents"


def test_a_killed_clean_goes_on_with_the_tasks_that_are_missing(tmp_path):
    """The task of the second file waits for ever, so that the first is done by then."""
    source, texts = tmp_path / "pages", [article(number) for number in range(2)]
    pages(source, texts)
    given = command(
        "clean", "--input", source / "*.json", "--output", tmp_path / "out", "--workers", "1"
    )
    second, done = source / "01.json", tmp_path / "out" / "logs" / "clean" / "completions"
    (tmp_path / "sitecustomize.py").write_text(WAITING.format(str(second)))
    with subprocess.Popen(
        given, cwd=ROOT, stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(tmp_path)}
    ) as process:
        try:
            wait_for(lambda: (done / "00000").exists() or process.poll() is not None)
        finally:
            os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not list((tmp_path / "out").glob("*.jsonl.gz"))
    first = (done / "00000").stat().st_mtime_ns
    counts, records = run(*given[3:])
    assert (counts["read"], counts["written"]) == (2, 2)
    assert {record["text"] for record in records} == set(texts)
    assert (done / "00000").stat().st_mtime_ns == first


WAITING = """
import pathlib, threading
real = pathlib.Path.open
def waiting(path, *words, **more):
    if str(path) == {0!r}:
        threading.Event().wait()
    return real(path, *words, **more)
pathlib.Path.open = waiting
"""
