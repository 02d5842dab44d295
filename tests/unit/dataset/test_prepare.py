"""The pipeline in one process: `pool.ordered` is put aside, all else is as it is."""

import json
import shutil

import numpy as np
import pytest
from full_disk import files_of_at_most

from dataset import indexed, manifest, prepare as module, readers
from dataset.files import DatasetError
from dataset.pairs import inspect_pair, merge
from dataset.prepare import (
    ARRAYS,
    BlockEncoder,
    Facts,
    Preparation,
    finished_parts,
    part_path,
    write_part,
)
from dataset.readers import Reading
from dataset.tokenizer import Choice, load

TEXTS = [f"the cat number {n} sat on the mat" for n in range(40)]


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setattr(module, "ordered", lambda work, items, workers: (work(i) for i in items))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"text": t, "title": t[:12]}) + "\n" for t in TEXTS))
    return path


def job(text, output, **options):
    keys, size = options.pop("keys", ("text",)), options.pop("size", 300)
    return Preparation(
        Reading(readers.find([str(text)]), keys, block_bytes=size),
        output,
        options.pop("tokenizer", Choice("train-bpe", vocab_size=290)),
        **{"append_eod": True, **options},
    )


def run(given, **options):
    lines = []
    return module.run(given, lines.append, **options), lines


def documents(prefix):
    index = indexed.read(prefix)
    tokenizer = load(prefix.parent / manifest.find(prefix).tokenizer)
    return [tokenizer.decode(index.document(n).tolist()) for n in range(index.num_documents)]


def contents(prefix):
    return indexed.bin_path(prefix).read_bytes(), indexed.idx_path(prefix).read_bytes()


def test_every_key_gets_a_pair_that_passes_inspection(text, tmp_path):
    done, _ = run(job(text, tmp_path / "out" / "a", keys=("text", "title")))
    first, second = (tmp_path / "out" / f"a_{key}_document" for key in ("text", "title"))
    assert documents(first) == [f"{t}<|endoftext|>" for t in TEXTS]
    assert documents(second) == [f"{t[:12]}<|endoftext|>" for t in TEXTS]
    assert inspect_pair(first).problems == inspect_pair(second).problems == []
    assert [one.documents for one in done.manifests] == [40, 40]
    assert done.manifests[0].text_bytes == sum(map(len, TEXTS))
    assert not (tmp_path / "out" / "a.parts").exists()


def test_part_sizes_do_not_show(text, tmp_path):
    for name, size in (("a", 1), ("b", 500), ("c", 1 << 20)):
        run(job(text, tmp_path / name, size=size))
    wanted = contents(tmp_path / "a_text_document")
    assert contents(tmp_path / "b_text_document") == wanted
    assert contents(tmp_path / "c_text_document") == wanted


def test_sequences_of_a_document_are_kept_apart_and_the_last_one_is_closed(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": ["one cat", "", "two"]}\n{"text": ""}\n{"text": ["three"]}\n')
    done, _ = run(job(path, tmp_path / "a"))
    right = indexed.read(tmp_path / "a_text_document")
    assert right.boundaries.tolist() == [0, 2, 3]
    assert sum(one.empty for one in done.facts) == 1
    closed = [right.ids[at - 1] == 0 for at in right.lengths.cumsum()]
    assert closed == [False, True, True]


def stop_after(monkeypatch, number):
    """Let the worker die after some parts."""
    real, count = BlockEncoder.encode, 0

    def encode(task, block):
        nonlocal count
        count += 1
        if count > number:
            raise KeyboardInterrupt
        return real(task, block)

    monkeypatch.setattr(BlockEncoder, "encode", encode)


def test_finished_parts_are_not_redone_and_damaged_ones_are(text, tmp_path, monkeypatch):
    run(job(text, tmp_path / "whole"))
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            run(job(text, tmp_path / "a"))
    parts = sorted((tmp_path / "a.parts").glob("*.part"))
    assert len(parts) == 5
    raw = bytearray(parts[2].read_bytes())
    raw[raw.index(b"PK\1\2") - 1] ^= 1  # of the last ids: here zip's directory begins
    parts[2].write_bytes(raw)
    _, lines = run(job(text, tmp_path / "a"))
    assert lines[0].startswith("going on: 4 parts")
    assert contents(tmp_path / "a_text_document") == contents(tmp_path / "whole_text_document")


@pytest.mark.parametrize("num_bytes", [100, 1000, 2000, 4000, 10_000, 20_000])
def test_a_full_disk_names_the_file_and_the_same_command_goes_on(text, tmp_path, num_bytes):
    text.write_text(text.read_text() * 30)
    given = job(text, tmp_path / "a", size=2000)
    run(job(text, tmp_path / "whole", size=2000))
    with (
        files_of_at_most(num_bytes),
        pytest.raises(DatasetError, match=rf"{tmp_path}/a.*: File too large: make room"),
    ):
        run(given)
    assert not manifest.path_of(tmp_path / "a_text_document").exists()
    run(given)
    assert contents(tmp_path / "a_text_document") == contents(tmp_path / "whole_text_document")


def test_a_stop_while_joining_is_gone_on_from(text, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(module, "list_bad_lines", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(job(text, tmp_path / "a"))
    for path in (manifest.path_of(tmp_path / "a_text_document"), tmp_path / "manifest.json"):
        path.unlink()
    indexed.idx_path(tmp_path / "a_text_document").write_bytes(b"half")
    done, lines = run(job(text, tmp_path / "a"))
    assert lines[0].startswith(f"going on: {len(done.facts)} parts")
    assert inspect_pair(tmp_path / "a_text_document").problems == []


def test_a_finished_job_is_found_and_other_text_is_not_written_over(text, tmp_path):
    run(job(text, tmp_path / "a"))
    before = contents(tmp_path / "a_text_document")
    assert run(job(text, tmp_path / "a"))[0].facts == []
    text.write_text('{"text": "other"}\n')
    with pytest.raises(DatasetError, match=r"a_text_document.bin is there already"):
        run(job(text, tmp_path / "a"))
    assert contents(tmp_path / "a_text_document") == before


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".tokenizer.json"])
def test_a_finished_job_whose_files_were_damaged_since_is_not_called_finished(
    text, tmp_path, suffix
):
    run(job(text, tmp_path / "a"))
    path = tmp_path / f"a_text_document{suffix}"
    whole = path.read_bytes()
    path.write_bytes(whole[:40] + bytes(9) + whole[49:])
    with pytest.raises(DatasetError, match=f"is damaged: the checksum of {path.name} .* move the"):
        run(job(text, tmp_path / "a"))
    for one in tmp_path.glob("a_text_document.*"):
        one.unlink()
    run(job(text, tmp_path / "a"))
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "change", [lambda path: path.write_text(path.read_text() + "\n"), lambda path: path.unlink()]
)
def test_input_that_changes_while_it_is_read_is_not_published(text, tmp_path, monkeypatch, change):
    content = text.read_text()
    with monkeypatch.context() as patch:
        real = BlockEncoder.encode

        def encode(task, block):
            if block.number == 3:
                change(text)
            return real(task, block)

        patch.setattr(BlockEncoder, "encode", encode)
        with pytest.raises(
            DatasetError, match=r"x.jsonl changed while it was read: delete .*a.parts"
        ):
            run(job(text, tmp_path / "a"))
    assert not list(tmp_path.glob("a_text_document*"))
    text.write_text(content)
    shutil.rmtree(tmp_path / "a.parts")
    run(job(text, tmp_path / "a"))
    assert len(documents(tmp_path / "a_text_document")) == 40


def test_unfinished_work_of_other_options_is_kept_until_it_is_deleted(text, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            run(job(text, tmp_path / "a"))
    other = job(text, tmp_path / "a", append_eod=False)
    with pytest.raises(DatasetError, match=r"append_eod = True then.* or delete that folder"):
        run(other)
    (tmp_path / "a.parts" / "plan.json").write_text("{")
    with pytest.raises(DatasetError, match=r"\(its plan cannot be read\): .*delete that folder"):
        run(other)
    shutil.rmtree(tmp_path / "a.parts")
    run(other)
    assert documents(tmp_path / "a_text_document") == TEXTS


def test_a_strange_file_in_the_work_folder_is_not_deleted(text, tmp_path):
    (tmp_path / "a.parts").mkdir()
    (tmp_path / "a.parts" / "thesis.doc").write_text("mine")
    with pytest.raises(DatasetError, match=r"what is thesis.doc in it"):
        run(job(text, tmp_path / "a"))
    assert (tmp_path / "a.parts" / "thesis.doc").exists()


def test_a_key_without_text_stops_before_anything_is_published(text, tmp_path):
    named = r"no text under 'txt' \(.*x.jsonl:1: no key 'txt'\); it has text, title \(text: the"
    with pytest.raises(DatasetError, match=named):
        run(job(text, tmp_path / "a", keys=("txt",)))
    text.write_text(text.read_text().replace('"title": "', '"title": "", "was": "'))
    with pytest.raises(DatasetError, match="no text under 'title'"):
        run(job(text, tmp_path / "a", keys=("text", "title")))
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]
    run(job(text, tmp_path / "a"))  # the corrected command goes through as it is
    assert documents(tmp_path / "a_text_document")[0] == f"{TEXTS[0]}<|endoftext|>"


def test_work_without_a_finished_part_is_dropped_for_other_options(text, tmp_path, monkeypatch):
    with monkeypatch.context() as patches:
        patches.setattr(module, "load", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(job(text, tmp_path / "a", tokenizer=Choice("train-bpe", vocab_size=280)))
    assert (tmp_path / "a.parts" / "plan.json").exists()
    run(job(text, tmp_path / "a"))
    assert inspect_pair(tmp_path / "a_text_document").problems == []


def interrupted(*_):
    raise KeyboardInterrupt


def test_a_tokenizer_that_cannot_be_had_leaves_no_work_behind(text, tmp_path):
    wrong = tmp_path / "vocab.json"
    wrong.write_text("{}")
    with pytest.raises(DatasetError, match="are no vocabulary with its merges"):
        run(job(text, tmp_path / "a", tokenizer=Choice("gpt2-bpe", wrong, wrong)))
    with pytest.raises(DatasetError, match="vocab_size = 5: at least 257"):
        run(job(text, tmp_path / "a", tokenizer=Choice("train-bpe", vocab_size=5)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vocab.json", "x.jsonl"]


@pytest.mark.parametrize("line", ['{"txt": "the cat"}', "no JSON", '{"text": ""}'])
def test_input_without_text_is_the_fault_that_is_told_before_its_vocabulary(text, tmp_path, line):
    """Of nothing a vocabulary of single bytes was learnt, which was not that of the folder."""
    run(job(text, tmp_path / "a"))
    before = sorted(tmp_path.iterdir())
    text.write_text(f"{line}\n")
    with pytest.raises(DatasetError, match="the input holds no text under 'text'"):
        run(job(text, tmp_path / "b"))
    assert sorted(tmp_path.iterdir()) == before


def test_what_a_folder_has_no_room_for_leaves_no_work_behind(text, tmp_path):
    run(job(text, tmp_path / "a"))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DatasetError, match="data of another vocabulary"):
        run(job(text, tmp_path / "b", tokenizer=Choice("train-bpe", vocab_size=280)))
    assert sorted(tmp_path.iterdir()) == before


def test_a_vocabulary_smaller_than_asked_for_is_said(text, tmp_path):
    few, many = (Choice("train-bpe", vocab_size=size) for size in (290, 5000))
    assert not any("asked for" in line for line in run(job(text, tmp_path / "a", tokenizer=few))[1])
    lines = run(job(text, tmp_path / "new" / "b", tokenizer=many))[1]
    assert any("entries, of 5,000 asked for" in line for line in lines)


def test_a_folder_has_one_vocabulary(text, tmp_path):
    run(job(text, tmp_path / "a"))
    with pytest.raises(DatasetError, match=r"data of another vocabulary \(290 entries"):
        run(job(text, tmp_path / "b", tokenizer=Choice("train-bpe", vocab_size=280)))


def test_a_manifest_of_something_else_is_left_alone(text, tmp_path):
    (tmp_path / "manifest.json").write_text('{"name": "my web page"}')
    with pytest.raises(DatasetError, match=r"manifest.json: .*field 'key' is missing.*of its own"):
        run(job(text, tmp_path / "a"))
    assert (tmp_path / "manifest.json").read_text() == '{"name": "my web page"}'


FACTS = Facts(
    number=3,
    consumed_bytes=99,
    text_bytes=[30, 10],
    tokens=7,
    empty=1,
    num_bad=2,
    bad=[(0, 5, "not JSON"), (1, 2, "no key 'text'")],
    of_files=[(0, 9, 1), (1, 2, 1)],
)


def encoded(*ids, dtype=np.uint16):
    lengths = np.array([len(ids) - 1, 1], np.int32)
    return lengths, np.array([2], np.int32), np.array(ids, dtype)


KEYS = [encoded(1, 2, 300), encoded(4, 5, 6, 70_000, dtype=np.int32)]


@pytest.fixture
def path(tmp_path):
    write_part(tmp_path, FACTS, KEYS)
    return part_path(tmp_path, 3)


def arrays(path):
    return [module._read_part(path, name, key) for key in range(2) for name in ARRAYS]


def test_a_part_that_is_not_written_to_its_end_never_has_its_name(tmp_path, monkeypatch):
    def die(file, **_arrays):
        file.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(module.np, "savez", die)
    with pytest.raises(KeyboardInterrupt):
        write_part(tmp_path, FACTS, KEYS)
    assert not part_path(tmp_path, 3).exists()
    assert list(tmp_path.glob(f"*{module.PART}")) == []


def test_a_part_comes_back_as_it_was_written(path):
    assert finished_parts(path.parent) == {3: FACTS}
    expected = [array for key in KEYS for array in key]
    for found, wanted in zip(arrays(path), expected, strict=True):
        assert found.dtype == wanted.dtype
        assert found.tolist() == wanted.tolist()
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("kept", [0, 1, 100, -1])
def test_a_part_that_was_cut_off_is_as_good_as_not_there(path, kept):
    path.write_bytes(path.read_bytes()[:kept])
    assert finished_parts(path.parent) == {}


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
        found = finished_parts(path.parent)
        num_dropped += not found
        if found:
            assert found == {3: FACTS}
            assert all(a.tolist() == b.tolist() for a, b in zip(arrays(path), before, strict=True))
    assert num_dropped > len(positions) // 2


def test_merged_pairs_hold_all_documents_in_order(text, tmp_path):
    run(job(text, tmp_path / "a"))
    prefix = tmp_path / "a_text_document"
    counts = merge([prefix, prefix], tmp_path / "merged")
    assert documents(tmp_path / "merged") == documents(prefix) * 2
    assert counts.documents == 80
    assert inspect_pair(tmp_path / "merged").problems == []
    with pytest.raises(DatasetError, match=r"merged.bin is there already"):
        merge([prefix, prefix], tmp_path / "merged")


def test_a_damaged_pair_is_not_merged(text, tmp_path):
    for name in "ab":
        run(job(text, tmp_path / name))
    first, second = (tmp_path / f"{name}_text_document" for name in "ab")
    with indexed.bin_path(second).open("r+b") as file:
        file.seek(20)
        file.write(b"\1\1\1")
    with pytest.raises(DatasetError, match=r"b_text_document is damaged: the checksum of b_text_"):
        merge([first, second], tmp_path / "m")
    assert not list(tmp_path.glob("*m.*"))


def test_cut_off_and_strange_pairs_are_not_merged(text, tmp_path):
    run(job(text, tmp_path / "a"))
    first, short = tmp_path / "a_text_document", tmp_path / "short"
    for path_of in (indexed.bin_path, indexed.idx_path):
        path_of(short).write_bytes(path_of(first).read_bytes())
    with indexed.bin_path(short).open("ab") as file:
        file.write(bytes(2))
    with pytest.raises(DatasetError, match="short: the index counts"):
        merge([first, short], tmp_path / "m")
    indexed.write(tmp_path / "wide", [[1, 2]], 0, 70_000)
    with pytest.raises(DatasetError, match="ids of 4 bytes"):
        merge([first, tmp_path / "wide"], tmp_path / "m")
    run(job(text, tmp_path / "other" / "a", tokenizer=Choice("train-bpe", vocab_size=280)))
    with pytest.raises(DatasetError, match="different vocabularies"):
        merge([first, tmp_path / "other" / "a_text_document"], tmp_path / "m")
    assert not list(tmp_path.glob("*m.*"))
