import numpy as np
import pytest

from dataset.pipeline import parts
from dataset.pipeline.parts import NAMES, Facts

FACTS = Facts(
    number=3,
    consumed_bytes=99,
    text_bytes=[30, 10],
    tokens=7,
    empty=1,
    num_bad=2,
    bad=[(0, 5, "not JSON"), (1, 2, "no key 'text'")],
    seconds={"parse": 0.5, "encode": 1.5},
)


def encoded(*ids, dtype=np.uint16):
    lengths = np.array([len(ids) - 1, 1], np.int32)
    return lengths, np.array([2], np.int32), np.array(ids, dtype)


KEYS = [encoded(1, 2, 300), encoded(4, 5, 6, 70_000, dtype=np.int32)]


@pytest.fixture
def path(tmp_path):
    parts.write(tmp_path, FACTS, KEYS)
    return parts.path_of(tmp_path, 3)


def arrays(path):
    return [parts.read(path, name, key) for key in range(2) for name in NAMES]


def test_a_part_that_is_not_written_to_its_end_never_has_its_name(tmp_path, monkeypatch):
    def die(file, **_arrays):
        file.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(parts.np, "savez", die)
    with pytest.raises(KeyboardInterrupt):
        parts.write(tmp_path, FACTS, KEYS)
    assert not parts.path_of(tmp_path, 3).exists()
    assert list(tmp_path.glob(f"*{parts.ENDING}")) == []


def test_a_part_comes_back_as_it_was_written(path):
    assert parts.finished(path.parent) == {3: FACTS}
    expected = [array for key in KEYS for array in key]
    for found, wanted in zip(arrays(path), expected, strict=True):
        assert found.dtype == wanted.dtype
        assert found.tolist() == wanted.tolist()
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("kept", [0, 1, 100, -1])
def test_a_part_that_was_cut_off_is_as_good_as_not_there(path, kept):
    path.write_bytes(path.read_bytes()[:kept])
    assert parts.finished(path.parent) == {}


def test_no_flipped_bit_is_ever_read_as_contents(path):
    """Such a part is dropped; only bits that no reader looks at leave it as it is."""
    raw, before = path.read_bytes(), arrays(path)
    num_dropped, first = 0, raw.index(b"PK\1\2")
    # The directory at the end can hide arrays; what is before it has checksums.
    positions = [*range(0, first, 13), *range(first, len(raw), 3)]
    for position in positions:
        damaged = bytearray(raw)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        found = parts.finished(path.parent)
        num_dropped += not found
        if found:
            assert found == {3: FACTS}
            assert all(a.tolist() == b.tolist() for a, b in zip(arrays(path), before, strict=True))
    assert num_dropped > len(positions) // 2


def test_a_part_under_another_number_is_none(path):
    path.rename(parts.path_of(path.parent, 4))
    assert parts.finished(path.parent) == {}


def test_a_file_of_another_kind_is_none(path):
    path.write_bytes(b'{"number": 3}\n' + bytes(100))
    assert parts.finished(path.parent) == {}
