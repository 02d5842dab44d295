import json

import pytest

from dataset.crawl.urls import BLACKLIST, UrlFilter, sift, site_name
from dataset.errors import DatasetError
from dataset.readers import inputs
from dataset.readers.blocks import Reading


@pytest.mark.parametrize(
    ("url", "reason"),
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
        ("http://example.org/a.ai#x", "extension"),
        ("http://example.ai", ""),  # the host is no file
        ("http://example.org/pdf", ""),
        ("http://a", "too short"),
        ("example.org/a", "malformed"),
        ("ftp://example.org/a", "malformed"),
        ("http://localhost/abc", "malformed"),
        ("http://example.org/a b", "malformed"),
        ("http://me:secret@example.org/", "malformed"),
        ("http://example.org:99999/", "malformed"),
        ("http://999.1.1.1/abc", "malformed"),
        ("http://[::1/abcd", "malformed"),
        ("http://-a.example/", "malformed"),
    ],
)
def test_an_address_goes_for_a_reason_or_stays(url, reason):
    assert UrlFilter.of_file().reason(url) == reason


def test_the_first_of_equal_addresses_stays_however_they_are_spelt():
    sieve = UrlFilter()
    assert sieve.reason("http://Example.org:80/a?b") == ""
    for same in ("http://example.org/a?b", "HTTP://EXAMPLE.ORG/a?b#c"):
        assert sieve.reason(same) == "duplicate"
    for other in ("https://example.org/a?b", "http://example.org/A?b", "http://example.org/a"):
        assert sieve.reason(other) == ""
    assert sieve.reason("http://example.net") == ""
    assert sieve.reason("http://example.net/") == "duplicate"


def test_a_name_with_a_dot_is_a_host_and_what_lies_below_it():
    sieve = UrlFilter(["bad.example.org"], [])
    assert sieve.reason("http://www.bad.example.org/") == "domain"
    assert sieve.reason("http://example.org/") == ""


@pytest.mark.parametrize(
    ("host", "name"),
    [("www.bbc.co.uk", "bbc"), ("co.uk", "co"), ("t.co", "t"), ("a.b.com.br", "b"), ("x", "")],
)
def test_the_name_of_a_site_stands_before_what_a_country_shares(host, name):
    assert site_name(host.split(".")) == name


def reading_of(tmp_path, *lists):
    for number, urls in enumerate(lists):
        (tmp_path / f"{number}.txt").write_text("\n".join(urls))
    return Reading(inputs.find([str(tmp_path / "*.txt")]), ("url",), "line")


def test_lists_become_one_in_order_with_a_count_of_every_reason(tmp_path):
    reading = reading_of(
        tmp_path,
        [" http://b.example/1 ", "http://youtu.be/a", "http://b.example/1", "http://x"],
        ["http://a.example/", "http://a.example/x.zip", "x" * 20],
    )
    counts = sift(reading, BLACKLIST, tmp_path / "out" / "clean.txt")
    assert (tmp_path / "out" / "clean.txt").read_text() == "http://b.example/1\nhttp://a.example/\n"
    assert counts == {
        "read": 7, "written": 2, "bad lines": 0, "dropped: domain": 1, "dropped: extension": 1,
        "dropped: too short": 1, "dropped: malformed": 1, "dropped: duplicate": 1,
    }  # fmt: skip
    report = json.loads((tmp_path / "out" / "clean.txt.report.json").read_text())
    assert report == {"counts": counts, "bad_lines": []}


def test_a_list_that_leaves_nothing_is_refused_and_leaves_no_file(tmp_path):
    reading = reading_of(tmp_path, ["http://youtu.be/a"])
    with pytest.raises(DatasetError, match="no address stays: read 1, dropped: domain 1"):
        sift(reading, BLACKLIST, tmp_path / "clean.txt.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["0.txt"]


@pytest.mark.parametrize("text", ["domains = 3\nextensions = []", "domains = ['a']", "domains ["])
def test_a_blacklist_that_cannot_be_used_is_named(tmp_path, text):
    path = tmp_path / "black.toml"
    path.write_text(text)
    with pytest.raises(DatasetError, match=r"--blacklist .*black.toml: "):
        UrlFilter.of_file(path)
