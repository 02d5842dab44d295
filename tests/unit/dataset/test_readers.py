import gzip
import json
import lzma
import os
import subprocess
import sys

import pyarrow as pa
import pytest
from pyarrow import parquet

from dataset import readers
from dataset.files import DatasetError
from dataset.readers import MAX_DOCUMENT_BYTES, Reading, Record, blocks, parse

TEXTS = [f"text number {n}, é東\nsecond line {'x' * n}" for n in range(30)]


def read(*paths, size=100, keys=("text",), **options):
    reading = Reading(
        readers.find([str(path) for path in paths]), keys, block_bytes=size, **options
    )
    whole = list(blocks(reading))
    assert list(blocks(reading)) == whole  # parts of an earlier run are known by their number
    return [(raw[1], parse(*raw[1:], keys)) for block in whole for raw in block.raw]


def texts(found, key="text"):
    return [record.texts[key][0] for _, record in found if isinstance(record, Record)]


def bad(found):
    return [(line, reason) for line, reason in found if isinstance(reason, str)]


def lines(some=TEXTS):
    return "".join(json.dumps({"text": text}) + "\n" for text in some).encode()


def zstandard(data):
    return pa.Codec("zstd").compress(data, asbytes=True)


@pytest.mark.parametrize(
    ("ending", "pack"),
    [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress), (".zst", zstandard)],
)
def test_json_lines_come_whole_however_packed(tmp_path, ending, pack):
    path = tmp_path / f"x.jsonl{ending}"
    path.write_bytes(pack(lines()) + pack(lines(["last"])))  # packed in two goes
    found = read(path)
    assert texts(found) == [*TEXTS, "last"]
    assert [line for line, _ in found] == list(range(1, 32))


OBJECTS = [{"text": text, "of": [{"page": 1}, {"page": 2}]} for text in TEXTS]
A_LINE = [json.dumps(one) for one in OBJECTS]
ARRAYS = {
    "an object a line": "[\n" + ",\n".join(A_LINE) + "\n]\n",
    "a comma too many": "[\n" + "".join(f"{one},\n" for one in A_LINE) + "]\n",
    "commas first": "[ " + "\n, ".join(A_LINE) + "\n]",
    "no bracket": "".join(f"{one},\n" for one in A_LINE),
    "one line": json.dumps(OBJECTS),
    "pretty": json.dumps(OBJECTS, indent=2, ensure_ascii=False),
    "pretty without an array": "\n".join(json.dumps(one, indent=2) for one in OBJECTS),
    "an array a line": "".join(f"[{one}]\n" for one in A_LINE),
}


@pytest.mark.parametrize("form", ARRAYS)
@pytest.mark.parametrize("write", [
    str.encode,
    lambda text: b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(),
])  # fmt: skip
def test_every_document_of_an_array_is_read_however_it_is_written(tmp_path, form, write):
    data = write(ARRAYS[form])
    (tmp_path / "x.json").write_bytes(data)
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(data))
    for path in (tmp_path / "x.json", tmp_path / "x.json.gz"):
        found = read(path)
        assert (texts(found), bad(found)) == (TEXTS, [])
        wanted = [number for number, line in enumerate(data.splitlines(), 1) if b'"text"' in line]
        if len(wanted) == len(TEXTS):
            assert [line + ("pretty" in form) for line, _ in found] == wanted


@pytest.mark.parametrize("read_bytes", [3, 7, 50, 10_000])
@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ('{"text": "b",', "not JSON: Expecting property name"),
        ('{"text": "b"', "not JSON: Expecting ',' delimiter"),
        ('{"text": "b},', "not JSON: Unterminated string"),
        ('{"text": "a "quoted" word"},', "not JSON: Expecting ',' delimiter"),
        ("and so on", "not JSON: Expecting value"),
        ('"b",', "not an object but str"),
        ("17,", "not an object but int"),
        ('{"text": "\udcff"},', "not UTF-8: invalid start byte"),
    ],
)
def test_what_is_no_document_in_an_array_takes_no_other_with_it(
    tmp_path, monkeypatch, second, reason, read_bytes
):
    monkeypatch.setattr("dataset.readers.READ_BYTES", read_bytes)
    text = f'[\n{{"text": "a"}},\n{second}\n{{"text": "c"}},\n{{"text": "d"}}\n]\n'
    (tmp_path / "x.json").write_bytes(text.encode(errors="surrogateescape"))
    found = read(tmp_path / "x.json")
    assert texts(found) == ["a", "c", "d"]
    ((line, said),) = bad(found)
    assert (line, said[: len(reason)]) == (3, reason)


def test_an_array_that_was_cut_off_gives_what_is_whole(tmp_path):
    (tmp_path / "x.json").write_text('[{"text": "a"}, {"text": "b b"}, {"text": "c')
    found = read(tmp_path / "x.json")
    assert texts(found) == ["a", "b b"]
    assert [line for line, _ in bad(found)] == [1]


def test_no_more_of_an_array_is_held_than_a_few_documents(tmp_path, monkeypatch):
    """A file of many times the largest document that is allowed is read to its end."""
    monkeypatch.setattr("dataset.readers.MAX_DOCUMENT_BYTES", 300)
    monkeypatch.setattr("dataset.readers.READ_BYTES", 100)
    (tmp_path / "x.json").write_text(json.dumps(OBJECTS * 20))
    assert texts(read(tmp_path / "x.json")) == TEXTS * 20
    (tmp_path / "x.json").write_text(json.dumps([*OBJECTS, {"text": "x" * 2000}]))
    with pytest.raises(DatasetError, match=r"x.json:1: a value of over"):
        read(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"id": 7, "body": "of a\ntext " * 30, "note": "x"},
         "no key 'text'; it has id, body, note (body: of a text of a text of"),
        ({"data": {"text": "inner"}, "id": 0},
         'no key \'text\'; it has data, id (data: {"text": "inner"}), whose text is inside'),
        ({f"k{n}": "x" for n in range(99)}, "k10, k11, ... (k0: x)"),
        ({"\x1b[2J": "\x1b[2J"}, "it has ?[2J (?[2J: ?[2J)"),
        ({"id": "a1", "messages": [{"content": "what is it?"}]}, "(messages: [{"),
        ({}, "no key 'text'; it has nothing"),
    ],
)  # fmt: skip
def test_without_the_key_those_that_are_there_are_named(tmp_path, fields, words):
    (tmp_path / "x.jsonl").write_text(json.dumps(fields))
    ((line, reason),) = bad(read(tmp_path / "x.jsonl"))
    assert words in reason
    assert (line, len(reason) < 300, reason.isprintable()) == (1, True, True)


@pytest.mark.parametrize(("ending", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress),
                                              (".zst", zstandard)])  # fmt: skip
@pytest.mark.parametrize("damage", ["cut", "plain"])
def test_a_damaged_packed_file_is_named(tmp_path, ending, pack, damage):
    path = tmp_path / f"x.jsonl{ending}"
    path.write_bytes(pack(lines())[:-9] if damage == "cut" else lines())
    with pytest.raises(DatasetError, match=f"x.jsonl{ending} is cut off or damaged.*get it again"):
        read(path)


def test_small_files_share_a_block_and_large_ones_take_many(tmp_path):
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number:02}.jsonl").write_bytes(lines([text]))
    reading = Reading(readers.find([f"{tmp_path}/*.jsonl"]), block_bytes=1000)
    whole = list(blocks(reading))
    assert 2 <= len(whole) < 10
    assert [block.number for block in whole] == list(range(len(whole)))
    assert whole[-1].consumed_bytes == reading.total_bytes
    assert texts(read(*sorted(tmp_path.iterdir()), size=1000)) == TEXTS


def test_bad_lines_are_counted_where_they_are(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "with a mark"}\r\n\n  \n{"text": }\n[1]\n{"other": "x"}\n'
        b'{"text": 5}\n{"text": "\\ud800"}\n{"text": "\xff"}\n{"text": ["a", "b"]}'
    )
    for size in (1, 40, 1000):
        found = read(path, size=size)
        assert texts(found) == ["with a mark", "a"]
        assert found[-1][1].texts["text"] == ["a", "b"]
        assert [line for line, _ in bad(found)] == [4, 5, 6, 7, 8, 9]
        for (_, reason), words in zip(
            bad(found),
            ["not JSON: Expecting value", "not an object but list", "no key 'text'",
             "'text' is not text but int", "half of a surrogate pair", "not UTF-8"],
            strict=True,
        ):  # fmt: skip
            assert words in reason


@pytest.mark.parametrize(
    "pack",
    [gzip.compress, lzma.compress, zstandard, lambda data: data.decode().encode("utf-16")],
)
def test_a_file_of_which_no_line_could_be_used_is_not_left_out(tmp_path, pack):
    (tmp_path / "x.jsonl").write_bytes(pack(lines()))
    with pytest.raises(DatasetError, match=r"x\.jsonl: packed or UTF-16, but its"):
        read(tmp_path / "x.jsonl")


def test_files_without_text_hold_nothing(tmp_path):
    (tmp_path / "b.jsonl").write_text("")
    (tmp_path / "c.txt").write_text("")
    (tmp_path / "d.txt").write_text(" \n\n\t\n")
    assert read(*sorted(tmp_path.iterdir())) == []


TEXT = "one\r\nstill one\n\n \t\n\ntwo é\n\nthree\nand more"


@pytest.mark.parametrize(
    ("sample_by", "expected"),
    [
        ("document", [(1, TEXT)]),
        ("paragraph", [(1, "one\nstill one"), (6, "two é"), (8, "three\nand more")]),
        (
            "line",
            [(1, "one"), (2, "still one"), (6, "two é"), (8, "three"), (9, "and more")],
        ),
    ],
)
def test_text_is_cut_into_documents_as_asked(tmp_path, sample_by, expected):
    (tmp_path / "x.txt").write_bytes(TEXT.encode())
    for size in (1, 5, 1000):
        found = read(tmp_path / "x.txt", size=size, sample_by=sample_by)
        assert [(line, one.texts["text"][0]) for line, one in found] == expected


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\r\r\n"])
def test_lines_of_a_text_end_as_on_any_system(tmp_path, end):
    (tmp_path / "x.txt").write_bytes(end.join(["one", "more", "", "two", ""]).encode())
    for sample_by, expected in (
        ("paragraph", ["one\nmore", "two"]),
        ("line", ["one", "more", "two"]),
    ):
        assert texts(read(tmp_path / "x.txt", sample_by=sample_by)) == expected


def test_a_document_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("dataset.readers.MAX_DOCUMENT_BYTES", 20)
    (tmp_path / "x.txt").write_text("x" * 21)
    with pytest.raises(DatasetError, match="give --sample-by paragraph or line"):
        read(tmp_path / "x.txt")
    with pytest.raises(DatasetError, match=r"x.txt:1: a line of over"):
        read(tmp_path / "x.txt", size=1, sample_by="line")
    (tmp_path / "x.txt").write_text("\n\nfirst of two\nsecond of two\n")
    with pytest.raises(DatasetError, match=r"x.txt:3: a paragraph of over"):
        read(tmp_path / "x.txt", sample_by="paragraph")
    assert MAX_DOCUMENT_BYTES == 256 << 20


def test_parquet_gives_rows_by_column(tmp_path):
    table = pa.table({"text": [*TEXTS, None], "title": [str(n) for n in range(31)]})
    parquet.write_table(table, tmp_path / "x.parquet", row_group_size=7)
    found = read(tmp_path / "x.parquet", size=300, keys=("text", "title"))
    assert texts(found) == TEXTS
    assert texts(found, "title") == [str(n) for n in range(30)]
    assert bad(found) == [(31, "'text' is not text but NoneType")]


def test_parquet_without_the_column_or_not_parquet_is_named(tmp_path):
    parquet.write_table(pa.table({"body": ["x"]}), tmp_path / "x.parquet")
    with pytest.raises(DatasetError, match="no column 'text'; it has body: give --json-keys"):
        read(tmp_path / "x.parquet")
    (tmp_path / "y.parquet").write_text("no")
    with pytest.raises(DatasetError, match=r"y.parquet is damaged or not Parquet"):
        read(tmp_path / "y.parquet")


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
    found = readers.find([f"{folder}/d*", f"{folder}/[ab].*", f"{folder}/**/*.zst"])
    assert [file.path.name for file in found] == ["d.parquet", "a.JSON.gz", "b.jsonl", "g.txt.zst"]
    assert [(file.kind, file.compression) for file in found] == [
        ("parquet", ""), ("jsonl", ".gz"), ("jsonl", ""), ("text", ".zst"),
    ]  # fmt: skip
    assert found[3].size_bytes == 2


def test_a_name_with_brackets_is_a_name(folder):
    (found,) = readers.find([f"{folder}/c [1].txt"])
    assert found.path.name == "c [1].txt"


def test_the_kind_can_be_given(folder):
    (found,) = readers.find([f"{folder}/e.dat"], "text")
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
        readers.find([f"{folder}/{name}" for name in names])


def test_a_file_that_may_not_be_read_is_named_before_any_is(folder):
    (folder / "b.jsonl").chmod(0)
    program = f"from dataset import readers; readers.find([{str(folder / '[ab].*')!r}])"
    # Root may read everything unless it lays that down.
    drop = "-dac_override,-dac_read_search"
    as_user = (
        ["setpriv", f"--bounding-set={drop}", f"--inh-caps={drop}"] if os.getuid() == 0 else []
    )
    done = subprocess.run(
        [*as_user, sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert f"{folder}/b.jsonl: you may not read it" in done.stderr
