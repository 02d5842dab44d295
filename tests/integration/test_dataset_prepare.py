"""`prepare --input` end to end: files of every kind, killed, limited, beside Megatron's builder."""

import gzip
import json
import lzma
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from processes import is_alive, wait_for
from programs import prepare
from ranks import run_script

from dataset import indexed
from dataset.tokenizer import ByteLevelBpe

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT / ".." / "shared" / "data"
# The whole of what was asked for: DATASET_MEGABYTES=1000.
MEGABYTES = int(os.environ.get("DATASET_MEGABYTES", "12"))
MOST_MEMORY_BYTES = 1_000_000_000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900 + 3 * MEGABYTES)]

WORDS = "the a cat dog house tree river of and in on sat ran was is blue 17 2,000 ' didn't"


def sentence(rng):
    return " ".join(rng.choices(WORDS.split(), k=rng.randint(5, 30))) + rng.choice(
        [".\n", "!", " é東"]
    )


def write_jsonl(path, num_bytes, seed=1):
    rng = random.Random(seed)
    written = 0
    with path.open("w") as file:
        while written < num_bytes:
            text = "".join(sentence(rng) for _ in range(rng.randint(1, 60)))
            written += file.write(json.dumps({"id": written, "text": text}) + "\n")
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Two files of the same form as GPT-2's."""
    folder = tmp_path_factory.mktemp("gpt2")
    rng = random.Random(0)
    learnt = ByteLevelBpe.learn([sentence(rng) for _ in range(500)], 400)
    model = json.loads(learnt._json)["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "".join(f"{a} {b}\n" for a, b in model["merges"])
    (folder / "merges.txt").write_text("#version: 0.2\n" + merges)
    return folder / "vocab.json", folder / "merges.txt"


@pytest.fixture(scope="module")
def gpt2(small):
    """GPT-2's files, or the small ones."""
    folder = SHARED / "gpt2"
    return (folder / "vocab.json", folder / "merges.txt") if folder.is_dir() else small


def command(gpt2, output, *arguments):
    return [
        *(sys.executable, "-m", "dataset", "prepare", "--output-prefix", str(output)),
        *("--tokenizer", "gpt2-bpe", "--vocab-file", str(gpt2[0]), "--merge-file", str(gpt2[1])),
        *("--append-eod", "--workers", "2", *map(str, arguments)),
    ]


def run(given, **options):
    return subprocess.run(given, cwd=ROOT, capture_output=True, text=True, check=False, **options)


def call(given, capsys):
    """Run the same command in this process; its exit code, output and errors.

    For calls that end before any work begins.
    """
    code = prepare(given[given.index("prepare") :])
    return code, *capsys.readouterr()


def pair(output):
    prefix = output.with_name(output.name + "_text_document")
    return indexed.bin_path(prefix).read_bytes(), indexed.idx_path(prefix).read_bytes()


BUILD = """
import json, pathlib, sys
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
ids, vocab_size, bin_path, idx_path = sys.argv[1:]
builder = IndexedDatasetBuilder(bin_path, dtype=DType.optimal_dtype(int(vocab_size)))
for document in json.loads(pathlib.Path(ids).read_text()):
    builder.add_document(document, [len(document)])
builder.finalize(idx_path)
"""


def test_the_files_are_those_of_megatrons_builder_for_the_ids_of_tokenizers(gpt2, tmp_path):
    """Ids by `tokenizers`, one document at a time, files by megatron-core."""
    text = tmp_path / "text.jsonl.xz"
    shared = next((SHARED / "text").glob("*.jsonl.xz"), None) if SHARED.is_dir() else None
    with lzma.open(shared) if shared else write_jsonl(tmp_path / "own", 300_000).open("rb") as file:
        text.write_bytes(lzma.compress(b"".join(file.readlines(300_000))))
    done = run(command(gpt2, tmp_path / "ours", "--input", text, "--part-mb", "0.2"))
    assert done.returncode == 0, done.stderr
    tokenizer = ByteLevelBpe.from_gpt2_files(*gpt2)
    with lzma.open(text, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    documents = [[*tokenizer._slow.encode(one).ids, tokenizer.eod] for one in texts]
    (tmp_path / "ids.json").write_text(json.dumps(documents))
    theirs = tmp_path / "theirs_text_document"
    words = (tokenizer.vocab_size, indexed.bin_path(theirs), indexed.idx_path(theirs))
    run_script(BUILD, tmp_path / "ids.json", *words)
    assert pair(tmp_path / "ours") == pair(tmp_path / "theirs")


@pytest.mark.exhaustive
def test_memory_stays_flat(gpt2, tmp_path):
    text = write_jsonl(tmp_path / "text.jsonl", 1_000_000)
    content = text.read_bytes()
    with text.open("ab") as file:
        for _ in range(MEGABYTES - 1):
            file.write(content)
    process = psutil.Popen(
        command(gpt2, tmp_path / "out", "--input", text), cwd=ROOT, stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    most = 0
    while process.poll() is None:
        most = max(most, sum(map(shared_out_bytes, [process, *process.children(recursive=True)])))
        time.sleep(0.05)
    assert process.returncode == 0
    assert 50_000_000 < most < MOST_MEMORY_BYTES
    sys.stdout.write(f"{MEGABYTES} MB of text, at most {most / 1e6:.0f} MB of memory\n")


def shared_out_bytes(process):
    try:
        return process.memory_full_info().pss
    except psutil.Error:
        return 0


def test_stopped_work_goes_on_to_the_same_bytes_and_two_at_once_are_refused(  # noqa: PLR0915
    small, tmp_path, capsys
):
    text = write_jsonl(tmp_path / "a text.jsonl", 1_000_000)
    packed = tmp_path / "text.jsonl.gz"
    packed.write_bytes(gzip.compress(text.read_bytes(), 1))
    inputs = ("--input", text, packed, "--part-mb", "0.05")
    assert run(command(small, tmp_path / "whole", *inputs)).returncode == 0
    given = command(small, tmp_path / "out", *inputs)
    parts = tmp_path / "out.parts"

    def start(num_parts):
        """Start it in a group of its own, and stop the group when so many parts are there."""
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            given, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )
        wait_for(lambda: len(list(parts.glob("*.part"))) >= num_parts)
        os.killpg(process.pid, signal.SIGSTOP)  # or it is done before a second has begun
        return process

    process = start(3)
    refused, _, why = call(given, capsys)
    os.killpg(process.pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGCONT)
    stdout, stderr = process.communicate()
    assert (refused, process.returncode) == (2, 130), stderr
    assert "is in use by another process" in why
    assert "interrupted; finished parts are kept: the same command goes on" in stderr
    assert stdout == ""
    assert "Traceback" not in stderr
    refused, _, why = call([*given, "--json-keys", "id"], capsys)
    assert refused == 2
    assert "unfinished work begun with other options (json_keys = ['text'] then)" in why
    before = {path: path.stat().st_mtime_ns for path in parts.glob("*.part")}
    killed = start(len(before) + 3)
    workers = psutil.Process(killed.pid).children(recursive=True)
    killed.kill()  # alone: its workers see it
    os.killpg(killed.pid, signal.SIGCONT)
    killed.communicate()
    wait_for(lambda: not any(is_alive(worker.pid) for worker in workers))
    after = {path: path.stat().st_mtime_ns for path in parts.glob("*.part")}
    assert before.items() <= after.items(), "a finished part was made again"
    done = run(given)
    assert done.returncode == 0
    assert "going on: " in done.stderr
    assert done.stdout == f"{tmp_path / 'out_text_document'}\n"
    assert pair(tmp_path / "out") == pair(tmp_path / "whole")
    assert not parts.exists()
    assert "finished before" in call(given, capsys)[2]
