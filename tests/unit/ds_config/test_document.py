"""Files as guides print them are read, and each place that is no JSON is named by its line."""

import contextlib
import json

import pytest
from hypothesis import given, settings, strategies as st
from in_process import explain_or_advise

from ds_config.document import read_config
from ds_config.lenient import Placeholder, Reader, UnreadableError

TEXTS = st.sampled_from(
    ["", "a|b", "//x", "#", "<N>", "auto", "a: b", "...", "'", '"', "\\", "ü\n\u2028", "{", "],"]
)
SCALARS = st.sampled_from([None, True, False, 0, -12, 10**20, 0.5, -1e-7, 1e300, *[[], {}]]) | TEXTS
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=50, derandomize=True)
@given(st.dictionaries(TEXTS, JSON, max_size=3), st.sampled_from([None, 2]), st.booleans())
def test_strict_json_is_read_as_it_is(table, indent, is_ascii):
    reader = Reader(json.dumps(table, indent=indent, ensure_ascii=is_ascii))
    assert reader.read() == table
    assert not reader.comments
    assert all(place.is_choice for place in reader.places)


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "-Infinity", "9" * 5000])
@pytest.mark.parametrize(
    "text",
    [
        '{"train_batch_size": 8, "gradient_clipping": #}',
        '{"train_batch_size": #, "gradient_accumulation_steps": #}',
        '{"train_batch_size": 8, "zero_optimization": {"stage": 3, "reduce_bucket_size": #}}',
        '{"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"betas": [0.9, #]}}}',
    ],
)
def test_what_is_no_finite_number_is_a_fault(tmp_path, capsys, number, text):
    path = tmp_path / "ds.json"
    path.write_text(text.replace("#", number))
    assert explain_or_advise(["explain", path, "--model", "7B"]) == 1
    faults = capsys.readouterr().out.partition("Faults")[2].partition("Key by key")[0]
    assert number[:40] in faults


PIECES = [
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    ",",
    ";",
    ":",
    "=",
    '"a"',
    "'b'",
    '"',
    "...",
    "<N>",
    "[a|b]",
    "#x",
    "//",
    "/*",
    "*/",
    "true",
    "True",
    "1",
    "-",
    "|",
    "or",
    "dict(",
    "d=",
    "a:",
    "{{",
    "```",
]


@settings(max_examples=100, derandomize=True)
@given(st.lists(st.sampled_from([*PIECES, "\n", "\n  ", "\n- ", " "]), max_size=14))
def test_any_text_is_read_or_refused_by_its_line(pieces):
    reader = Reader("".join(pieces))
    with contextlib.suppress(UnreadableError):
        json.dumps(reader.read())
    assert all(1 <= place.line <= 15 for place in reader.places)


READ = {
    "comments": ('{"a": 1, // x\n# y\n/* z\n */ "b": "//#"}', {"a": 1, "b": "//#"}),
    "a comment whose line end is lost": (
        '{"a": 1, // x "b": {"c": 2 # y }}',
        {"a": 1, "b": {"c": 2}},
    ),
    "a missing comma": ('{"a": 1\n"b": [1 2]\n}', {"a": 1, "b": [1, 2]}),
    "one missing on the line": ('{"a": true "b": 2}', {"a": True, "b": 2}),
    "spare commas": ('{"a": [1, 2,],, "b": {"c": 1,},}', {"a": [1, 2], "b": {"c": 1}}),
    "Python": (
        "ds_config = {'a': True, 'b': None, 'it\\'s \"x\"': False,}",
        {"a": True, "b": None, 'it\'s "x"': False},
    ),
    "numbers": ('{"a": .5, "b": 1_000, "c": +5e8}', {"a": 0.5, "b": 1000, "c": 500000000}),
    "calls and tuples": (
        "d = dict(a=1, b=dict(c=(0.9, 0.999),),)",
        {"a": 1, "b": {"c": [0.9, 0.999]}},
    ),
    "semicolons": ('{"a": 1; "b": 2;}', {"a": 1, "b": 2}),
    "marks of keys": ('{\n<optional> "a": 1,\n[new] "b": 2,\n- c: 3}', {"a": 1, "b": 2, "c": 3}),
    "a part, with its end": ('"a": {"b": 1}\n}\n', {"a": {"b": 1}}),
    "bare words": ("{a: auto, b: /mnt/nvme, c: cpu}", {"a": "auto", "b": "/mnt/nvme", "c": "cpu"}),
    "curly quotes": ("{“a”: “cpu”}", {"a": "cpu"}),
    "no braces": ('"a": {"b": 1},\n"c": 2\n', {"a": {"b": 1}, "c": 2}),
    "a fence and prose": ('My file:\n```json\n{"a": 1}\n```\n', {"a": 1}),
    "a missing end": ('{"a": {"b": 1\n', {"a": {"b": 1}}),
    "more after the end": ('{"a": 1}\n}\n', {"a": 1}),
    "indentation": (
        "---\na:\n  b: 1 # x\n  c:\n    d: true\n  e:\n    - 0.9\n    - x\nf:\ng: 2\n",
        {"a": {"b": 1, "c": {"d": True}, "e": [0.9, "x"]}, "f": None, "g": 2},
    ),
    "a remark": ('{"a": 5e8 (default), "b": "x" (old)}', {"a": 5e8, "b": "x"}),
}


@pytest.mark.parametrize(("text", "table"), READ.values(), ids=READ)
def test_what_is_meant_is_read_and_told(text, table):
    reader = Reader(text)
    assert reader.read() == table
    assert reader.places or reader.comments


CHOICES = {
    "[0|1|2|3]": ("[0|1|2|3]", "choose 0, 1, 2 or 3"),
    '"[cpu|nvme]"': ("[cpu|nvme]", "choose cpu or nvme"),
    '["cpu" | "nvme"]': ('["cpu" | "nvme"]', "choose cpu or nvme"),
    '"cpu"|"nvme"': ('<cpu |"nvme">', "choose cpu or nvme"),
    "true/false": ("<true/false>", "choose true or false"),
    "{{ batch }}": ("{{ batch }}", "write the value"),
    "int(2e8)": ("<int(2e8)>", "write the value"),
    "true|false": ("true|false", "choose true or false"),
    "2 or 3": ("<2 or 3>", "choose 2 or 3"),
    "{a|b}": ("{a|b}", "choose a or b"),
    "[true|false] (old)": ("[true|false]", "choose true or false"),
    "<N>": ("<N>", "write the value"),
    '"<path to the disk>"': ("<path to the disk>", "write the value"),
    '"${BATCH}"': ("${BATCH}", "write the value"),
    '"{batch}"': ("{batch}", "write the value"),
    "N": ("<N>", "write the value"),
    "???": ("???", "write the value"),
    "...": ("...", "write the value"),
    "micro * 8": ("<micro * 8>", "write the value"),
    "": ("<value>", "write the value"),
}


@pytest.mark.parametrize("written", CHOICES)
def test_a_placeholder_is_a_choice_and_stays_one(written):
    text, remedy = CHOICES[written]
    reader = Reader(f'{{\n"a": 1,\n"b": {written}, "c": 2}}')
    table = reader.read()
    assert table == {"a": 1, "b": text, "c": 2}
    assert isinstance(table["b"], Placeholder)
    (place,) = [place for place in reader.places if place.is_choice]
    assert (place.line, place.key, place.remedy) == (3, "b", remedy)
    again = Reader(json.dumps(table))
    assert isinstance(again.read()["b"], Placeholder)


@pytest.mark.parametrize("text", ['"x_pattern": "a|b"', '"(q|k)_proj"', '["x.*|y"]'])
def test_a_pattern_is_no_placeholder(text):
    reader = Reader(f"{{{text}}}" if ":" in text else f'{{"a": {text}}}')
    reader.read()
    assert not reader.places


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{\n"a": "x\n}', 'line 2: " has no second one on its line'),
        ('{\n"a": [1}\n', "line 2: } where no list began"),
        ('{\n"a": 1,\n: 2}', "line 3: : 2} where a key is due"),
        ("once upon a time", "line 1: a configuration begins with {"),
        ("", "line 1: a configuration begins with {"),
    ],
)
def test_what_cannot_be_guessed_is_named_by_its_line(tmp_path, capsys, text, words):
    path = tmp_path / "file.json"
    path.write_text(text)
    assert explain_or_advise(["explain", path]) == 2
    assert f"{path}: is no JSON: {words}" in capsys.readouterr().err


GUIDE = """{
    // of one GPU
    "train_micro_batch_size_per_gpu": <N>,
    "bf16": {"enabled": True}
    "zero_optimization": {
        "stage": [1|2|3],
        "overlap_com": true,
        "offload_param": {"device": "[cpu|nvme]", "nvme_path": "/x"},
    },
    ...
}
"""


def test_a_guides_file_is_explained_mended_and_its_choices_are_left(tmp_path, capsys):
    path, copy = tmp_path / "guide.json", tmp_path / "guide.fixed.json"
    path.write_bytes(GUIDE.replace("\n", "\r\n").encode("utf-8-sig"))
    assert explain_or_advise(["explain", path, "--fix"]) == 1
    told = capsys.readouterr()
    assert "train_micro_batch_size_per_gpu: line 3: <N> stands for a value; write the value" in (
        told.out
    )
    assert "zero_optimization.overlap_com: " in told.out
    assert (
        "zero_optimization.stage: line 6: [1|2|3] stands for a value; choose 1, 2 or 3" in told.out
    )
    assert "line 4: True was taken as true" in told.out
    assert "does nothing" not in told.out
    assert "line 2: a comment is read over" in told.err
    assert "left to you: (file): line 10: ... stands for more" in told.err
    assert json.loads(copy.read_text()) == {
        "train_micro_batch_size_per_gpu": "<N>",
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": "[1|2|3]",
            "overlap_comm": True,
            "offload_param": {"device": "[cpu|nvme]", "nvme_path": "/x"},
        },
    }
    assert explain_or_advise(["explain", copy, "--fix"]) == 1
    told = capsys.readouterr()
    assert "left to you: zero_optimization.stage: line 7: [1|2|3]" in told.err
    assert told.err.endswith("--fix: nothing to mend\n")


@pytest.mark.parametrize(("text", "is_read"), [("# x\n{'a': 1}", True), ('{"a": True,}', False)])
def test_what_deepspeeds_reader_makes_of_a_file_is_told(tmp_path, text, is_read):
    path = tmp_path / "file.json"
    path.write_text(text)
    document = read_config(path)
    assert [note.key for note in document.warnings][:1] == (["(file)"] if is_read else ["line 1"])
    assert [note.key for note in document.faults] == ([] if is_read else ["(file)"])


def test_a_key_that_is_given_twice_is_named_with_both_lines(tmp_path):
    path = tmp_path / "file.json"
    path.write_text('{"fp16": {"enabled": true,\n"hysteresis": 2,\n"enabled": false}}')
    document = read_config(path)
    assert document.table == {"fp16": {"enabled": False, "hysteresis": 2}}
    (fault,) = document.faults
    assert fault.key == "fp16.enabled"
    assert "on lines 1 and 3" in fault.text
    assert document.changes == [f"fp16.enabled: {fault.text}"]
