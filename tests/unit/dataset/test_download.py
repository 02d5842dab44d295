"""Pages from sites on this machine."""

import gzip
import os

import pytest
from web_site import Reply

if "CI" not in os.environ:
    pytest.importorskip("datatrove")
    pytest.importorskip("trafilatura")

from dataset import download as module
from dataset.download import Fetcher

HTML = {"Content-Type": "text/html"}
PAGE = Reply(b"<p>here and there", headers=HTML)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr("trafilatura.downloads.MAX_BACKOFF", 0)


@pytest.fixture
def site(open_site):
    return open_site()


def get(urls):
    found = list(Fetcher("tester/1.0 (100%)", 0.0).pages(urls, 4))
    assert sorted(url for url, _, _ in found) == sorted(urls)
    return {url: reason or page for url, reason, page in found}


def test_rules_come_first_and_requests_to_a_host_one_by_one(site):
    urls = [site.text(f"/{n}", f"page {n}") for n in range(9)]
    assert all(f"page {n}" in page for n, page in enumerate(get(urls).values()))
    assert site.asked == ["/robots.txt", *(f"/{n}" for n in range(9))]
    assert site.agents == {"tester/1.0 (100%)"}


def test_why_there_is_no_page_is_told(site, open_site, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 1_000_000)
    other = open_site()
    large = b"<p>" + b"x" * 3_000_000
    there = other.put("/yes", PAGE)
    packed = HTML | {"Content-Encoding": "gzip"}
    cases = {
        f"{site.url}/gone": "HTTP 404",
        site.put("/secret", Reply(status=403)): "HTTP 403",
        site.put("/image", Reply(b"abcdefghijkl", headers={"Content-Type": "image/png"})):
            "no page",
        site.put("/huge", Reply(large, headers=HTML)): "no answer",
        site.put("/bomb", Reply(gzip.compress(large), headers=packed)): "no answer",
        site.put("/cut", Reply(b"<p>a", headers=HTML, breaks_off=True)): "no answer",
        site.put("/loop", Reply(status=302, headers={"Location": "/loop"})): "no answer",
        site.put("/busy", Reply(status=429)): "no answer",
        site.put("/moved", Reply(status=301, headers={"Location": there})): "<p>here and there",
        site.put("/mended", Reply(status=503), PAGE): "<p>here and there",
        "nonsense": "malformed",
    }  # fmt: skip
    assert get(list(cases)) == cases
    asked = {path: site.asked.count(path) for path in ("/busy", "/mended", "/secret")}
    assert asked == {"/busy": 3, "/mended": 2, "/secret": 1}


@pytest.mark.parametrize(
    ("robots", "reason"),
    [
        (Reply(status=500), "robots.txt: no answer"),
        (Reply(status=403), "robots.txt"),
        (Reply(b"User-agent: tester\nDisallow: /\n"), "robots.txt"),
    ],
)
def test_a_site_that_does_not_say_yes_is_not_asked_for_pages(site, robots, reason):
    site.put("/robots.txt", robots)
    assert set(get([site.text(f"/{n}", "page") for n in range(3)]).values()) == {reason}
    assert set(site.asked) == {"/robots.txt"}


@pytest.mark.parametrize(("rules", "waited"), [(b"", 1.0), (b"User-agent: *\nCrawl-delay: 5", 5.0)])
def test_waits_between_requests_are_as_long_as_asked_for(site, monkeypatch, rules, waited):
    slept = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    site.put("/robots.txt", Reply(rules))
    urls = [site.text(f"/{n}", "page") for n in range(2)]
    assert len(list(Fetcher("tester/1.0", 1.0).pages(urls, 1))) == 2
    assert slept == [waited, waited]
