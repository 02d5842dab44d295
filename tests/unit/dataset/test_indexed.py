import warnings

import numpy as np
import pytest

from dataset import indexed
from dataset.errors import DatasetError

EOD = 0
DOCUMENTS = [[5, 6, 7], [], [8], [9, 10]]


@pytest.fixture
def prefix(tmp_path):
    prefix = tmp_path / "tiny.v1_text_document"
    indexed.write(prefix, DOCUMENTS, EOD, vocab_size=300)
    return prefix


def megatron_dataset(prefix):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        return IndexedDataset(str(prefix))


def test_a_documents_length_counts_its_end_of_document(prefix):
    assert indexed.read(prefix).lengths.tolist() == [4, 2, 3]


def test_megatron_reads_each_document_closed_and_nothing_of_its_neighbours(prefix):
    dataset = megatron_dataset(prefix)
    assert [dataset[n].tolist() for n in range(len(dataset))] == [[5, 6, 7, 0], [8, 0], [9, 10, 0]]
    assert dataset.document_indices.tolist() == [0, 1, 2, 3]


def test_our_reader_agrees_with_megatrons(prefix):
    dataset, index = megatron_dataset(prefix), indexed.read(prefix)
    for n in range(index.num_documents):
        np.testing.assert_array_equal(index.document(n), dataset[n])


def test_without_end_of_document_in_the_length_documents_shift(prefix):
    # What lengths without it do: every later document begins too early.
    builder_class, dtype_of = indexed._megatron()
    builder = builder_class(str(indexed.bin_path(prefix)), dtype=dtype_of(300))
    for ids in filter(None, DOCUMENTS):
        builder.add_document([*ids, EOD], [len(ids)])
    builder.finalize(str(indexed.idx_path(prefix)))
    dataset = megatron_dataset(prefix)
    assert [dataset[n].tolist() for n in range(3)] == [[5, 6, 7], [0], [8, 0]]


def test_counts_leave_empty_documents_out(tmp_path):
    assert indexed.write(tmp_path / "x", DOCUMENTS, EOD, 300) == indexed.Counts(3, 9)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_499, np.uint16), (65_500, np.int32)])
def test_ids_take_two_bytes_while_they_fit(tmp_path, vocab_size, dtype):
    indexed.write(tmp_path / "x", [[vocab_size - 1]], EOD, vocab_size)
    ids = indexed.read(tmp_path / "x").ids
    assert ids.dtype == dtype
    assert ids.tolist() == [vocab_size - 1, EOD]


def test_a_pair_of_no_documents_can_be_read(tmp_path):
    indexed.write(tmp_path / "x", [], EOD, 300)
    assert indexed.read(tmp_path / "x").num_documents == 0


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
        (lambda p: overwrite(indexed.idx_path(p), 9, b"\x02"), "version 2"),
        (lambda p: overwrite(indexed.idx_path(p), 17, b"\x07"), "id type 7"),
        (lambda p: overwrite(indexed.idx_path(p), 18, b"\x09"), "its size is not its header's"),
        (lambda p: indexed.bin_path(p).write_bytes(b"123"), "no multiple of 2"),
    ],
)
def test_damage_is_named(prefix, damage, message):
    damage(prefix)
    with pytest.raises(DatasetError, match=message):
        indexed.read(prefix)
