"""Files come whole or not at all."""

import pytest
from full_disk import files_of_at_most

from deep_optimizer_states.checks import write_whole


def test_a_file_is_written_and_nothing_else(tmp_path):
    write_whole(tmp_path / "a", "text")
    write_whole(tmp_path / "a", "other", overwrite=True)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "other")]


def test_a_file_that_is_there_stays(tmp_path):
    (tmp_path / "a").write_text("mine")
    with pytest.raises(FileExistsError, match=r"a'$"):
        write_whole(tmp_path / "a", "text")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("before", [None, "old"])
def test_on_a_full_disk_nothing_changes(tmp_path, before):
    path = tmp_path / "a"
    if before:
        path.write_text(before)
    with files_of_at_most(10), pytest.raises(OSError, match="File too large") as caught:
        write_whole(path, "much too long", overwrite=True)
    assert caught.value.filename == str(path)
    assert [file.read_text() for file in tmp_path.iterdir()] == ([before] if before else [])
