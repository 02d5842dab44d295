"""Steps of the recipe, one by one; in CI a missing package is a failure."""

import json
import os

import pytest

if "CI" not in os.environ:
    pytest.importorskip("datatrove")
    pytest.importorskip("trafilatura")

from datatrove.data import Document

from dataset import readers, web
from dataset.files import DatasetError
from dataset.web import Cleaning, Files, Recipe, TextFilter, UrlFilter

ENGLISH = "The quick brown fox jumps over the lazy dog, and nobody in the village was surprised. "
GERMAN = (
    "Der schnelle braune Fuchs springt über den faulen Hund, und niemand im Dorf wundert sich. "
)


def reason(step, text):
    found = step.filter(Document(text, "x"))
    return "" if found is True else found[1]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://example.org/a", ""),
        ("https://www.bbc.co.uk/news?id=1#top", ""),
        ("http://10.0.0.1:8080/x", ""),
        ("http://bücher.example/ä", ""),
        ("http://example.org", ""),
        ("https://www.youtube.com/watch?v=1", "domain"),
        ("http://maps.google.co.uk/", "domain"),
        ("https://en.wikipedia.org/wiki/A", "domain"),
        ("HTTP://YOUTU.BE/x", "domain"),
        ("http://youtube.example.org/a", ""),  # a site of another's
        ("http://mygoogle.com/a", ""),
        ("http://example.org/a.PDF", "extension"),
        ("http://example.org/a.jpg?size=3", "extension"),
        ("http://example.org/a.7z", "extension"),
        ("http://example.ai", ""),  # the host is no file
        ("http://a", "too short"),
        ("example.org/a", "malformed"),
        ("ftp://example.org/a", "malformed"),
        ("http://example.org/a b", "malformed"),
        ("http://[::1/abcd", "malformed"),
    ],
)
def test_an_address_goes_for_a_reason_or_stays(url, expected):
    assert reason(UrlFilter(), url) == expected


def test_the_first_of_equal_addresses_stays_however_they_are_spelt():
    step = UrlFilter()
    assert reason(step, "http://Example.org:80/a?b=1") == ""
    for same in ("http://example.org/a?b=1", "HTTP://EXAMPLE.ORG/a?b=1#c"):
        assert reason(step, same) == "duplicate"
    for other in ("https://example.org/a?b=1", "http://example.org/A?b=1", "http://example.org/a"):
        assert reason(step, other) == ""
    assert reason(step, "http://example.net") == ""
    assert reason(step, "http://example.net/") == "duplicate"


def test_a_name_with_a_dot_is_a_host_and_what_lies_below_it(tmp_path):
    (tmp_path / "b.toml").write_text("domains = ['bad.example.org']\nextensions = []\n")
    step = UrlFilter(tmp_path / "b.toml")
    assert reason(step, "http://www.bad.example.org/") == "domain"
    assert reason(step, "http://example.org/") == ""


@pytest.mark.parametrize("text", ["domains = 3\nextensions = []", "domains = ['a']", "domains ["])
def test_a_blacklist_that_cannot_be_used_is_named(tmp_path, text):
    (tmp_path / "black.toml").write_text(text)
    with pytest.raises(DatasetError, match=r"--blacklist .*black.toml: give a TOML file"):
        UrlFilter(tmp_path / "black.toml")


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


def test_all_addresses_of_a_host_are_of_one_task_and_none_is_lost(tmp_path):
    urls = [{"url": f"http://{host}.example/{n}"} for host in "abcdef" for n in range(3)]
    files = write(tmp_path, "u.jsonl", *urls, {"url": "nonsense"})
    tasks = [
        [one.text for one in Files(files, "url", by_host=True).run(None, rank, 4)]
        for rank in range(4)
    ]
    assert sorted(url for task in tasks for url in task) == sorted(
        one["url"] for one in [*urls, {"url": "nonsense"}]
    )
    hosts = [{url[:8] for url in task} for task in tasks]
    assert sum(map(len, hosts)) == len(set().union(*hosts))


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
        (("body",), r"no key 'body'; --evaluation-keys says where"),
        (("short",), "holds no evaluation text of 8 words or more"),
    ],
)
def test_evaluation_texts_that_cannot_be_used_are_refused(tmp_path, keys, message):
    files = write(tmp_path, "a.jsonl", {"text": "x", "short": "two words"})
    with pytest.raises(DatasetError, match=message):
        web.decontaminate(files, "text", tmp_path / "o", 1, readers.Reading(files, keys, "line"))
    assert not (tmp_path / "o").exists()
