import gzip
import json
import random
from collections import Counter

import pytest
from full_disk import files_of_at_most

from dataset import readers
from dataset.files import DatasetError
from dataset.shuffling import shuffle


def write(tmp_path, num_lines, name="in.jsonl"):
    rng = random.Random(1)
    lines = [json.dumps({"id": n, "text": "ü" * rng.randrange(50)}) for n in range(num_lines)]
    (tmp_path / name).write_text("\n".join(lines))
    return lines


def shuffled(tmp_path, seed=3, name="out.jsonl", pattern="in.*"):
    output = tmp_path / name
    num = shuffle(readers.find([str(tmp_path / pattern)]), output, seed)
    text = gzip.decompress(output.read_bytes()) if name.endswith("gz") else output.read_bytes()
    lines = text.decode().splitlines()
    assert len(lines) == num
    output.unlink()
    assert not [path for path in tmp_path.iterdir() if "unfinished" in path.name]
    return lines


def test_every_line_comes_once_in_an_order_that_the_seed_decides(tmp_path):
    lines = write(tmp_path, 500)
    first = shuffled(tmp_path)
    assert Counter(first) == Counter(lines)
    assert first != lines
    assert shuffled(tmp_path) == first
    assert shuffled(tmp_path, seed=4) != first


def test_packing_does_not_change_the_order_and_equal_runs_give_equal_files(tmp_path):
    lines = write(tmp_path, 200)
    first = shuffled(tmp_path)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    assert shuffled(tmp_path, pattern="packed*", name="out.jsonl.gz") == first
    files = readers.find([str(tmp_path / "in.jsonl")])
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        shuffle(files, tmp_path / name, 1)
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


def test_several_piles_hold_every_line_once_and_a_seed_decides_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr("dataset.shuffling.PILE_BYTES", 1000)
    lines = write(tmp_path, 500)
    first = shuffled(tmp_path)
    assert Counter(first) == Counter(lines)
    assert shuffled(tmp_path) == first
    assert shuffled(tmp_path, seed=4) != first


def test_every_order_of_three_lines_is_as_likely(tmp_path):
    (tmp_path / "in.jsonl").write_text("1\n2\n3\n")
    orders = Counter("".join(shuffled(tmp_path, seed)) for seed in range(120))
    assert len(orders) == 6
    assert min(orders.values()) > 10


def test_lines_of_text_stay_lines_of_text(tmp_path):
    (tmp_path / "in.txt").write_bytes("\ufeffa\r\n\n b \nc".encode())
    assert sorted(shuffled(tmp_path, name="out.txt")) == [" b ", "a", "c"]


@pytest.mark.parametrize(
    ("name", "content", "output", "message"),
    [
        ("in.parquet", b"x", "o.jsonl", "shuffle takes JSON lines alone or"),
        ("in.jsonl", b"{}", "in.jsonl", "in.jsonl is there already"),
        ("in.jsonl.gz", b"{}", "o.jsonl", "in.jsonl.gz is cut off or damaged"),
    ],
)
def test_what_cannot_be_shuffled_is_refused_and_leaves_nothing(
    tmp_path, name, content, output, message
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=message):
        shuffle(readers.find([str(tmp_path / name)]), tmp_path / output, 1)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_full_disk_leaves_nothing_and_a_killed_run_nothing_in_the_way(tmp_path):
    write(tmp_path, 200)
    with files_of_at_most(500), pytest.raises(DatasetError, match="make room and run the same"):
        shuffled(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
    first = shuffled(tmp_path)
    folder = tmp_path / ".unfinished-out.jsonl.piles"
    folder.mkdir()
    for number in (0, 77):
        (folder / f"{number}.pile").write_bytes(b"left by a killed run")
    assert shuffled(tmp_path) == first
