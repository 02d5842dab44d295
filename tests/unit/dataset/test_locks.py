import fcntl

import pytest

from dataset.errors import DatasetError
from dataset.locks import NAME, locked


def test_a_second_holder_is_refused_until_the_first_lets_go(tmp_path):
    with locked(tmp_path / "x"):
        with (
            pytest.raises(DatasetError, match="x is in use by another process"),
            locked(tmp_path / "x"),
        ):
            pass
        assert (tmp_path / "x" / NAME).exists()
    with locked(tmp_path / "x"):
        pass


def test_a_lock_deleted_by_its_last_holder_meanwhile_is_not_held(tmp_path, monkeypatch):
    real, deleted = fcntl.flock, []

    def flock(handle, how):
        if not deleted:
            deleted.append(handle)
            (tmp_path / NAME).unlink()
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path):
        assert (tmp_path / NAME).exists()


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
        assert (tmp_path / "disk" / NAME).exists()
    assert list((tmp_path / "disk").iterdir()) == []
    assert (tmp_path / "x").is_symlink()


def test_a_lock_that_a_dead_process_left_is_free(tmp_path):
    (tmp_path / NAME).touch()
    with locked(tmp_path):
        pass
