"""Addresses to training text by Megatron's OpenWebText recipe, as a user types it."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

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


def run(folder, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "dataset", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    path = folder / Path(done.stdout.splitlines()[-1]).name
    report = path.with_name(f"{path.name}.report.json")
    return json.loads(report.read_text())["counts"] if report.exists() else {}


def test_the_recipe_from_addresses_to_training_text(open_site, tmp_path):
    site = open_site()
    # A known evaluation question in the middle of a text, and another in all of ten texts.
    common = "It is said that all of this happened a very long time ago in another country."
    texts = [f"{article(n)} {common} {article(n + 50)}" for n in range(10)]
    texts[3] = f"{article(3)} {TASK} {article(53)}"
    texts += [
        texts[0].replace("again", "anew", 1),
        article(60, 4),
        "Der Hund schläft im Haus. " * 60,
    ]
    texts += [f"{article(77)} {common} {article(78)}"]
    urls = [site.text(f"/{n}", text) for n, text in enumerate(texts)]
    urls += [urls[0], f"{site.url}/picture.jpg", "https://www.youtube.com/watch?v=1"]
    (tmp_path / "list.txt").write_text("\n".join(urls))
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"question": [TASK, common]}))

    def at(name):
        return str(tmp_path / name)

    counts = run(tmp_path, "urls", "--input", at("list.txt"), "--output", at("clean.txt"))
    assert (counts["read"], counts["written"]) == (17, 14)
    counts = run(
        tmp_path, "download", "--input", at("clean.txt"), "--output", at("pages.jsonl.zst"),
        "--user-agent", "tester/1.0", "--extract", "visible", "--host-delay", "0",
    )  # fmt: skip
    assert counts == {"read": 14, "written": 14, "bad lines": 0}
    counts = run(
        tmp_path, "clean", "--preset", "openwebtext", "--input", at("pages.jsonl.zst"), "--output",
        at("kept.jsonl.zst"), "--groups", at("groups.jsonl"), "--save-fingerprints", at("kept.fp"),
        "--workers", "1",
    )  # fmt: skip
    assert (counts["written"], counts["dropped: near-duplicate"]) == (11, 1)
    assert (counts["dropped: too short"], counts["dropped: language"]) == (1, 1)
    (group,) = map(json.loads, (tmp_path / "groups.jsonl").read_text().splitlines())
    assert len(group["duplicates"]) == 1
    run(tmp_path, "shuffle", "--input", at("kept.jsonl.zst"), "--output", at("mixed.jsonl"),
        "--seed", "1234")  # fmt: skip
    counts = run(
        tmp_path, "clean", "--preset", "openwebtext-tasks", "--input", at("mixed.jsonl"),
        "--output", at("train.jsonl"), "--decontaminate", at("tasks.jsonl"),
        "--decontaminate-keys", "question", "--workers", "1",
    )  # fmt: skip
    assert (counts["read"], counts["contaminated"], counts["written"]) == (11, 1, 12)
    mixed = [json.loads(line) for line in (tmp_path / "mixed.jsonl").read_text().splitlines()]
    trained = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [record["url"] for record in mixed] != sorted(record["url"] for record in mixed)
    (split,) = [record["id"] for record in mixed if TASK in record["text"]]
    ids = [name for record in mixed for name in
           ([f"{split}-0", f"{split}-1"] if record["id"] == split else [record["id"]])]  # fmt: skip
    assert [record["id"] for record in trained] == ids
    assert not any(TASK in record["text"] for record in trained)
    assert sum(common in record["text"] for record in trained) == 10
    for piece in (record["text"] for record in trained if record["id"].startswith(f"{split}-")):
        assert piece.endswith((".", "?"))
