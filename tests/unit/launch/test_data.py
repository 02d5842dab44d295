import sys

import pytest

from configs.errors import ConfigError
from launch import data
from launch.data import LaunchError, data_prefix


def make(folder):
    for end in (".bin", ".idx"):
        (folder / f"x{end}").write_text("")
    return folder / "x"


def test_the_users_own_files_are_taken_as_an_absolute_prefix(odd_dir, monkeypatch):
    prefix = make(odd_dir)
    monkeypatch.chdir(odd_dir)
    assert data_prefix("x") == str(prefix)


def test_missing_files_are_named(tmp_path):
    make(tmp_path)
    (tmp_path / "x.idx").unlink()
    with pytest.raises(ConfigError, match=r"x\.idx"):
        data_prefix(str(tmp_path / "x"))


def test_the_default_corpus_is_the_last_line_of_the_preparation(odd_dir, monkeypatch):
    prefix = make(odd_dir)
    program = f"print('progress'); print({str(prefix)!r})"
    monkeypatch.setattr(data, "PREPARE", [sys.executable, "-c", program])
    assert data_prefix("") == str(prefix)


@pytest.mark.parametrize(
    ("program", "message"),
    [("import sys; sys.exit(3)", "exit code 3"), ("print('nothing')", "named no data")],
)
def test_a_failed_preparation_is_an_error(program, message, monkeypatch):
    monkeypatch.setattr(data, "PREPARE", [sys.executable, "-c", program])
    with pytest.raises(LaunchError, match=message):
        data_prefix("")
