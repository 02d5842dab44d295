import json

import pytest

from configs.files import json_lines, last_lines, write_json


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    with pytest.raises(ValueError, match="Out of range"):
        write_json(path, {"new": float("nan")})
    assert json.loads(path.read_text()) == {"old": 1}
    (tmp_path / "b.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_json(tmp_path / "b.json", {})
    assert sorted(tmp_path.iterdir()) == [path, tmp_path / "b.json"]


def test_the_end_of_a_large_binary_log_is_read(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"\xff\x00" * 100_000 + b"\nlast\n")
    assert last_lines(log)[-1] == "last"
    assert last_lines(tmp_path / "none") == []
    assert json_lines(tmp_path / "none") == []
