import os
import subprocess
import sys

import pytest

from dataset.errors import DatasetError
from dataset.readers import inputs


@pytest.fixture
def folder(tmp_path):
    for name in ("b.jsonl", "a.JSON.gz", "c [1].txt", "d.parquet", "e.dat", "f.parquet.xz"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "deep").mkdir()
    (tmp_path / "same.jsonl").symlink_to("b.jsonl")
    (tmp_path / "nowhere.txt").symlink_to("gone")
    (tmp_path / "round.txt").symlink_to("round.txt")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "deep" / "g.txt.zst").write_bytes(b"xy")
    return tmp_path


def test_globs_give_files_by_name_and_arguments_keep_their_order(folder):
    found = inputs.find([f"{folder}/d*", f"{folder}/[ab].*", f"{folder}/**/*.zst"])
    assert [file.path.name for file in found] == ["d.parquet", "a.JSON.gz", "b.jsonl", "g.txt.zst"]
    assert [(file.kind, file.compression) for file in found] == [
        ("parquet", ""), ("jsonl", ".gz"), ("jsonl", ""), ("text", ".zst"),
    ]  # fmt: skip
    assert found[3].size_bytes == 2


def test_a_name_with_brackets_is_a_name(folder):
    (found,) = inputs.find([f"{folder}/c [1].txt"])
    assert found.path.name == "c [1].txt"


def test_the_kind_can_be_given(folder):
    (found,) = inputs.find([f"{folder}/e.dat"], "text")
    assert found.kind == "text"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["x*.jsonl"], r"x\*.jsonl: no such file"),
        (["deep"], r"a folder; give its files: '.*/deep/\*.jsonl'"),
        (["b.jsonl", "*.jsonl"], "b.jsonl was given before"),
        (["b.jsonl", "same.jsonl"], "same.jsonl was given before as .*/b.jsonl: name it once"),
        (["nowhere.txt"], "nowhere.txt: (no such file|leads to no file)"),
        (["round.txt"], "round.txt: (no such file|leads to no file)"),
        (["pipe.jsonl"], "pipe.jsonl: a pipe or device, but input is read more than once"),
        (["e.dat"], "ends in none of .jsonl.*give --input-format"),
        (["f.parquet.xz"], "unpack the .xz"),
    ],
)
def test_what_cannot_be_read_is_named(folder, names, message):
    with pytest.raises(DatasetError, match=message):
        inputs.find([f"{folder}/{name}" for name in names])


def test_a_file_that_may_not_be_read_is_named_before_any_is(folder):
    (folder / "b.jsonl").chmod(0)
    program = f"from dataset.readers import inputs; inputs.find([{str(folder / '[ab].*')!r}])"
    # Root may read everything unless it lays that down.
    drop = "-dac_override,-dac_read_search"
    as_user = (
        ["setpriv", f"--bounding-set={drop}", f"--inh-caps={drop}"] if os.getuid() == 0 else []
    )
    done = subprocess.run(
        [*as_user, sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert f"{folder}/b.jsonl: you may not read it" in done.stderr
