"""`python -m dataset` as users and the launcher run it, on the corpus it ships with."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import wait_for
from programs import python

from configs.files import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def command(*arguments):
    return [sys.executable, "-m", "dataset", *map(str, arguments)]


def files_of(prefix):
    return {path.name: path.read_bytes() for path in prefix.parent.iterdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A cache folder with a space in its name, and the prefix in it."""
    folder = tmp_path_factory.mktemp("a cache")
    done = python("-m", "dataset", "prepare", "--cache-dir", folder)
    assert done.returncode == 0, done.stderr
    return folder, Path(done.stdout.splitlines()[-1]), done


def test_the_last_line_of_stdout_is_the_prefix_and_counts_go_to_stderr(built):
    folder, prefix, done = built
    assert prefix.is_absolute()
    assert prefix.parent.parent == folder
    assert prefix.name.endswith("_text_document")
    assert done.stdout == f"{prefix}\n"
    assert "vocabulary 8,192: built in" in done.stderr
    assert "%|" not in done.stderr  # no bar where stderr is no terminal


def test_the_trainers_keys_are_in_the_manifest_beside_the_pair(built):
    _, prefix, _ = built
    facts = json.loads((prefix.parent / "manifest.json").read_text())
    assert facts["vocab_size"] == 8192
    assert facts["eod"] == 0
    assert facts["documents"] > 400
    assert facts["tokens"] > 500_000


def test_a_second_call_finds_it_without_torch(built):
    folder, prefix, _ = built
    code = (
        "import sys; from dataset.__main__ import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'megatron', 'numpy', 'tiktoken', 'tokenizers'}; "
        "sys.exit(code or not heavy.isdisjoint(sys.modules))"
    )
    done = python("-c", code, "prepare", DOS_DATASET_CACHE=str(folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{prefix}\n"
    assert "from the cache" in done.stderr


def test_two_at_once_agree(built, tmp_path):
    _, prefix, _ = built
    both = [
        subprocess.Popen(
            command("prepare", "--cache-dir", tmp_path),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert files_of(Path(outputs[0][0].strip())) == files_of(prefix)
    assert [path.name for path in tmp_path.glob("[!.]*")] == [prefix.parent.name]


def test_kill_9_never_leaves_a_half_folder(built, tmp_path):
    _, prefix, _ = built
    process = subprocess.Popen(
        command("prepare", "--cache-dir", tmp_path),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    wait_for(lambda: list(tmp_path.glob(".*/*.bin")))
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not list(tmp_path.glob("[!.]*"))
    done = python("-m", "dataset", "prepare", "--cache-dir", tmp_path)
    assert "damaged" not in done.stderr
    assert files_of(Path(done.stdout.strip())) == files_of(prefix)
