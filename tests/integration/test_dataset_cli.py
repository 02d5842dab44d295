"""`python -m dataset` as users and the launcher run it, on the corpus it ships with."""

import json
from pathlib import Path

import pytest
from programs import python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


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
    assert 2_000_000 < facts["text_bytes"] < 8_000_000
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
