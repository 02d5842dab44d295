import json

import pytest

from dataset import manifest
from dataset.errors import DatasetError
from dataset.manifest import Manifest


@pytest.fixture
def written(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"abc")
    made = Manifest(
        schema_version=manifest.SCHEMA_VERSION,
        key="k",
        prefix="a",
        documents=1,
        tokens=2,
        text_bytes=3,
        vocab_size=300,
        eod=0,
        tokenizer="tokenizer.json",
        settings={"vocab_size": 300},
        versions={"format": "1"},
        files={"a.bin": manifest.file_facts(tmp_path / "a.bin")},
    )
    made.write(tmp_path / manifest.NAME)
    return tmp_path, made


def edit(folder, **changes):
    path = folder / manifest.NAME
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def test_it_comes_back_as_it_was_written(written):
    folder, made = written
    assert manifest.read(folder / manifest.NAME) == made


def test_the_keys_the_trainer_reads_are_plain_numbers(written):
    values = json.loads((written[0] / "manifest.json").read_text())
    assert [values[key] for key in ("documents", "tokens", "vocab_size", "eod")] == [1, 2, 300, 0]


def test_facts_are_the_sha256_and_the_size(written):
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of "abc"
    assert written[1].files["a.bin"] == {"sha256": known, "bytes": 3}


def test_damage_names_the_file(written):
    folder, made = written
    assert made.damage(folder) is None
    (folder / "a.bin").write_bytes(b"abd")
    assert made.damage(folder) == "the checksum of a.bin does not match its manifest"
    (folder / "a.bin").unlink()
    assert made.damage(folder) == "a.bin is missing"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eod": None}, "does not have the fields"),
        ({"surplus": 1}, "does not have the fields"),
        ({"schema_version": 2}, "schema_version = 2, this reads 1"),
        ({"files": []}, "field 'files'"),
    ],
)
def test_a_manifest_of_another_shape_is_refused(written, changes, message):
    edit(written[0], **changes)
    with pytest.raises(DatasetError, match=message):
        manifest.read(written[0] / manifest.NAME)


@pytest.mark.parametrize("content", [b"", b"1", b"[1]", b"\xff\xfe"])
def test_a_manifest_that_is_no_object_is_refused(tmp_path, content):
    (tmp_path / manifest.NAME).write_bytes(content)
    with pytest.raises(DatasetError, match=r"not JSON|does not have the fields"):
        manifest.read(tmp_path / manifest.NAME)
