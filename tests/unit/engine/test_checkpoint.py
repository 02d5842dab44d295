"""Files that are filled while their tensors change."""

import errno
import fcntl
import io
import itertools
import mmap
import os
import threading

import pytest
import torch

from deep_optimizer_states.core import checkpoint
from deep_optimizer_states.core.checkpoint import (
    BackgroundSave,
    Stage,
    unfinished,
    write_skeleton,
)
from deep_optimizer_states.errors import CheckpointError

LIMIT_S = 60
NUMEL = 1000
TILE = 250


@pytest.fixture
def state():
    """Master weights and two moments, one of them a part of a larger storage."""
    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(NUMEL + 24, generator=generator)
    return [
        torch.randn(NUMEL, generator=generator),
        whole[8 : NUMEL + 8],
        torch.randn(NUMEL, generator=generator).bfloat16(),
    ]


def tiles_of(state):
    return [[one[at : at + TILE] for one in state] for at in range(0, NUMEL, TILE)]


def content_of(state):
    masters, exp_avg, exp_avg_sq = state
    moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "step": 3}
    weights = masters.bfloat16()
    return {
        "masters": [masters],
        0: moments,
        "again": masters[10:20],
        "weights": weights,
        "at": "x",
    }


def bytes_of(path):
    """What was saved there, saved anew: equal bytes for equal structure, types, sharing, bits."""
    buffer = io.BytesIO()
    torch.save(torch.load(path), buffer)
    return buffer.getvalue()


@pytest.fixture
def expected(state, tmp_path):
    """The bytes of what ``torch.save`` writes."""
    torch.save(content_of(state), tmp_path / "expected.pt")
    return bytes_of(tmp_path / "expected.pt")


@pytest.fixture
def may_write(monkeypatch):
    """No byte of state is written by the save's own thread before this is set."""
    latch, go_on = threading.Event(), BackgroundSave._fill

    def wait_and_go_on(save, beat):
        assert latch.wait(LIMIT_S)
        go_on(save, beat)

    monkeypatch.setattr(BackgroundSave, "_fill", wait_and_go_on)
    yield latch
    latch.set()


def begin(state, path, memory_bytes=10**6, order=range(4), content=None):
    """Return a save that is under way, and the list that its stage is added to when it is over."""
    save, ended = BackgroundSave(tiles_of(state), order, memory_bytes), []
    save.add(content or content_of(state), path)
    save.start(lambda: ended.append(save.stage))
    return save, ended


def overwrite(state, tile):
    for one in state:
        one[tile * TILE : (tile + 1) * TILE] = float("nan")


def test_a_skeleton_has_everything_but_the_bytes(state, tmp_path):
    content, path = content_of(state), tmp_path / "file.pt"
    records = write_skeleton(content, path)
    sizes = [storage.nbytes() for _, storage in records]
    # The slice of the masters is of the same storage; the storage of one moment is longer than it.
    assert sizes == [4 * NUMEL, 4 * (NUMEL + 24), 2 * NUMEL, 2 * NUMEL]
    found = torch.load(path)
    assert (found["at"], found[0]["step"]) == ("x", 3)
    assert not found["masters"][0].any()


def test_an_unknown_layout_is_refused(state, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_storages_in_order", lambda content: [])
    with pytest.raises(CheckpointError, match="numbers 4 storages"):
        write_skeleton(content_of(state), tmp_path / "file.pt")


def test_files_that_nobody_disturbs_are_those_of_torch_save(state, tmp_path, expected):
    save, ended = begin(state, tmp_path / "file.pt")
    save.wait()
    assert ended == [Stage.FILLED]
    assert (save.copied_bytes, save.written_first_bytes) == (0, 0)
    assert bytes_of(unfinished(tmp_path / "file.pt")) == expected
    assert torch.load(unfinished(tmp_path / "file.pt"), mmap=True)["at"] == "x"


@pytest.mark.parametrize("chunk_bytes", [64, 2**24])
@pytest.mark.parametrize("memory_bytes", [0, 3000, 10**6])
def test_what_an_update_overwrites_is_kept(  # noqa: PLR0913 - fixtures
    state, tmp_path, expected, may_write, monkeypatch, memory_bytes, chunk_bytes
):
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", chunk_bytes)
    save, _ = begin(state, tmp_path / "file.pt", memory_bytes)
    for tile in (2, 0):
        save.release(tile)
        overwrite(state, tile)
    assert save.peak_bytes <= memory_bytes
    assert save.copied_bytes + save.written_first_bytes == 2 * TILE * 10
    assert (save.copied_bytes == 0) == (memory_bytes == 0)
    assert (save.written_first_bytes == 0) == (memory_bytes == 10**6)
    may_write.set()
    save.wait()
    overwrite(state, 1)
    assert bytes_of(unfinished(tmp_path / "file.pt")) == expected


def test_what_is_overwritten_unasked_is_lost(state, tmp_path, may_write):
    """Negative control of the test above."""
    save, _ = begin(state, tmp_path / "file.pt")
    overwrite(state, 1)
    may_write.set()
    save.wait()
    found = torch.load(unfinished(tmp_path / "file.pt"))
    assert found["masters"][0].isnan().sum() == TILE


def test_what_is_being_written_is_waited_for(state, tmp_path, monkeypatch):
    """An update that overwrites a tile of which a part is on its way to the disk."""
    masters = state[0].clone()
    writing, may_end, pwrite = threading.Event(), threading.Event(), os.pwrite

    def write_slowly(file, data, offset):
        if threading.current_thread() is not threading.main_thread():
            writing.set()
            assert may_end.wait(LIMIT_S)
        return pwrite(file, data, offset)

    monkeypatch.setattr(checkpoint.os, "pwrite", write_slowly)
    save, _ = begin(state, tmp_path / "file.pt", 0, content={"masters": state[0]})
    assert writing.wait(LIMIT_S)
    asking, released = threading.Event(), threading.Event()

    class Asked:
        def __init__(self, lock):
            self.lock = lock

        def __enter__(self):
            asking.set()
            self.lock.acquire()

        def __exit__(self, *_):
            self.lock.release()

    for chunk in save._of_tile[0]:
        chunk.lock = Asked(chunk.lock)

    def release_and_overwrite():
        save.release(0)
        overwrite(state, 0)
        released.set()

    update = threading.Thread(target=release_and_overwrite)
    update.start()
    assert asking.wait(LIMIT_S)
    assert not released.is_set()
    may_end.set()
    update.join(LIMIT_S)
    save.wait()
    assert torch.equal(torch.load(unfinished(tmp_path / "file.pt"))["masters"], masters)


def test_tiles_are_written_in_the_order_of_the_update(state, tmp_path, monkeypatch):
    offsets, pwrite = [], os.pwrite

    def note(file, data, offset):
        offsets.append(offset)
        return pwrite(file, data, offset)

    save = BackgroundSave(tiles_of(state), [3, 1, 0, 2], 0)
    save.add({"masters": state[0]}, tmp_path / "file.pt")
    monkeypatch.setattr(checkpoint.os, "pwrite", note)
    save.start(lambda: None)
    save.wait()
    first = min(offsets)
    tiles = [(offset - first) // (4 * TILE) for offset in offsets]
    assert [tile for tile, _ in itertools.groupby(tiles)] == [3, 1, 0, 2]


def in_pages(tensor, offset=0):
    """Return a copy in fresh pages, so many bytes behind the beginning of one."""
    pages = mmap.mmap(-1, offset + tensor.nbytes)
    return torch.frombuffer(pages, dtype=tensor.dtype, offset=offset).copy_(tensor)


def test_whole_pages_of_state_go_past_the_page_cache(tmp_path, monkeypatch):
    """Their ends do not, nor do tensors that have no pages of their own."""
    numel, tile_numel = 5000, 2064
    masters, other = in_pages(torch.randn(numel)), in_pages(torch.randn(numel), offset=64)
    direct, pwrite = [], os.pwrite

    def note(file, data, offset):
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            direct.append((offset, len(data)))
        return pwrite(file, data, offset)

    tiles = [[masters[:tile_numel]], [masters[tile_numel:]], [other]]
    save = BackgroundSave(tiles, range(3), 0)
    save.add({"masters": masters, "other": other}, tmp_path / "file.pt")
    if save._direct == [-1]:
        pytest.skip("this file system cannot write past the page cache")
    monkeypatch.setattr(checkpoint.os, "pwrite", note)
    save.start(lambda: None)
    save.wait()
    first = direct[0][0]
    assert [(offset - first, size) for offset, size in direct] == [(0, 8192), (12288, 4096)]
    found = torch.load(unfinished(tmp_path / "file.pt"))
    assert torch.equal(found["masters"], masters)
    assert torch.equal(found["other"], other)


def test_a_file_system_that_wants_other_sizes_gets_them(tmp_path, monkeypatch):
    masters, pwrite = in_pages(torch.randn(5000)), os.pwrite

    def refuse_direct(file, data, offset):
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(file, data, offset)

    monkeypatch.setattr(checkpoint.os, "pwrite", refuse_direct)
    save = BackgroundSave([[masters]], [0], 0)
    save.add({"masters": masters}, tmp_path / "file.pt")
    save.start(lambda: None)
    save.wait()
    assert save.stage is Stage.FILLED
    assert torch.equal(torch.load(unfinished(tmp_path / "file.pt"))["masters"], masters)


@pytest.mark.parametrize("by", ["the thread", "the update"])
def test_a_disk_that_is_full_hurts_nobody(state, tmp_path, may_write, monkeypatch, by):
    def fail(*_):
        raise OSError(28, "No space left on device")

    save, ended = begin(state, tmp_path / "file.pt", memory_bytes=2 * NUMEL)
    monkeypatch.setattr(checkpoint.os, "pwrite", fail)
    if by == "the update":
        save.release(0)
    may_write.set()
    save.wait()
    assert "No space" in str(save.failure)
    save.release_all()  # nothing is written, and nobody waits
    assert ended == [Stage.FAILED]
    save.remove_files()
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_failed_closes_no_file_that_somebody_writes(state, tmp_path, may_write):
    """The system would give the number to another file. Nor does it keep copies."""
    save, _ = begin(state, tmp_path / "file.pt")
    save.release(0)
    save.fail(OSError("injected"))
    may_write.set()
    save.wait()
    open_files, chunks = [], [chunk for chunks in save._of_tile.values() for chunk in chunks]
    assert any(chunk.is_copy for chunk in chunks)

    class Asked:
        def __enter__(self):
            open_files.extend(save._files)

        def __exit__(self, *_):
            pass

    for chunk in chunks:
        chunk.lock = Asked()
    save.remove_files()
    assert len(open_files) == len(chunks)
    assert not any(chunk.source.numel() for chunk in [*chunks, *save._copies])


ERRORS = [OSError, MemoryError, RuntimeError, KeyboardInterrupt, SystemExit]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("call", ["pwrite", "fsync", "close"])
def test_whatever_stops_the_thread_fails_the_save(state, tmp_path, monkeypatch, call, error):
    """An error of ``close`` is how a file system on a network says that bytes are lost."""
    (tmp_path / "folder").mkdir()
    real, calling = getattr(os, call), []

    def fail(*args):
        if threading.current_thread() is not threading.main_thread() and not calling:
            calling.append(args)
            raise error("injected")
        return real(*args)

    monkeypatch.setattr(checkpoint.os, call, fail)
    save, ended = begin(state, tmp_path / "folder" / "file.pt", memory_bytes=0)
    save.wait()
    assert calling
    assert ended == [Stage.FAILED]
    assert type(save.failure) is error
    with pytest.raises(CheckpointError):
        save.advance(Stage.AGREED)
    save.remove_files()
    assert list((tmp_path / "folder").iterdir()) == []


@pytest.mark.parametrize("memory_bytes", [0, 10**6])
def test_a_write_that_is_interrupted_is_made_again(
    state, tmp_path, expected, may_write, monkeypatch, memory_bytes
):
    """By Ctrl-C, in the thread that wants to overwrite a tile: it has not, so nothing is lost."""
    save, ended = begin(state, tmp_path / "file.pt", memory_bytes)
    call = "_keep_copy" if memory_bytes else "_write"
    with monkeypatch.context() as patch:

        def interrupted(*_):
            raise KeyboardInterrupt

        patch.setattr(save, "_give_back", lambda size: None)
        patch.setattr(BackgroundSave, call, interrupted)
        with pytest.raises(KeyboardInterrupt):
            save.release(1)
    may_write.set()
    save.wait()
    assert ended == [Stage.FILLED]
    assert bytes_of(unfinished(tmp_path / "file.pt")) == expected


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_what_cannot_be_copied_is_written_first(
    state, tmp_path, expected, may_write, monkeypatch, error
):
    save, ended = begin(state, tmp_path / "file.pt")
    held = save._held_bytes

    def fail(_):
        raise error("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", fail)
        save.release(1)
    overwrite(state, 1)
    assert (save._held_bytes, save.copied_bytes) == (held, 0)
    assert save.written_first_bytes == TILE * 10
    may_write.set()
    save.wait()
    assert ended == [Stage.FILLED]
    assert bytes_of(unfinished(tmp_path / "file.pt")) == expected


def test_a_file_that_another_save_fills_is_left_alone(state, tmp_path):
    unfinished(tmp_path / "file.pt").write_text("another's")
    save = BackgroundSave(tiles_of(state), range(4), 0)
    with pytest.raises(FileExistsError):
        save.add(content_of(state), tmp_path / "file.pt")
    save.remove_files()
    assert unfinished(tmp_path / "file.pt").read_text() == "another's"
