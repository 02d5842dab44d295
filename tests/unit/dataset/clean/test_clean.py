import json
import lzma
import random
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from full_disk import files_of_at_most

from dataset.clean import run as module
from dataset.clean.contamination import Contamination
from dataset.clean.duplicates import Seen, Sketch
from dataset.clean.run import clean, report_path
from dataset.clean.steps import LIBRARIES, Cleaner, CleanSettings
from dataset.errors import DatasetError
from dataset.readers import inputs
from dataset.readers.blocks import Reading

ROOT = Path(__file__).resolve().parents[4]
ENGLISH = "The quick brown fox jumps over the lazy dog, and nobody in the village was surprised. "
GERMAN = (
    "Der schnelle braune Fuchs springt über den faulen Hund, und niemand im Dorf wundert sich. "
)
QUESTION = "which of these seven animals would jump over a lazy dog in the old village at night"


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setattr(module, "ordered", lambda work, items, workers: (work(i) for i in items))


def cleaned(text, **steps):
    counts = Counter()
    return Cleaner(CleanSettings(**steps)).clean(text, counts), +counts


def test_nothing_is_changed_unless_asked_for():
    assert cleaned("Ã©  x \u0000") == (["Ã©  x \u0000"], {})


def test_text_decoded_wrongly_is_mended():
    assert cleaned("schÃ¶n &amp; gut", fix_text=True) == (["schön & gut"], {"fixed": 1})


def test_only_texts_in_the_languages_are_kept():
    assert cleaned(ENGLISH * 3, languages=("en",))[0] == [ENGLISH * 3]
    assert cleaned(GERMAN * 3, languages=("en",)) == ([], {"dropped: language": 1})
    assert cleaned(GERMAN * 3, languages=("en", "de"))[0] == [GERMAN * 3]
    assert cleaned("123 456", languages=("en",))[0] == []


def test_an_unknown_language_is_named():
    with pytest.raises(DatasetError, match="--language xx: not one of ace, af"):
        cleaned("", languages=("xx",))


def test_texts_too_short_or_too_long_are_dropped():
    assert cleaned("a b c", min_words=3, max_words=3)[0] == ["a b c"]
    assert cleaned("a b", min_words=3)[1] == {"dropped: too short": 1}
    assert cleaned("a b c d", max_words=3)[1] == {"dropped: too long": 1}
    assert cleaned(" \n ", min_words=1)[1] == {"dropped: empty": 1}


def filler(seed, num_words=200):
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(10_000)}" for _ in range(num_words))


def test_thirteen_equal_words_are_cut_out_with_their_surroundings():
    known = Contamination([QUESTION])
    shared = re.sub(" ", ",  ", " ".join(QUESTION.split()[1:14])).upper()
    text = f"{filler(1)} {shared} {filler(2)}"
    before, after = known.clean(text)
    assert text.startswith(before)
    assert text.endswith(after)
    at = text.index(shared)
    assert len(before) == at - 200
    assert len(after) == len(text) - (at + len(shared)) - 200


def test_twelve_equal_words_are_not():
    text = " ".join(QUESTION.split()[:12]) + " " + filler(1)
    assert Contamination([QUESTION]).clean(text) == [text]


@pytest.mark.parametrize(("num_words", "is_found"), [(7, False), (8, True), (12, True)])
def test_a_short_evaluation_text_counts_as_a_whole(num_words, is_found):
    short = " ".join(QUESTION.split()[:num_words])
    text = f"{filler(1)} {short} {filler(2)}"
    assert (Contamination([short]).clean(text) == [text]) is not is_found


def test_short_stretches_and_documents_in_many_pieces_are_dropped():
    known = Contamination([QUESTION])
    assert known.clean(f"short start {QUESTION} short end") == []
    eleven = f" {QUESTION} ".join(filler(seed) for seed in range(11))
    assert known.clean(eleven) == []
    assert len(known.clean(f" {QUESTION} ".join(filler(seed) for seed in range(10)))) == 10
    # What is too short to stay is no piece.
    assert len(known.clean(f" {QUESTION} ".join([filler(1), *"abcdefghijkl", filler(2)]))) == 2


def test_case_folding_does_not_move_the_cut():
    # The lower case of this letter is two.
    text = f"{'İ' * 50} {filler(1)} {QUESTION} {filler(2)}"
    before, _ = Contamination([QUESTION]).clean(text)
    assert len(before) == text.index(QUESTION) - 200


def changed(text, share, seed):
    rng = random.Random(seed)
    return " ".join(w if rng.random() > share else "other" for w in text.split())


def is_new(seen, text):
    return seen.alike(Sketch().of(text)) is None


def test_of_texts_much_alike_the_first_is_kept():
    seen = Seen(0.8)
    texts = [filler(seed, 400) for seed in range(30)]
    assert all(is_new(seen, text) for text in texts)
    assert not any(is_new(seen, text) for text in texts)
    assert not any(is_new(seen, changed(t, 0.01, 1)) for t in texts)
    # These share some 0.65: a few are proposed as alike, and then compared.
    assert all(is_new(seen, changed(t, 0.045, 2)) for t in texts)


@pytest.mark.parametrize("threshold", [0.0001, 0.99, 0.995, 1.0])
def test_every_share_finds_equal_texts_and_the_highest_no_others(threshold):
    seen, text = Seen(threshold), filler(1)
    assert is_new(seen, text)
    assert not is_new(seen, text)
    assert is_new(seen, changed(text, 0.2, 1)) is (threshold > 0.5)


def test_short_texts_have_a_signature():
    seen = Seen(0.8)
    assert [is_new(seen, t) for t in ("", "one", "one two", "one")] == [
        True, True, True, False,
    ]  # fmt: skip


def write(path, texts):
    records = [json.dumps({"id": n, "text": text}) for n, text in enumerate(texts)]
    path.write_text("\n".join(records))
    return Reading(inputs.find([str(path)]), block_bytes=200)


def test_a_file_is_cleaned_in_order_with_all_fields_and_counts(tmp_path):
    (tmp_path / "eval.txt").write_text(f"{QUESTION}\n")
    texts = [
        ENGLISH,
        GERMAN,
        "",
        "This is too short.",
        ENGLISH,
        f"{ENGLISH} {QUESTION}",
        ENGLISH * 2,
    ]
    reading = write(tmp_path / "in.jsonl", texts)
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write("\nbroken")
    settings = CleanSettings(
        languages=("en",),
        min_words=5,
        near_duplicates=0.9,
        decontaminate=(tmp_path / "eval.txt",),
    )
    output = tmp_path / "new" / "out.jsonl.xz"
    counts = clean(reading, settings, output, 1, stop_at_bad=False)
    with lzma.open(output, "rt") as file:
        kept = [json.loads(line) for line in file]
    assert kept == [{"id": 0, "text": ENGLISH}, {"id": 6, "text": ENGLISH * 2}]
    assert counts == {
        "read": 7, "written": 2, "bad lines": 1, "contaminated": 1, "dropped: contaminated": 1,
        "dropped: language": 1, "dropped: empty": 1, "dropped: too short": 1,
        "dropped: near-duplicate": 1,
    }  # fmt: skip
    written = json.loads(report_path(output).read_text())
    assert written["counts"] == counts
    reason = "not JSON: Expecting value: line 1 column 1 (char 0)"
    assert written["bad_lines"] == [f"{tmp_path / 'in.jsonl'}:8: {reason}"]


@pytest.mark.parametrize("ending", ["", ".gz", ".xz", ".zst"])
def test_the_output_is_packed_by_its_name_and_can_be_read_again(tmp_path, ending):
    texts = [f"{ENGLISH} {n}" for n in range(20)]
    output = tmp_path / f"out.jsonl{ending}"
    clean(write(tmp_path / "in.jsonl", texts), CleanSettings(), output, 1, stop_at_bad=True)
    again = tmp_path / "again.jsonl"
    clean(Reading(inputs.find([str(output)])), CleanSettings(), again, 1, stop_at_bad=True)
    assert [json.loads(line)["text"] for line in again.read_text().splitlines()] == texts


@pytest.mark.parametrize("ending", ["", ".gz", ".xz", ".zst"])
def test_a_full_disk_names_the_output_and_leaves_nothing(tmp_path, ending):
    texts = [filler(seed) for seed in range(40)]
    reading, output = write(tmp_path / "in.jsonl", texts), tmp_path / f"out.jsonl{ending}"
    with (
        files_of_at_most(2000),
        pytest.raises(DatasetError, match=f"{output}: .*: make room and run the same command"),
    ):
        clean(reading, CleanSettings(), output, 1, stop_at_bad=True)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_bad_line_can_stop_it_and_leaves_nothing(tmp_path):
    reading = write(tmp_path / "in.jsonl", [ENGLISH])
    (tmp_path / "in.jsonl").write_text("broken")
    with pytest.raises(DatasetError, match=r"in.jsonl:1: not JSON"):
        clean(reading, CleanSettings(), tmp_path / "out.jsonl", 1, stop_at_bad=True)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_input_without_the_key_is_refused_and_leaves_nothing(tmp_path):
    reading = write(tmp_path / "in.jsonl", [ENGLISH])
    reading, settings = Reading(reading.files, ("txt",)), CleanSettings(key="txt")
    with pytest.raises(DatasetError, match=r"no text under 'txt' \(.*in.jsonl:1: no key 'txt'\)"):
        clean(reading, settings, tmp_path / "out.jsonl", 1, stop_at_bad=False)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_what_did_not_happen_is_counted_as_0(tmp_path):
    reading = write(tmp_path / "in.jsonl", [ENGLISH])
    settings = CleanSettings(min_words=2, near_duplicates=0.9)
    counts = clean(reading, settings, tmp_path / "out.jsonl", 1, stop_at_bad=False)
    assert counts == {
        "read": 1, "written": 1, "bad lines": 0, "dropped: empty": 0, "dropped: too short": 0,
        "dropped: near-duplicate": 0,
    }  # fmt: skip


def test_an_output_that_exists_or_has_another_ending_is_refused(tmp_path):
    reading = write(tmp_path / "in.jsonl", [ENGLISH])
    with pytest.raises(DatasetError, match=r"in.jsonl is there already"):
        clean(reading, CleanSettings(), tmp_path / "in.jsonl", 1, stop_at_bad=True)
    with pytest.raises(DatasetError, match=r"must end in .jsonl"):
        clean(reading, CleanSettings(), tmp_path / "out.csv", 1, stop_at_bad=True)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("ftfy", {"fix_text": True}),
        ("py3langid", {"languages": ("en",)}),
        ("datasketch", {"near_duplicates": 0.5}),
    ],
)
def test_a_missing_library_is_named_with_what_to_install(monkeypatch, name, steps):
    monkeypatch.setattr(
        "dataset.clean.steps.find_spec", lambda asked: None if asked == name else sys
    )
    with pytest.raises(DatasetError, match=f"needs the package {name}: pip install {name}=="):
        CleanSettings(**steps).require_usable()
    CleanSettings().require_usable()


def test_the_versions_named_are_those_tested():
    pins = (ROOT / "requirements" / "dev.txt").read_text().splitlines()
    known = {line.split("==")[0] for line in pins if "==" in line}
    wanted = {f"{name}=={version}" for name, version in LIBRARIES.items() if name in known}
    assert wanted <= set(pins)
