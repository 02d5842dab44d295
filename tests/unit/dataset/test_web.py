"""Steps of the recipe, one by one; in CI a missing package is a failure."""

import json
import os

import pytest

if "CI" not in os.environ:
    pytest.importorskip("datatrove")

from datatrove.data import Document

from dataset import readers, web
from dataset.files import DatasetError
from dataset.web import Cleaning, EvaluationFilter, Files, Recipe, TextFilter

ENGLISH = "The quick brown fox jumps over the lazy dog, and nobody in the village was surprised. "
GERMAN = (
    "Der schnelle braune Fuchs springt über den faulen Hund, und niemand im Dorf wundert sich. "
)
QUESTION = "Which of these 7 animals would jump over a lazy dog in the old village?"


def reason(step, text):
    found = step.filter(Document(text, "x"))
    return "" if found is True else found[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ENGLISH * 8, ""),  # 128 words
        (GERMAN * 9, "language"),
        ("1 2 3 4 " * 200, "language"),
        (ENGLISH * 7, "too short"),  # 112 words
        ("It was as he is. " * 30, "too short"),  # 150 words of 510 characters
    ],
)
def test_a_text_stays_by_the_thresholds_of_the_recipe(text, expected):
    assert Cleaning() == Cleaning("en", 128, 512, 0.9)
    assert reason(TextFilter(Cleaning()), text) == expected


def test_an_unknown_language_is_named():
    with pytest.raises(DatasetError, match=r"--language klingon: not one of .*en"):
        TextFilter(Cleaning("klingon"))


@pytest.mark.parametrize(("shared", "expected"), [(13, "contaminated"), (12, ""), (0, "")], ids=str)
def test_thirteen_words_in_a_row_are_shared(shared, expected):
    words = QUESTION.upper().split()[:shared]
    text = f"{ENGLISH} {' '.join(words)} nobody {ENGLISH}"
    assert reason(EvaluationFilter(["too short", QUESTION]), text) == expected


def write(tmp_path, name, *records):
    (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return readers.find([str(tmp_path / name)])


def test_files_give_texts_with_their_names_and_fields(tmp_path):
    files = write(tmp_path, "a.jsonl", {"id": 7, "text": "x", "url": "u"}, {"no": 1}, {"text": "y"})
    step = Files(files, "text")
    found = [(one.id, one.text, one.metadata) for one in step.run()]
    assert found == [("7", "x", {"url": "u"}), ("a.jsonl:3", "y", {})]
    assert {name: step.stats.stats[name].total for name in ("read", "bad lines")} == {
        "read": 2, "bad lines": 1,
    }  # fmt: skip


def test_a_folder_of_other_options_or_of_the_users_own_is_refused(tmp_path):
    files = write(tmp_path, "a.jsonl", {"text": "x"})
    output = tmp_path / "out"
    output.mkdir()
    for _ in range(2):  # the second goes on
        Recipe(output, {"command": "clean", "min_words": 128}, files)
    for settings in ({"command": "clean", "min_words": 1}, {"command": "urls"}):
        with pytest.raises(DatasetError, match=r"out: holds something else, or this with other"):
            Recipe(output, settings, files)
    write(tmp_path, "a.jsonl", {"text": "other"})
    files = readers.find([str(tmp_path / "a.jsonl")])
    with pytest.raises(DatasetError, match="holds something else"):
        Recipe(output, {"command": "clean", "min_words": 128}, files)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").touch()
    with pytest.raises(DatasetError, match="mine: holds something else"):
        Recipe(tmp_path / "mine", {}, files)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ("body",),
            r"no key 'body'; --evaluation-keys says where its texts are; it has text, short",
        ),
        (("short",), "holds no evaluation text of 13 words or more"),
    ],
)
def test_evaluation_texts_that_cannot_be_used_are_refused(tmp_path, keys, message):
    files = write(tmp_path, "a.jsonl", {"text": "x", "short": "two words"})
    with pytest.raises(DatasetError, match=message):
        web.decontaminate(files, "text", tmp_path / "o", 1, readers.Reading(files, keys, "line"))
    assert not (tmp_path / "o").exists()
