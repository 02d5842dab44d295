"""Against a real server on this machine that knows ranges, breaks off, redirects and lies."""

import hashlib
import http.server
import random
import re
import threading
from dataclasses import dataclass, field

import pytest

from dataset.errors import DatasetError
from dataset.fetch import download as module
from dataset.fetch.catalogue import RemoteFile, base_url
from dataset.fetch.download import fetch

CONTENT = random.Random(0).randbytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Site:
    """What the server does."""

    content: bytes = CONTENT
    tag: str = '"v1"'
    break_off_after: list[int] = field(default_factory=list)
    """Bytes to send in each coming answer before the connection ends."""
    announced: str | None = None
    knows_ranges: bool = True
    statuses: list[int] = field(default_factory=list)
    """Errors to send first."""
    starts: list[int] = field(default_factory=list)
    """Where each answer began."""
    url: str = ""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"
    site: Site

    def do_GET(self):
        if self.site.statuses:
            self.send_error(self.site.statuses.pop(0))
            return
        if self.path.startswith("/hub/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/hub"))
            if self.site.announced:
                self.send_header("X-Linked-ETag", f'"{self.site.announced}"')
            self.end_headers()
            return
        if not self.path.endswith("/file.bin"):
            self.send_error(404)
            return
        self._send(self._start())

    def _start(self):
        asked = self.headers.get("Range")
        if asked and self.site.knows_ranges and self.headers.get("If-Range") == self.site.tag:
            return int(asked.removeprefix("bytes=").removesuffix("-"))
        return 0

    def _send(self, start):
        if start >= len(self.site.content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(self.site.content)}")
            self.end_headers()
            return
        self.site.starts.append(start)
        rest = self.site.content[start:]
        self.send_response(206 if start else 200)
        if start:
            end = len(self.site.content)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{end}")
        self.send_header("Content-Length", str(len(rest)))
        self.send_header("ETag", self.site.tag)
        self.end_headers()
        limit = self.site.break_off_after.pop(0) if self.site.break_off_after else len(rest)
        self.wfile.write(rest[:limit])

    def log_message(self, *_):
        pass


@pytest.fixture
def site():
    site = Site()
    handler = type("HandlerOfSite", (Handler,), {"site": site})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_port}"
    yield site
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(module, "WAIT_S", 0.0)


def get(site, folder, sha256=SHA256, path="a/file.bin", url=None):
    lines = []
    fetch([RemoteFile("here.bin", path, sha256)], folder, url or site.url, lines.append)
    assert [one.name for one in folder.iterdir()] == ["here.bin"]
    return (folder / "here.bin").read_bytes(), lines


def test_a_file_is_fetched_once(site, tmp_path):
    assert get(site, tmp_path / "new")[0] == CONTENT
    assert get(site, tmp_path / "new") == (CONTENT, [])
    assert site.starts == [0]


def test_a_broken_connection_is_gone_on_from(site, tmp_path):
    site.break_off_after = [100_000, 0, 0, 50_000, 0]
    content, lines = get(site, tmp_path)
    assert content == CONTENT
    assert site.starts == [0, 100_000, 100_000, 100_000, 150_000, 150_000]
    assert "trying again from 100,000 bytes" in lines[1]


def stop_half_way(site, folder):
    site.break_off_after = [100_000, 0, 0, 0, 0]
    with pytest.raises(DatasetError, match="ended 200,000 bytes early"):
        get(site, folder)
    assert (folder / "here.bin.partial").stat().st_size == 100_000
    site.break_off_after.clear()
    site.starts.clear()


def test_a_later_run_goes_on_too(site, tmp_path):
    stop_half_way(site, tmp_path)
    assert get(site, tmp_path)[0] == CONTENT
    assert site.starts == [100_000]


def test_a_file_that_changed_meanwhile_is_fetched_from_the_start(site, tmp_path):
    stop_half_way(site, tmp_path)
    site.tag, site.content = '"v2"', CONTENT[::-1]
    assert get(site, tmp_path, None)[0] == CONTENT[::-1]
    assert site.starts == [0]


def test_a_server_without_ranges_is_fetched_from_the_start(site, tmp_path):
    stop_half_way(site, tmp_path)
    site.knows_ranges = False
    assert get(site, tmp_path)[0] == CONTENT
    assert site.starts == [0]


def test_a_file_that_was_whole_already_is_taken(site, tmp_path):
    stop_half_way(site, tmp_path)
    (tmp_path / "here.bin.partial").write_bytes(CONTENT)
    assert get(site, tmp_path)[0] == CONTENT
    assert site.starts == []


def test_a_shorter_file_on_the_server_is_fetched_anew(site, tmp_path):
    stop_half_way(site, tmp_path)
    site.content = CONTENT[:50_000]
    assert get(site, tmp_path, None)[0] == CONTENT[:50_000]


def test_a_busy_server_is_asked_again(site, tmp_path):
    site.statuses = [503, 429]
    assert get(site, tmp_path)[0] == CONTENT


def test_a_wrong_digest_leaves_nothing_to_go_on_from(site, tmp_path):
    with pytest.raises(DatasetError, match=f"wrong SHA-256 {SHA256}, should be 0000.*run again"):
        get(site, tmp_path, "0" * 64)
    assert list(tmp_path.iterdir()) == []


def test_the_digest_beside_a_redirect_counts(site, tmp_path):
    site.announced = "1" * 64
    with pytest.raises(DatasetError, match="should be 1111"):
        get(site, tmp_path, None, "hub/a/file.bin")
    site.announced = SHA256
    assert get(site, tmp_path, None, "hub/a/file.bin")[0] == CONTENT


def test_a_file_put_there_by_hand_is_checked(site, tmp_path):
    (tmp_path / "here.bin").write_bytes(b"wrong")
    with pytest.raises(DatasetError, match=r"wrong SHA-256 .*here.bin: delete it and run again"):
        get(site, tmp_path)
    assert (tmp_path / "here.bin").read_bytes() == b"wrong"


def test_offline_it_says_which_files_go_where(tmp_path):
    files = [RemoteFile("a.bin", "x/a.bin", None), RemoteFile("b.bin", "x/b.bin", None)]
    (tmp_path / "a.bin").write_bytes(b"there")
    with pytest.raises(DatasetError) as caught:
        fetch(files, tmp_path, "http://127.0.0.1:1", lambda line: None)
    message = str(caught.value)
    assert "cannot get http://127.0.0.1:1/x/b.bin ([Errno" in message
    assert f"put these files into {tmp_path} and run the same command again" in message
    assert "a.bin  there\n  b.bin  from http://127.0.0.1:1/x/b.bin" in message


def test_a_file_that_is_not_there_is_not_asked_for_again(site, tmp_path):
    site.statuses = [404, 404]
    with pytest.raises(DatasetError, match=r"cannot get .*Not Found"):
        get(site, tmp_path)
    assert site.statuses == [404]


def test_the_mirror_given_wins_over_the_environments(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://env/")
    assert base_url("http://given/") == "http://given"
    assert base_url(None) == "http://env"
    monkeypatch.delenv("HF_ENDPOINT")
    assert base_url(None).startswith("https://")


@pytest.mark.parametrize("url", ["notaurl", "ftp://host", "http://", "http://[x"])
def test_what_is_no_url_is_named_with_where_it_came_from(monkeypatch, url):
    with pytest.raises(DatasetError, match=f"^--base-url {re.escape(url)}: give a URL such as"):
        base_url(url)
    monkeypatch.setenv("HF_ENDPOINT", url)
    with pytest.raises(DatasetError, match=r"^\$HF_ENDPOINT "):
        base_url(None)
