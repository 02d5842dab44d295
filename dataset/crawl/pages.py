"""One request: a page, or why there is none."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.cookiejar import DefaultCookiePolicy
from urllib.parse import urljoin

import requests
from urllib3.exceptions import HTTPError

CHUNK_BYTES = 1 << 16
PAGE_TYPES = ("text/html", "application/xhtml+xml", "text/plain")
# What passes: too many requests, and servers that are not well.
PASSING = frozenset((408, 425, 429, 500, 502, 503, 504))
MOVED = frozenset((301, 302, 303, 307, 308))


@dataclass(frozen=True)
class Answer:
    """What came of a request."""

    reason: str = ""
    """Why there is no page; empty when there is one."""
    body: bytes = b""
    content_type: str = ""
    status: int = 0
    moved_to: str = ""
    may_pass: bool = False
    """Whether asking again may help."""
    retry_after_s: float = 0.0
    """How long the server asks to be left alone."""


class Fetcher:
    """Sends requests, from several threads.

    Args:
        user_agent: Who asks.
        timeout_s: For the connection, for each wait, and for a whole page.
        most_bytes: Of a page, unpacked.
    """

    def __init__(self, user_agent: str, timeout_s: float, most_bytes: int) -> None:
        self._user_agent = user_agent
        self._timeout_s = timeout_s
        self._most_bytes = most_bytes
        self._of_thread = threading.local()
        self._sessions: list[requests.Session] = []

    def page(self, url: str) -> Answer:
        """Ask for a page; where it moved to is told and not followed."""
        return self._get(url, PAGE_TYPES)

    def robots(self, url: str) -> Answer:
        """Ask for a site's rules, wherever they moved to; of long ones the beginning counts."""
        return self._get(url, ())

    def close(self) -> None:
        """Close the connections of all threads."""
        for session in self._sessions:
            session.close()

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._of_thread, "session", None)
        if session is None:
            session = self._of_thread.session = requests.Session()
            session.headers["User-Agent"] = self._user_agent
            session.max_redirects = 5
            # Neither passwords of this machine's user nor cookies are anybody's business.
            session.auth = lambda request: request
            session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
            self._sessions.append(session)
        return session

    def _get(self, url: str, types: tuple[str, ...]) -> Answer:
        until_s = time.monotonic() + self._timeout_s
        try:
            with self._session().get(
                url, stream=True, timeout=self._timeout_s, allow_redirects=not types
            ) as response:
                return self._read(response, types, until_s)
        except (requests.Timeout, TimeoutError):
            return Answer("timeout", may_pass=True)
        except requests.TooManyRedirects:
            return Answer("too many redirects", status=404)
        except (requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema, UnicodeError):
            return Answer("malformed")
        except (requests.RequestException, HTTPError, OSError) as error:
            is_slow = "timed out" in str(error).lower()
            return Answer("timeout" if is_slow else "no connection", may_pass=True)

    def _read(self, response: requests.Response, types: tuple[str, ...], until_s: float) -> Answer:
        status, headers = response.status_code, response.headers
        if status in MOVED and headers.get("Location"):
            # Bytes of UTF-8 and blanks are there as the server has them; an address has neither.
            place = headers["Location"].encode("latin-1").decode("utf-8", "replace")
            moved_to = requests.utils.requote_uri(urljoin(response.url, place))
            return Answer(f"HTTP {status}", moved_to=moved_to)
        if status != requests.codes.ok:
            return Answer(
                f"HTTP {status}",
                status=status,
                may_pass=status in PASSING,
                retry_after_s=_seconds(headers.get("Retry-After", "")),
            )
        content_type = headers.get("Content-Type", "")
        if types and content_type and content_type.partition(";")[0].strip().lower() not in types:
            return Answer("no text")
        body = bytearray()
        # Piece by piece as it comes: a server that sends a byte a second would be waited for.
        while chunk := response.raw.read1(CHUNK_BYTES, decode_content=True):
            body += chunk
            if len(body) > self._most_bytes:
                if types:
                    return Answer("too large")
                break
            if time.monotonic() > until_s:
                return Answer("timeout", may_pass=True)
        return Answer("", bytes(body), content_type, status)


def _seconds(retry_after: str) -> float:
    """What ``Retry-After`` says, in seconds or as a date; 0 when it says nothing."""
    try:
        if retry_after.strip().isdecimal():
            return float(retry_after)
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0
