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


def test_a_lock_that_a_dead_process_left_is_free(tmp_path):
    (tmp_path / NAME).touch()
    with locked(tmp_path):
        pass
