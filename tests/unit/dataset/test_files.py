import pytest
from full_disk import files_of_at_most

from dataset.errors import DatasetError
from dataset.files import content_key, file_digest, visible, writing


def test_the_key_follows_values_and_not_their_order():
    key = content_key({"a": 1, "b": {"c": 2}})
    assert content_key({"b": {"c": 2}, "a": 1}) == key
    assert content_key({"a": 1, "b": {"c": 3}}) != key


def test_a_files_digest_is_its_sha256(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert file_digest(tmp_path / "x") == known


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


def test_what_could_steer_a_terminal_is_spelt_out():
    assert visible("plain é 東 name") == "plain é 東 name"
    assert visible("a\x1b[31m\nb\udcff\x9bc") == r"a\x1b[31m\nb\udcff\x9bc"
    assert visible("a\nb\tc\rd", kept="\n\t") == "a\nb\tc\\rd"
