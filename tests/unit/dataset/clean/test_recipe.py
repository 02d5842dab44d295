import json
import random
from collections import Counter
from dataclasses import replace

import pytest
from full_disk import files_of_at_most

from dataset.clean import fingerprints, run as module
from dataset.clean.contamination import Contamination, Ngrams
from dataset.clean.duplicates import Sketch
from dataset.clean.run import Memory, clean
from dataset.clean.steps import Cleaner, CleanSettings
from dataset.errors import DatasetError
from dataset.readers import inputs
from dataset.readers.blocks import Reading

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


def filler(seed, num_words=200):
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(10_000)}" for _ in range(num_words))


def changed(text, share, seed):
    rng = random.Random(seed)
    return " ".join(w if rng.random() > share else "other" for w in text.split())


def write(path, texts):
    records = [json.dumps({"id": n, "text": text}) for n, text in enumerate(texts)]
    path.write_text("\n".join(records))
    return Reading(inputs.find([str(path)]), block_bytes=200)


def test_texts_of_fewer_characters_are_dropped():
    assert cleaned("ä" * 511, min_characters=512) == ([], {"dropped: too short": 1})
    assert cleaned("ä" * 512, min_characters=512)[0] == ["ä" * 512]
    # Characters of the mended text count, and language goes first.
    assert cleaned("Ã¤" * 300, min_characters=512, fix_text=True)[1] == {
        "fixed": 1, "dropped: too short": 1,
    }  # fmt: skip
    assert cleaned(GERMAN, min_characters=512, languages=("en",))[1] == {"dropped: language": 1}


@pytest.mark.parametrize(
    ("changes", "is_found"),
    [
        ({}, True),
        ({"words": 17, "fewest_words": 17}, True),
        ({"words": 18, "fewest_words": 18}, False),  # the question has 17
        ({"words": 18, "fewest_words": 8}, True),  # and counts as a whole
        ({"shortest_characters": 10**6}, True),
    ],
)
def test_what_counts_as_shared_is_a_choice(changes, is_found):
    text = f"{filler(1)} {QUESTION} {filler(2)}"
    left = Contamination([QUESTION], Ngrams(**changes)).clean(text)
    assert (left != [text]) is is_found
    assert (left == []) is ("shortest_characters" in changes)


def test_no_margin_leaves_all_but_the_shared_words():
    text = f"{filler(1)} {QUESTION}, {filler(2)}"
    pieces = Contamination([QUESTION], Ngrams(words=17, margin_characters=0)).clean(text)
    assert pieces == text.split(QUESTION)


def test_pieces_can_end_and_begin_with_sentences():
    first, second = f"{filler(1)}. Then {filler(2, 60)}", f"{filler(3, 60)}! So {filler(4)}"
    text = f"{first} {QUESTION} {second}"
    known = Contamination([QUESTION], Ngrams(whole_sentences=True))
    assert known.clean(text) == [f"{filler(1)}.", f" So {filler(4)}"]
    # Without an end of a sentence all of that side goes.
    assert known.clean(f"{filler(1)} {QUESTION} {filler(2)}") == []


def test_a_piece_more_than_allowed_drops_the_whole():
    text = f" {QUESTION} ".join(filler(seed) for seed in range(4))
    assert len(Contamination([QUESTION], Ngrams(most_pieces=4)).clean(text)) == 4
    assert Contamination([QUESTION], Ngrams(most_pieces=3)).clean(text) == []


def test_each_key_of_an_evaluation_file_is_a_text_by_itself(tmp_path):
    half = QUESTION.split()
    fields = {"question": " ".join(half[:7]), "passage": [" ".join(half[7:]), "too short"]}
    (tmp_path / "eval.jsonl").write_text(json.dumps(fields))
    (tmp_path / "all.jsonl").write_text(json.dumps({"question": QUESTION}))
    text = f"{filler(1)} {QUESTION} {filler(2)}"
    keys = {"decontaminate": (tmp_path / "eval.jsonl",)}
    found = cleaned(text, **keys, decontaminate_keys=("question", "passage"))[0]
    assert found[0] == text[: text.index(half[7]) - 200]
    with pytest.raises(DatasetError, match=r"no key 'text'; --decontaminate-keys says where"):
        cleaned(text, **keys)
    with pytest.raises(DatasetError, match=r"holds no evaluation text of 8 words or more"):
        cleaned(text, **keys, decontaminate_keys=("question",))


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_documents_that_are_split_have_ids_of_their_own(tmp_path):
    (tmp_path / "eval.txt").write_text(QUESTION)
    split, cut = f"{filler(1)} {QUESTION} {filler(2)}", f"{QUESTION} {filler(3)}"
    reading = write(tmp_path / "in.jsonl", [split, cut, filler(4)])
    settings = CleanSettings(decontaminate=(tmp_path / "eval.txt",))
    output = tmp_path / "out.jsonl"
    clean(reading, settings, output, 1, stop_at_bad=True)
    assert [record["id"] for record in records(output)] == ["0-0", "0-1", 1, 2]


def test_what_the_input_holds_often_is_a_common_phrase_and_stays(tmp_path):
    rare, common = QUESTION, " ".join(QUESTION.split()[::-1])
    (tmp_path / "eval.txt").write_text(f"{rare}\n{common}")
    texts = [f"{filler(n)} {common} {rare if n < 2 else ''} {filler(n + 9)}" for n in range(3)]
    reading = write(tmp_path / "in.jsonl", texts)
    ngrams = Ngrams(max_matches=3)  # both have 17 words, of which 13 are enough
    settings = CleanSettings(decontaminate=(tmp_path / "eval.txt",), ngrams=ngrams)
    output = tmp_path / "out.jsonl"
    counts = clean(reading, settings, output, 1, stop_at_bad=True)
    assert counts["contaminated"] == 2
    left = "".join(record["text"] for record in records(output))
    assert common in texts[2]
    assert texts[2] in left
    assert rare not in left
    settings = replace(settings, ngrams=replace(ngrams, max_matches=4))
    counts = clean(reading, settings, tmp_path / "all.jsonl", 1, stop_at_bad=True)
    assert counts["contaminated"] == 3


def corpus(tmp_path, name, texts, prefix):
    path = tmp_path / name
    lines = [json.dumps({"url": f"{prefix}{n}", "text": text}) for n, text in enumerate(texts)]
    path.write_text("\n".join(lines))
    return Reading(inputs.find([str(path)]), block_bytes=200)


def test_fingerprints_tell_a_later_run_what_was_kept(tmp_path):
    near = CleanSettings(near_duplicates=0.9)
    texts = [filler(seed) for seed in range(6)]
    reading = corpus(tmp_path, "a.jsonl", [*texts[:4], texts[0]], "a")
    memory = Memory(save=tmp_path / "a.fp")
    clean(reading, near, tmp_path / "a.out.jsonl", 1, True, memory)
    reading = corpus(tmp_path, "b.jsonl", [texts[4]], "b")
    clean(reading, near, tmp_path / "b.out.jsonl", 1, True, Memory(save=tmp_path / "b.fp"))
    assert len(list(fingerprints.load(tmp_path / "a.fp", Sketch()))) == 4
    reading = corpus(tmp_path, "c.jsonl", texts[::-1], "c")
    memory = Memory((tmp_path / "a.fp", tmp_path / "b.fp"), tmp_path / "c.fp", tmp_path / "c.gr")
    named = replace(near, needs_names=True, id_key="url")
    counts = clean(reading, named, tmp_path / "c.out.jsonl", 1, True, memory)
    assert [record["url"] for record in records(tmp_path / "c.out.jsonl")] == ["c0"]
    assert counts["dropped: near-duplicate"] == 5
    # What this run kept and no more: the next loads all files.
    (kept,) = fingerprints.load(tmp_path / "c.fp", Sketch())
    assert kept[1] == "c0"
    assert (kept[0] == Sketch().of(texts[5])).all()


@pytest.mark.parametrize(
    ("sketch", "message"),
    [
        (Sketch(permutations=64), "permutations is 128 there and 64 here"),
        (Sketch(shingle_words=3), "shingle_words is 5 there and 3 here"),
        (Sketch(seed=2), "seed is 1 there and 2 here"),
    ],
)
def test_fingerprints_made_otherwise_are_refused_by_name(tmp_path, sketch, message):
    path = tmp_path / "fp"
    fingerprints.save(path, Sketch(), [Sketch().of("a")], ["a"])
    with pytest.raises(DatasetError, match=f"--load-fingerprints {path}: {message}: give the same"):
        list(fingerprints.load(path, sketch))


def test_damaged_fingerprints_are_refused_before_any_is_used(tmp_path):
    path, values = tmp_path / "fp", [Sketch().of(filler(n)) for n in range(20)]
    fingerprints.save(path, Sketch(), values, map(str, range(20)))
    whole = path.read_bytes()
    assert [name for _, name in fingerprints.load(path, Sketch())] == list(map(str, range(20)))
    flipped = bytearray(whole)
    flipped[5000] ^= 1
    for damaged in (bytes(flipped), whole[:-1], whole[: len(whole) // 2], b"", b"{}"):
        path.write_bytes(damaged)
        with pytest.raises(DatasetError, match=r"fp: missing, damaged or no fingerprints"):
            next(fingerprints.load(path, Sketch()))
    path.unlink()
    with pytest.raises(DatasetError, match=r"missing, damaged"):
        next(fingerprints.load(path, Sketch()))


def test_groups_say_what_went_because_of_what_and_can_be_removed_by(tmp_path):
    first, second = filler(1, 400), filler(2, 400)
    texts = [first, second, changed(first, 0.01, 1), second, first]
    reading = corpus(tmp_path, "in.jsonl", texts, "u")
    near = CleanSettings(near_duplicates=0.8, needs_names=True, id_key="url")
    memory = Memory(groups=tmp_path / "groups.jsonl")
    clean(reading, near, tmp_path / "near.jsonl", 1, True, memory)
    groups = records(tmp_path / "groups.jsonl")
    assert [(g["kept"], [d["id"] for d in g["duplicates"]]) for g in groups] == [
        ("u0", ["u2", "u4"]), ("u1", ["u3"]),
    ]  # fmt: skip
    likeness = [d["similarity"] for g in groups for d in g["duplicates"]]
    assert 0.8 <= likeness[0] < 1.0
    assert likeness[1:] == [1.0, 1.0]
    by_group = CleanSettings(remove_groups=(tmp_path / "groups.jsonl",), id_key="url")
    counts = clean(reading, by_group, tmp_path / "removed.jsonl", 1, True)
    assert counts["dropped: in a group"] == 3
    assert (tmp_path / "removed.jsonl").read_text() == (tmp_path / "near.jsonl").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "groups:1: no group"),
        ('{"kept": "a", "duplicates": []}\n{"kept": "b"}', "groups:2: no group"),
        (
            '{"kept": "a", "duplicates": [{"id": "a"}]}',
            "a stays in one group and goes in another; names must be unique",
        ),
    ],
)
def test_groups_that_cannot_be_used_are_refused(tmp_path, text, message):
    (tmp_path / "groups").write_text(text)
    with pytest.raises(DatasetError, match=message):
        cleaned("", remove_groups=(tmp_path / "groups",))


def test_groups_need_names(tmp_path):
    reading = write(tmp_path / "in.jsonl", [ENGLISH])
    settings = CleanSettings(near_duplicates=0.8, needs_names=True, id_key="url")
    memory = Memory(groups=tmp_path / "groups")
    with pytest.raises(DatasetError, match=r"line 1, 'The quick.*: no name under 'url', which gro"):
        clean(reading, settings, tmp_path / "out.jsonl", 1, True, memory)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_what_is_written_beside_the_output_is_not_written_over_and_leaves_with_it(
    tmp_path, monkeypatch
):
    reading = write(tmp_path / "in.jsonl", [f"w{number} " * 200 for number in range(40)])
    near = CleanSettings(near_duplicates=0.8, needs_names=True)
    memory = Memory(save=tmp_path / "fp", groups=tmp_path / "groups")
    (tmp_path / "fp").write_text("mine")
    with pytest.raises(DatasetError, match=r"--save-fingerprints: .*fp is there already"):
        clean(reading, near, tmp_path / "out.jsonl", 1, True, memory)
    assert (tmp_path / "fp").read_text() == "mine"
    (tmp_path / "fp").unlink()
    # The texts fit, packed; their fingerprints do not.
    with files_of_at_most(18_000), pytest.raises(DatasetError, match=r"fp: .*make room"):
        clean(reading, near, tmp_path / "out.jsonl.xz", 1, True, memory)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]

    def interrupted(*arguments):
        assert (tmp_path / "fp").exists()
        assert (tmp_path / "groups").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_report", interrupted)
    with pytest.raises(KeyboardInterrupt):
        clean(reading, near, tmp_path / "out.jsonl", 1, True, memory)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
