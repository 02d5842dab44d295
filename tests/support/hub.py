"""A Hugging Face hub on this machine."""

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
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of every request."""
    agents: set[str] = field(default_factory=set)
    url: str = ""


class Handler(http.server.BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self):
        self._answer()

    def do_GET(self):
        self._answer()

    def _answer(self):
        hub, path = self.hub, self.path.removeprefix("/")
        hub.asked.append((self.command, path))
        hub.agents.add(self.headers.get("User-Agent", ""))
        if path not in hub.files:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = hub.files[path]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)
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
    server.shutdown()
    thread.join()
    server.server_close()
