"""Addresses to training text by Megatron's OpenWebText recipe, as a user types it."""

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
from web_site import Reply

if "CI" not in os.environ:
    pytest.importorskip("datatrove")
    pytest.importorskip("trafilatura")

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
    done = subprocess.run(
        command(*arguments), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    counted = [re.fullmatch(r"([a-z].*?) +([\d,]+)", line) for line in done.stderr.splitlines()]
    counts = {found[1]: int(found[2].replace(",", "")) for found in counted if found}
    place = Path(done.stdout.rstrip("\n"))
    texts = [gzip.decompress(path.read_bytes()) for path in sorted(place.parent.glob(place.name))]
    return counts, [json.loads(line) for text in texts for line in text.splitlines()]


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

    def step(name, source, output, *more):
        return run(name, "--input", tmp_path / source, "--output", tmp_path / output, *more)

    counts, _ = step("urls", "list.txt", "urls")
    assert (counts["read"], counts["written"]) == (17, 14)
    asking = ("--user-agent", "tester/1.0", "--host-delay", "0")
    counts, pages = step("download", "urls/*.jsonl.gz", "pages", *asking)
    assert counts == {"read": 14, "written": 14, "bad lines": 0}
    assert sorted(page["url"] for page in pages) == sorted(urls[:14])
    counts, kept = step("clean", "pages/*.jsonl.gz", "kept")
    assert (counts["written"], counts["dropped: near-duplicate"]) == (11, 1)
    assert (counts["dropped: too short"], counts["dropped: language"]) == (1, 1)
    assert step("clean", "pages/*.jsonl.gz", "kept") == (counts, kept)  # found, not repeated
    _, mixed = step("shuffle", "kept/*.jsonl.gz", "mixed.jsonl.gz", "--seed", "1234")
    assert sorted(map(repr, mixed)) == sorted(map(repr, kept))
    evaluation = ("--evaluation", tmp_path / "tasks.jsonl", "--evaluation-keys", "question")
    counts, trained = step("decontaminate", "mixed.jsonl.gz", "train", *evaluation)
    assert (counts["read"], counts["contaminated"], counts["written"]) == (11, 1, 12)
    (split,) = [record["id"] for record in mixed if TASK in record["text"]]
    ids = [name for record in mixed for name in
           ([f"{split}-0", f"{split}-1"] if record["id"] == split else [record["id"]])]  # fmt: skip
    assert [record["id"] for record in trained] == ids
    assert not any(TASK in record["text"] for record in trained)
    assert sum(common in record["text"] for record in trained) == 10
    for piece in (record["text"] for record in trained if record["id"].startswith(f"{split}-")):
        assert piece.endswith((".", "?"))


def test_a_killed_download_goes_on_with_the_hosts_that_are_missing(open_site, tmp_path):
    """Tasks run in order; the host of the second one does not answer until the first is done."""
    from dataset.web import DOWNLOAD_TASKS, _host_number

    by_task = {}
    while len(by_task) < 2:
        site = open_site()
        by_task.setdefault(_host_number(site.url + "/") % DOWNLOAD_TASKS, site)
    first, second = (by_task[task] for task in sorted(by_task))
    urls = [site.text("/page", article(number)) for number, site in enumerate((first, second))]
    (tmp_path / "urls.txt").write_text("\n".join(urls))
    second.put("/page", Reply(headers={"Content-Type": "text/html"}, drips=True))
    given = command(
        "download", "--input", tmp_path / "urls.txt", "--output", tmp_path / "out",
        "--user-agent", "tester/1.0", "--host-delay", "0", "--workers", "1",
    )  # fmt: skip
    with subprocess.Popen(given, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: "/page" in second.asked or process.poll() is not None)
        finally:
            os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not list((tmp_path / "out").glob("*.jsonl.gz"))
    second.text("/page", article(1))
    counts, records = run(*given[3:])
    assert counts == {"read": 2, "written": 2, "bad lines": 0}
    assert {record["url"] for record in records} == set(urls)
    assert first.asked == ["/robots.txt", "/page"]
    assert second.asked == ["/robots.txt", "/page"] * 2
    done = subprocess.run(
        [*given, "--json-key", "text"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, "this with other options" in done.stderr) == (2, True)
