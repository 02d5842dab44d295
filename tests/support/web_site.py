"""Web sites on this machine: they answer what a test tells them to, and remember who asked."""

import contextlib
import http.server
import threading
from dataclasses import dataclass, field

import pytest


@dataclass
class Reply:
    """What a page answers."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    drips: bool = False
    """Send a byte now and then and never come to an end."""
    breaks_off: bool = False
    """Announce more than is sent."""


@dataclass
class Site:
    """What one site has and was asked."""

    pages: dict[str, list[Reply]] = field(default_factory=dict)
    """Replies by path, one after the other; the last stays."""
    asked: list[str] = field(default_factory=list)
    agents: set[str] = field(default_factory=set)
    is_over: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    def put(self, path, *replies):
        """Have a path answer."""
        self.pages[path] = list(replies)
        return self.url + path

    def text(self, path, text):
        """Have a path answer with a page of a text."""
        page = f"<html><body><p>{text}</p></body></html>"
        return self.put(path, Reply(page.encode(), headers={"Content-Type": "text/html"}))


class Handler(http.server.BaseHTTPRequestHandler):
    site: Site

    def do_GET(self):
        site = self.site
        with site.lock:
            site.asked.append(self.path)
            site.agents.add(self.headers.get("User-Agent", ""))
            replies = site.pages.get(self.path, [Reply(status=404)])
            reply = replies.pop(0) if len(replies) > 1 else replies[0]
        with contextlib.suppress(OSError):  # who asked has heard enough
            self._send(reply)

    def _send(self, reply):
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if not reply.drips:
            self.send_header("Content-Length", str(len(reply.body) + 9 * reply.breaks_off))
        self.end_headers()
        self.wfile.write(reply.body)
        while reply.drips and not self.site.is_over.wait(0.05):
            self.wfile.write(b"x")

    def log_message(self, *args):
        pass


@pytest.fixture
def open_site():
    """Open sites; all are closed when the test is over."""
    opened = []

    def start():
        site = Site()
        handler = type("Handler", (Handler,), {"site": site})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        site.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        opened.append((site, server, thread))
        return site

    yield start
    for site, server, thread in opened:
        site.is_over.set()
        server.shutdown()
        server.server_close()
        thread.join()
