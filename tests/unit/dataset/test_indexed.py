import hashlib
import warnings

import numpy as np
import pytest

from dataset import indexed
from dataset.files import DatasetError

EOD = 0
DOCUMENTS = [np.array(ids, np.uint32) for ids in ([5, 6, 7], [], [8], [9, 10])]


@pytest.fixture
def prefix(tmp_path):
    prefix = tmp_path / "tiny.v1_text_document"
    indexed.write(prefix, DOCUMENTS, EOD, vocab_size=300)
    return prefix


def megatron():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset

        return indexed_dataset


def sha256(prefix):
    return [
        hashlib.sha256(path_of(prefix).read_bytes()).hexdigest()
        for path_of in (indexed.bin_path, indexed.idx_path)
    ]


@pytest.mark.parametrize("vocab_size", [300, 65_499, 65_500])
def test_the_bytes_are_those_of_megatrons_builder(tmp_path, vocab_size):
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, vocab_size, size) for size in rng.integers(1, 40, 200)]
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    indexed.write(ours, documents, EOD, vocab_size)
    builder = megatron().IndexedDatasetBuilder(
        str(indexed.bin_path(theirs)), dtype=megatron().DType.optimal_dtype(vocab_size)
    )
    for ids in documents:
        closed = [*ids.tolist(), EOD]
        builder.add_document(closed, [len(closed)])
    builder.finalize(str(indexed.idx_path(theirs)))
    assert sha256(ours) == sha256(theirs)


def test_offsets_go_on_past_two_gigabytes(tmp_path):
    size = np.full(3, 2**31 - 1, np.int32)
    indexed.bin_path(tmp_path / "x").write_bytes(b"")
    indexed.write_index(
        indexed.idx_path(tmp_path / "x"),
        np.dtype(np.int32),
        lambda: [size, size],
        lambda: [np.ones_like(size)] * 2,
    )
    offsets = indexed.read(tmp_path / "x").offsets
    assert offsets.tolist() == [4 * n * (2**31 - 1) for n in range(6)]


@pytest.mark.parametrize("path_of", [indexed.bin_path, indexed.idx_path])
def test_a_missing_file_is_named(prefix, path_of):
    path_of(prefix).unlink()
    with pytest.raises(DatasetError, match=f"no .*{path_of(prefix).name}.*without .bin or .idx"):
        indexed.read(prefix)


def overwrite(path, at, content):
    raw = bytearray(path.read_bytes())
    raw[at : at + len(content)] = content
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: indexed.idx_path(p).write_text("text"), "not a Megatron index"),
        (lambda p: overwrite(indexed.idx_path(p), 0, b"XX"), "not a Megatron index"),
        (lambda p: overwrite(indexed.idx_path(p), 9, b"\x02"), "not a Megatron index"),
        (lambda p: overwrite(indexed.idx_path(p), 17, b"\x07"), "not a Megatron index"),
        (lambda p: overwrite(indexed.idx_path(p), 18, b"\x09"), "bytes, its header says"),
        (lambda p: indexed.bin_path(p).write_bytes(b"123"), "no multiple of 2"),
    ],
)
def test_damage_is_named(prefix, damage, message):
    damage(prefix)
    with pytest.raises(DatasetError, match=message):
        indexed.read(prefix)
