import fcntl
import json

import pytest
from full_disk import files_of_at_most

from configs.errors import ConfigError
from dataset import manifest
from dataset.files import (
    LOCK_NAME,
    DatasetError,
    content_key,
    locked,
    writing,
)
from dataset.manifest import Manifest


def test_the_key_follows_values_and_not_their_order():
    key = content_key({"a": 1, "b": {"c": 2}})
    assert content_key({"b": {"c": 2}, "a": 1}) == key
    assert content_key({"a": 1, "b": {"c": 3}}) != key


def test_a_file_for_which_there_is_no_room_is_named(tmp_path):
    with (
        files_of_at_most(100),
        pytest.raises(DatasetError, match=f"{tmp_path}/x: .*: make room and run the same command"),
        writing(tmp_path / "x"),
    ):
        (tmp_path / "x").write_bytes(bytes(1000))


def test_other_errors_keep_their_own_words(tmp_path):
    with pytest.raises(FileNotFoundError, match="none"), writing(tmp_path / "x"):
        (tmp_path / "none" / "y").write_bytes(b"")


def test_a_second_holder_is_refused_until_the_first_lets_go(tmp_path):
    second = pytest.raises(DatasetError, match="x is in use by another process")
    with locked(tmp_path / "x"), second, locked(tmp_path / "x"):
        pass
    with locked(tmp_path / "x"):
        assert (tmp_path / "x" / LOCK_NAME).exists()


def test_a_lock_deleted_by_its_last_holder_meanwhile_is_not_held(tmp_path, monkeypatch):
    real, deleted = fcntl.flock, []

    def flock(handle, how):
        if not deleted:
            deleted.append(handle)
            (tmp_path / LOCK_NAME).unlink()
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path):
        assert (tmp_path / LOCK_NAME).exists()


def test_it_leaves_no_file_and_if_asked_no_empty_folder(tmp_path):
    with locked(tmp_path / "x"):
        pass
    assert list((tmp_path / "x").iterdir()) == []
    with locked(tmp_path / "x", drop_empty=True):
        pass
    assert not (tmp_path / "x").exists()
    with locked(tmp_path / "x", drop_empty=True):
        (tmp_path / "x" / "mine").touch()
    assert (tmp_path / "x" / "mine").exists()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_is_no_folder_is_named_and_left(tmp_path, kind):
    path = tmp_path / "x"
    path.touch() if kind == "file" else path.symlink_to("gone")
    with (
        pytest.raises(DatasetError, match="x: the folder for unfinished work goes there; move it"),
        locked(path),
    ):
        pass
    assert path.is_file() or path.is_symlink()


def test_a_folder_on_another_disk_may_be_linked(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "x").symlink_to("disk")
    with locked(tmp_path / "x", drop_empty=True):
        assert (tmp_path / "disk" / LOCK_NAME).exists()
    assert list((tmp_path / "disk").iterdir()) == []
    assert (tmp_path / "x").is_symlink()


@pytest.fixture
def written(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"abc")
    made = Manifest(
        key="k", prefix="a", documents=1, tokens=2, text_bytes=3, vocab_size=300, eod=0,
        tokenizer="tokenizer.json", settings={"vocab_size": 300}, versions={"format": "1"},
        files={"a.bin": manifest.file_facts(tmp_path / "a.bin")},
    )  # fmt: skip
    made.write(tmp_path / manifest.NAME)
    return tmp_path, made


def test_a_manifest_comes_back_and_names_the_file_that_is_damaged(written):
    folder, made = written
    assert manifest.read(folder / manifest.NAME) == made
    assert made.damage(folder) is None
    (folder / "a.bin").write_bytes(b"abd")
    assert made.damage(folder) == "the checksum of a.bin does not match its manifest"
    (folder / "a.bin").unlink()
    assert made.damage(folder) == "a.bin is missing"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eod": None}, "field 'eod' is missing"),
        ({"surplus": 1}, "unknown field 'surplus'"),
        ({"schema_version": 2}, "'schema_version' = 2: Input should be 1"),
        ({"files": []}, r"field 'files' = \[\]: Input should be a valid dictionary"),
    ],
)
def test_a_manifest_of_another_shape_is_refused(written, changes, message):
    path = written[0] / manifest.NAME
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: one for name, one in values.items() if one is not None}))
    with pytest.raises(ConfigError, match=message):
        manifest.read(path)


@pytest.mark.parametrize("content", [b"", b"1", b"[1]", b"\xff\xfe"])
def test_a_manifest_that_is_no_object_is_refused(tmp_path, content):
    (tmp_path / manifest.NAME).write_bytes(content)
    with pytest.raises(DatasetError, match=r"manifest.json: not .*JSON.*; get it again"):
        manifest.read(tmp_path / manifest.NAME)
