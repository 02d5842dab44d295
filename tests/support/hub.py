"""A Hugging Face hub on this machine: it redirects large files, breaks off, and lies on demand."""

import hashlib
import http.server
import threading
from dataclasses import dataclass, field

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the server has and does."""

    files: dict[str, bytes] = field(default_factory=dict)
    """By path, ``REPOSITORY/resolve/main/NAME``."""
    large: set[str] = field(default_factory=set)
    """Paths that are announced by their SHA-256 and lie elsewhere, as the hub has large files."""
    corrupt: set[str] = field(default_factory=set)
    """Paths of which other bytes are sent than are announced."""
    break_off_after: list[int] = field(default_factory=list)
    """Bytes to send in each coming answer before the connection ends."""
    statuses: list[int] = field(default_factory=list)
    """Errors to send first."""
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)
    """Method, path and range of every request."""
    agents: set[str] = field(default_factory=set)
    stalls: bool = False
    """Keep a connection that is to be broken off open until the test is over."""
    go_on: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def starts(self):
        """Where each answer with contents began."""
        return [int(r[6:-1]) if r else 0 for method, _, r in self.asked if method == "GET"]


class Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def _answer(self):
        hub, path = self.hub, self.path.removeprefix("/")
        hub.asked.append((self.command, path, self.headers.get("Range")))
        hub.agents.add(self.headers.get("User-Agent", ""))
        if hub.statuses:
            self.send_error(hub.statuses.pop(0))
            return
        stored = path.removeprefix("storage/")
        if stored not in hub.files:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = hub.files[stored]
        self.sha256 = hashlib.sha256(content).hexdigest()
        if path in hub.large:
            self.send_response(302)
            # Another host to the client, which then keeps what the hub said of the file here.
            elsewhere = hub.url.replace("127.0.0.1", "localhost")
            self.send_header("Location", f"{elsewhere}/storage/{path}")
            self.send_header("X-Linked-Size", str(len(content)))
            self.send_header("X-Linked-ETag", f'"{self.sha256}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self._send(content[::-1] if stored in hub.corrupt else content)

    def _send(self, content):
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        rest = content[start:]
        self.send_response(206 if start else 200)
        if start:
            end = len(content)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{end}")
        self.send_header("Content-Length", str(len(rest)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "HEAD":
            return
        limits = self.hub.break_off_after
        limit = limits.pop(0) if limits else len(rest)
        self.wfile.write(rest[:limit])
        if limit < len(rest) and self.hub.stalls:
            self.wfile.flush()
            self.hub.go_on.wait()
        self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    hub = Hub()
    handler = type("HandlerOfHub", (Handler,), {"hub": hub})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    yield hub
    hub.go_on.set()
    server.shutdown()
    thread.join()
    server.server_close()
