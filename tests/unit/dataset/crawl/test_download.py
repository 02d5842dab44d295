import gzip
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from full_disk import files_of_at_most
from processes import wait_for
from web_site import Reply

from dataset.crawl import run as module
from dataset.crawl.journal import NAME, Journal
from dataset.crawl.pages import Fetcher
from dataset.crawl.run import DownloadSettings, download
from dataset.errors import DatasetError
from dataset.locks import locked
from dataset.outputs import report_path
from dataset.readers import inputs
from dataset.readers.blocks import Reading

ROOT = Path(__file__).resolve().parents[4]
FAST = DownloadSettings("tester/1.0", "visible", host_delay_s=0.0, timeout_s=60.0)
HTML = {"Content-Type": "text/html"}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.01)


@pytest.fixture
def site(open_site):
    return open_site()


def listed(tmp_path, urls):
    path = tmp_path / "urls.txt"
    text = "".join(f"{url}\n" for url in urls)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return Reading(inputs.find([str(path)]), ("url",), "line", 200)


def get(tmp_path, urls, settings=FAST, name="out.jsonl", **more):
    """Counts, records and what was told."""
    told = []
    output = tmp_path / name
    counts = download(listed(tmp_path, urls), settings, output, told.append, **more)
    assert json.loads(report_path(output).read_text())["counts"] == counts
    assert not output.with_name(f"{name}.parts").exists()
    return counts, [json.loads(line) for line in output.read_text().splitlines()], told


@pytest.fixture
def at_once(monkeypatch):
    """How many requests were under way when each began, itself among them."""
    seen, lock, under_way, ask = [], threading.Lock(), set(), Fetcher._get

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

    monkeypatch.setattr(Fetcher, "_get", count)
    return seen


def test_texts_come_in_the_lists_order_each_with_its_address_and_an_id(site, tmp_path, at_once):
    urls = [site.text(f"/{n}", f"page {n} grüßt") for n in range(30)]
    # The first comes last.
    site.pages["/0"].insert(0, Reply(status=503))
    counts, records, told = get(tmp_path, urls)
    assert [record["url"] for record in records] == urls
    assert [record["text"] for record in records] == [f"page {n} grüßt" for n in range(30)]
    assert len({record["id"] for record in records}) == 30
    assert counts == {"read": 30, "written": 30, "bad lines": 0}
    assert told == []
    assert site.asked[0] == "/robots.txt"
    assert sorted(site.asked[1:]) == sorted(["/0", *(f"/{n}" for n in range(30))])
    assert site.agents == {"tester/1.0"}
    assert at_once == [1] * 32


def test_the_same_page_has_the_same_id_in_every_list(site, tmp_path):
    urls = [site.text(f"/{n}", f"page {n}") for n in range(2)]
    first = get(tmp_path, urls)[1]
    second = get(tmp_path, urls[::-1], name="again.jsonl")[1]
    assert [record["id"] for record in first] == [record["id"] for record in second[::-1]]


def test_why_a_page_has_no_text_is_counted(site, open_site, tmp_path, monkeypatch):
    read = Fetcher._read

    def read_as_if_begun_long_ago(self, response, types, until_s):
        has_no_end = response.url.endswith("/endless")
        return read(self, response, types, until_s - 2 * FAST.timeout_s * has_no_end)

    monkeypatch.setattr(Fetcher, "_read", read_as_if_begun_long_ago)
    other = open_site()
    other.put("/robots.txt", Reply(b"User-agent: *\nDisallow: /no"))
    page = Reply(b"<p>here", headers=HTML)
    large = b"<p>" + b"x" * 3_000_000
    there = other.put("/yes", page)
    cases = {
        site.put("/gone"): "HTTP 404",
        site.put("/secret", Reply(status=403)): "HTTP 403",
        site.put("/image", Reply(b"abc", headers={"Content-Type": "image/png"})): "no text",
        site.put("/empty", Reply(b"<p> </p>", headers=HTML)): "no text",
        site.put("/huge", Reply(large, headers=HTML)): "too large",
        site.put(
            "/bomb", Reply(gzip.compress(large), headers=HTML | {"Content-Encoding": "gzip"})
        ): "too large",
        site.put("/endless", Reply(b"<p>a", headers=HTML, drips=True)): "timeout",
        site.put("/cut", Reply(b"<p>a", headers=HTML, breaks_off=True)): "no connection",
        site.put("/loop", Reply(status=302, headers={"Location": "/loop"})): "too many redirects",
        site.put("/file", Reply(status=302, headers={"Location": "file:///etc/x"})): "malformed",
        site.put("/busy", Reply(status=429)): "HTTP 429",
        site.put("/ill", Reply(status=503)): "HTTP 503",
        site.put("/forbidden", Reply(status=301, headers={"Location": f"{other.url}/no"})):
            "robots.txt",
        site.put("/moved", Reply(status=301, headers={"Location": there})): None,
        site.put("/blank", Reply(status=308, headers={"Location": "/a Ã¼"})): None,
        site.put("/mended", Reply(status=503), Reply(status=429), page): None,
        site.put("/plain", Reply(b"a < b", headers={"Content-Type": "text/plain"})): None,
        there: None,
        f"{there}#twice": "duplicate",
        "none": "too short",
    }  # fmt: skip
    del site.pages["/gone"]
    site.put("/a%20%C3%BC", page)
    settings = replace(FAST, most_bytes=1_000_000)
    counts, records, _ = get(tmp_path, cases, settings)
    expected = {"read": len(cases), "written": 5, "bad lines": 0}
    for reason in filter(None, cases.values()):
        expected[f"dropped: {reason}"] = expected.get(f"dropped: {reason}", 0) + 1
    assert counts == expected
    assert [record["url"] for record in records] == [url for url, why in cases.items() if not why]
    assert {record["text"] for record in records} == {"here", "a < b"}
    asked = {path: site.asked.count(path) for path in ("/busy", "/ill", "/mended", "/loop")}
    assert asked == {"/busy": 3, "/ill": 3, "/mended": 3, "/loop": 6}
    assert site.asked.count("/secret") == 1
    assert "/no" not in other.asked


@pytest.mark.parametrize(
    ("robots", "reason"),
    [
        (Reply(status=500), "robots.txt: HTTP 500"),
        (Reply(status=403), "robots.txt"),
        (Reply(b"User-agent: tester\nDisallow: /\n"), "robots.txt"),
        (Reply(status=429, headers={"Retry-After": "99999"}),
         "HTTP 429, for longer than --longest-wait"),
    ],
)  # fmt: skip
def test_a_site_that_does_not_say_yes_is_not_asked_for_pages(site, tmp_path, robots, reason):
    site.put("/robots.txt", robots)
    counts, _, _ = get(tmp_path, [site.text(f"/{n}", "page") for n in range(3)])
    assert counts == {"read": 3, "written": 0, "bad lines": 0, f"dropped: {reason}": 3}
    assert set(site.asked) == {"/robots.txt"}


def test_a_host_that_asks_for_a_long_rest_is_given_up(site, tmp_path):
    urls = [
        site.text("/0", "page"),
        site.put("/1", Reply(status=503, headers={"Retry-After": "900"})),
    ]
    urls += [site.text("/2", "page")]
    counts, _, _ = get(tmp_path, urls)
    why = "dropped: HTTP 503, for longer than --longest-wait"
    assert counts == {"read": 3, "written": 1, "bad lines": 0, "dropped: HTTP 503": 1, why: 1}
    assert "/2" not in site.asked


def stop_after(monkeypatch, num_done):
    """Ctrl-C when so much is known."""
    add = Journal.add

    def stopping(self, *outcome):
        if self.num_done >= num_done:
            raise KeyboardInterrupt
        add(self, *outcome)

    monkeypatch.setattr(Journal, "add", stopping)
    return lambda: monkeypatch.setattr(Journal, "add", add)


def test_a_stopped_run_goes_on_and_asks_for_nothing_twice(site, tmp_path, monkeypatch):
    urls = [site.text(f"/{n}", f"page {n}") for n in range(40)] + [f"{site.url}/gone", "bad"]
    whole = get(tmp_path, urls, name="whole.jsonl")[1]
    site.asked.clear()
    go_on = stop_after(monkeypatch, 17)
    settings = replace(FAST, at_once=1)
    with pytest.raises(KeyboardInterrupt):
        get(tmp_path, urls, settings)
    assert not (tmp_path / "out.jsonl").exists()
    go_on()
    # A power cut leaves half a line.
    with (tmp_path / "out.jsonl.parts" / NAME).open("ab") as file:
        file.write(b'{"number": 30, "rea')
    counts, records, told = get(tmp_path, urls)
    assert told == ["going on: what became of 17 addresses is known"]
    assert records == whole
    assert counts["dropped: HTTP 404"] == counts["dropped: too short"] == 1
    # The page that was on its way when it was stopped, and the rules.
    assert len(site.asked) <= 40 + 1 + 1 + 2
    assert all(site.asked.count(f"/{n}") == 1 for n in range(16))


def test_other_addresses_or_options_are_refused_until_restart(site, tmp_path, monkeypatch):
    urls = [site.text(f"/{n}", f"page {n}") for n in range(3)]
    go_on = stop_after(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        get(tmp_path, urls)
    go_on()
    with pytest.raises(DatasetError, match=r"unfinished work with other most_bytes: give the same"):
        get(tmp_path, urls, replace(FAST, most_bytes=5))
    with pytest.raises(DatasetError, match=r"other input: give the same again to go on, or --rest"):
        get(tmp_path, urls[:2])
    assert get(tmp_path, urls[:2], restart=True)[0] == {"read": 2, "written": 2, "bad lines": 0}
    with pytest.raises(DatasetError, match=r"out.jsonl is there already"):
        get(tmp_path, urls)


def test_a_line_written_twice_or_of_another_list_is_dropped_with_what_follows(tmp_path):
    path = tmp_path / "journal"
    journal = Journal(path, 3)
    for number in (2, 0):
        journal.add(number, "gone", None)
    journal.close()
    for bad in (b'{"number": 2}\n', b'{"number": 7}\n', b"[]\n", b'{"number": 1}'):
        whole = path.read_bytes()
        path.write_bytes(whole + bad + b'{"number": 1, "reason": "x", "record": null}\n')
        journal = Journal(path, 3)
        assert [journal.has(number) for number in range(3)] == [True, False, True]
        journal.close()
        assert path.read_bytes() == whole


def test_a_full_disk_is_named_and_the_same_call_goes_on(site, tmp_path):
    urls = [site.text(f"/{n}", "text " * 100) for n in range(20)]
    with files_of_at_most(5000), pytest.raises(DatasetError, match=r"make room|no room"):
        get(tmp_path, urls)
    counts, _, told = get(tmp_path, urls)
    assert counts == {"read": 20, "written": 20, "bad lines": 0}
    assert told[0].startswith("going on: ")


def test_a_list_without_addresses_is_refused_and_leaves_nothing(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"uri": "http://a.example"}')
    reading = Reading(inputs.find([str(tmp_path / "in.jsonl")]), ("url",), "line")
    with pytest.raises(
        DatasetError, match=r"no address under 'url' \(.*in.jsonl:1: no key 'url'\)"
    ):
        download(reading, FAST, tmp_path / "out.jsonl", print)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_two_runs_of_the_same_output_do_not_meet(site, tmp_path):
    with locked(tmp_path / "out.jsonl.parts"), pytest.raises(DatasetError, match="in use by anot"):
        get(tmp_path, [site.url])


@pytest.mark.slow
def test_killed_again_and_again_none_is_lost_and_none_comes_twice(site, tmp_path):
    urls = [site.text(f"/{n}", f"page {n}") for n in range(120)]
    listed(tmp_path, urls)
    output = tmp_path / "out.jsonl.gz"
    command = [
        sys.executable, "-m", "dataset", "download", "--input", tmp_path / "urls.txt", "--output",
        output, "--user-agent", "tester/1.0", "--extract", "visible", "--host-delay", "0.01",
    ]  # fmt: skip
    num_killed = 0
    for enough in (30, 80):
        # It does not come past this page, however late it is killed.
        site.put(f"/{enough}", Reply(headers=HTML, drips=True))
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
            try:
                wait_for(
                    lambda enough=enough: len(site.asked) >= enough or process.poll() is not None
                )
            finally:
                os.kill(process.pid, signal.SIGKILL)
        num_killed += process.returncode == -signal.SIGKILL
        site.text(f"/{enough}", f"page {enough}")
    assert num_killed == 2
    assert not output.exists()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "going on: what became of " in done.stderr
    with gzip.open(output, "rt") as file:
        records = [json.loads(line) for line in file]
    assert [record["url"] for record in records] == urls
    # Each kill may cost the page that was on its way, and the rules are asked for by each run.
    assert len(site.asked) <= 120 + 3 + 2
