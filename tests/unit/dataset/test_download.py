"""Pages from sites on this machine."""

import gzip
import os
import threading

import pytest
from web_site import Reply

if "CI" not in os.environ:
    pytest.importorskip("datatrove")
    pytest.importorskip("trafilatura")

from dataset import download as module
from dataset.download import Fetcher
from dataset.web import is_fit

HTML = {"Content-Type": "text/html"}
PAGE = Reply(b"<p>here", headers=HTML)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(module, "TIMEOUT_S", 60.0)


@pytest.fixture
def site(open_site):
    return open_site()


def get(urls, delay_s=0.0):
    found = list(Fetcher("tester/1.0", delay_s, is_fit).pages(urls, 4))
    assert sorted(url for url, _, _ in found) == sorted(urls)
    return {url: reason or page for url, reason, page in found}


def test_rules_come_first_and_requests_to_a_host_one_by_one(site, monkeypatch):
    seen, lock, under_way, ask = [], threading.Lock(), set(), Fetcher._ask

    def count(self, *given):
        mine = object()
        with lock:
            under_way.add(mine)
            seen.append(len(under_way))
        try:
            return ask(self, *given)
        finally:
            with lock:
                under_way.remove(mine)

    monkeypatch.setattr(Fetcher, "_ask", count)
    urls = [site.text(f"/{n}", f"page {n}") for n in range(9)]
    assert all(f"page {n}" in page for n, page in enumerate(get(urls).values()))
    assert site.asked == ["/robots.txt", *(f"/{n}" for n in range(9))]
    assert (site.agents, seen) == ({"tester/1.0"}, [1] * 10)


def test_why_there_is_no_page_is_told(site, open_site, monkeypatch):
    answer = module._answer

    def answer_as_if_begun_long_ago(response, is_page, until_s):
        has_no_end = response.url.endswith("/endless")
        return answer(response, is_page, until_s - 120.0 * has_no_end)

    monkeypatch.setattr(module, "_answer", answer_as_if_begun_long_ago)
    monkeypatch.setattr(module, "MOST_BYTES", 1_000_000)
    other = open_site()
    other.put("/robots.txt", Reply(b"User-agent: *\nDisallow: /no"))
    large = b"<p>" + b"x" * 3_000_000
    there = other.put("/yes", PAGE)
    packed = HTML | {"Content-Encoding": "gzip"}
    cases = {
        f"{site.url}/gone": "HTTP 404",
        site.put("/secret", Reply(status=403)): "HTTP 403",
        site.put("/image", Reply(b"abc", headers={"Content-Type": "image/png"})): "no page",
        site.put("/huge", Reply(large, headers=HTML)): "too large",
        site.put("/bomb", Reply(gzip.compress(large), headers=packed)): "too large",
        site.put("/endless", Reply(b"<p>a", headers=HTML, drips=True)): "timeout",
        site.put("/cut", Reply(b"<p>a", headers=HTML, breaks_off=True)): "no connection",
        site.put("/loop", Reply(status=302, headers={"Location": "/loop"})): "too many redirects",
        site.put("/file", Reply(status=302, headers={"Location": "file:///etc/x"})): "malformed",
        site.put("/busy", Reply(status=429)): "HTTP 429",
        site.put("/forbidden", Reply(status=301, headers={"Location": f"{other.url}/no"})):
            "robots.txt",
        site.put("/moved", Reply(status=301, headers={"Location": there})): "<p>here",
        site.put("/blank", Reply(status=308, headers={"Location": "/a Ã¼"})): "<p>here",
        site.put("/mended", Reply(status=503), Reply(status=429), PAGE): "<p>here",
        "nonsense": "malformed",
    }  # fmt: skip
    site.put("/a%20%C3%BC", PAGE)
    assert get(list(cases)) == cases
    asked = {path: site.asked.count(path) for path in ("/busy", "/mended", "/loop", "/secret")}
    assert asked == {"/busy": 3, "/mended": 3, "/loop": 6, "/secret": 1}
    assert "/no" not in other.asked


@pytest.mark.parametrize(
    ("robots", "reason"),
    [
        (Reply(status=500), "robots.txt: HTTP 500"),
        (Reply(status=403), "robots.txt"),
        (Reply(b"User-agent: tester\nDisallow: /\n"), "robots.txt"),
        (Reply(status=429, headers={"Retry-After": "99999"}), "HTTP 429, for too long"),
    ],
)
def test_a_site_that_does_not_say_yes_is_not_asked_for_pages(site, robots, reason):
    site.put("/robots.txt", robots)
    assert set(get([site.text(f"/{n}", "page") for n in range(3)]).values()) == {reason}
    assert set(site.asked) == {"/robots.txt"}


def test_a_host_that_asks_for_a_long_rest_is_given_up(site):
    urls = [
        site.text("/0", "page"),
        site.put("/1", Reply(status=503, headers={"Retry-After": "900"})),
        site.text("/2", "page"),
    ]
    assert list(get(urls).values())[1:] == ["HTTP 503", "HTTP 503, for too long"]
    assert "/2" not in site.asked


def test_waits_are_as_long_as_asked_for(site, monkeypatch):
    clock, slept = [100.0], []

    def sleep(seconds):
        slept.append(round(seconds, 3))
        clock[0] += seconds

    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(module.time, "sleep", sleep)
    monkeypatch.setattr(module, "FIRST_WAIT_S", 2.0)
    site.put("/robots.txt", Reply(b"User-agent: *\nCrawl-delay: 5"))
    busy = Reply(status=503, headers={"Retry-After": "40"})
    host = module.Host(f"{site.url}/robots.txt", 1.0)
    fetcher = Fetcher("tester/1.0", 1.0, is_fit)
    fetcher._hosts[fetcher._name(f"{site.url}/")] = host
    for url in (site.put("/0", PAGE), site.put("/1", busy, Reply(status=503), PAGE)):
        assert fetcher._page(url)[1] == ""
    # The rules at once, then by them; after what the server asks for, else after longer each time.
    assert slept == [0.0, 5.0, 5.0, 40.0, 5.0]
