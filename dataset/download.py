"""Pages from their hosts: by each host's rules, and none asked too often."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from http.cookiejar import DefaultCookiePolicy
from queue import SimpleQueue
from urllib.parse import urljoin, urlsplit
from urllib.robotparser import RobotFileParser

import requests
from trafilatura.utils import decode_file
from urllib3.exceptions import HTTPError

PAGE_TYPES = ("text/html", "application/xhtml+xml")
# Too many requests, and servers that are not well: asking again may help.
PASSING = frozenset((408, 425, 429, 500, 502, 503, 504))
FORBIDDEN = (401, 403)
MOVED = frozenset((301, 302, 303, 307, 308))
MOST_HOPS = 5
ATTEMPTS = 3
FIRST_WAIT_S = 2.0
LONGEST_WAIT_S = 600.0
"""A host that asks to be left alone for longer is given up."""
TIMEOUT_S = 30.0
"""For the connection, each wait, and a whole page."""
MOST_BYTES = 10 << 20
"""Of a page, unpacked."""
CHUNK_BYTES = 1 << 16


@dataclass
class Answer:
    """What came of a request."""

    reason: str = ""
    """Why there is no page; empty when there is one."""
    body: bytes = b""
    status: int = 0
    moved_to: str = ""
    may_pass: bool = False
    """Whether asking again may help."""
    retry_after_s: float = 0.0


@dataclass
class Host:
    """One host; whoever asks it holds its lock."""

    robots_url: str
    delay_s: float
    free_s: float = 0.0
    """When the next request may begin."""
    rules: RobotFileParser | None = None
    closed: str = ""
    """Why nothing more is asked of it."""
    lock: threading.Lock = field(default_factory=threading.Lock)


class Fetcher:
    """Asks for pages.

    Args:
        user_agent: Who asks; ``robots.txt`` goes by it.
        delay_s: Between two requests to a host; its ``Crawl-delay`` may ask for more.
        is_fit: Tells whether a page can be asked for by an address.
    """

    def __init__(self, user_agent: str, delay_s: float, is_fit: Callable[[str], bool]) -> None:
        self._user_agent, self._delay_s, self._is_fit = user_agent, delay_s, is_fit
        self._hosts: dict[str, Host] = {}
        self._lock = threading.Lock()
        self._of_thread = threading.local()

    def pages(self, urls: Iterable[str], at_once: int) -> Iterator[tuple[str, str, str]]:
        """Yield each address with its page, or with the reason why there is none.

        Args:
            urls: Addresses; those of a host are asked for one after the other.
            at_once: Hosts that are asked at a time.
        """
        by_host = defaultdict(list)
        for url in urls:
            by_host[self._name(url)].append(url)
        found: SimpleQueue[tuple[str, str, str]] = SimpleQueue()
        pool = ThreadPoolExecutor(at_once)
        try:
            for some in by_host.values():
                pool.submit(self._all_pages, some, found)
            for _ in range(sum(map(len, by_host.values()))):
                yield found.get()
        finally:
            # After Ctrl-C nobody wants to wait for a slow server.
            pool.shutdown(wait=False, cancel_futures=True)

    def _all_pages(self, urls: list[str], found: SimpleQueue[tuple[str, str, str]]) -> None:
        for url in urls:
            found.put(self._page(url))

    def _name(self, url: str) -> str:
        return urlsplit(url).netloc.lower() if self._is_fit(url) else ""

    def _page(self, url: str) -> tuple[str, str, str]:
        place = url
        try:
            for _ in range(MOST_HOPS + 1):
                if not self._is_fit(place):
                    return url, "malformed", ""
                answer = self._asked(place)
                if not answer.moved_to:
                    return url, answer.reason, decode_file(answer.body)
                place = answer.moved_to
        except Exception as error:  # noqa: BLE001 - one odd page is not to end all
            return url, f"error: {type(error).__name__}", ""
        return url, "too many redirects", ""

    def _asked(self, url: str) -> Answer:
        with self._lock:
            robots_url = f"{urlsplit(url).scheme}://{self._name(url)}/robots.txt"
            host = self._hosts.setdefault(self._name(url), Host(robots_url, self._delay_s))
        with host.lock:
            if host.rules is None and not host.closed:
                self._read_rules(host)
            if host.closed or host.rules is None:
                return Answer(host.closed)
            if not host.rules.can_fetch(self._user_agent, url):
                return Answer("robots.txt")
            return self._patiently(host, url, is_page=True)

    def _read_rules(self, host: Host) -> None:
        answer = self._patiently(host, host.robots_url, is_page=False)
        if answer.may_pass:
            # Whoever cannot be asked what is allowed is not asked for anything.
            host.closed = host.closed or f"robots.txt: {answer.reason}"
            return
        rules, lines = RobotFileParser(), answer.body.decode("utf-8", "replace").splitlines()
        if answer.status in FORBIDDEN:
            lines = ["User-agent: *", "Disallow: /"]
        rules.parse(lines)
        rules.modified()
        asked_s = float(rules.crawl_delay(self._user_agent) or 0)
        host.rules, host.delay_s = rules, max(self._delay_s, asked_s)
        host.free_s = time.monotonic() + host.delay_s  # the rules were a request, too

    def _patiently(self, host: Host, url: str, is_page: bool) -> Answer:
        """Ask when the host's time has come, and again while that may help."""
        for attempt in range(1, ATTEMPTS + 1):
            time.sleep(max(0.0, host.free_s - time.monotonic()))
            host.free_s = time.monotonic() + host.delay_s
            answer = self._ask(url, is_page)
            if answer.retry_after_s > LONGEST_WAIT_S:
                host.closed = f"{answer.reason}, for too long"
            if not answer.may_pass or host.closed or attempt == ATTEMPTS:
                break
            wait_s = max(answer.retry_after_s, FIRST_WAIT_S * 2 ** (attempt - 1))
            host.free_s = max(host.free_s, time.monotonic() + wait_s)
        return answer

    def _session(self) -> requests.Session:
        session: requests.Session | None = getattr(self._of_thread, "session", None)
        if session is None:
            session = self._of_thread.session = requests.Session()
            session.headers["User-Agent"] = self._user_agent
            session.max_redirects = MOST_HOPS
            # Neither passwords of this machine's user nor cookies are anybody's business.
            session.auth = lambda request: request
            session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        return session

    def _ask(self, url: str, is_page: bool) -> Answer:
        until_s = time.monotonic() + TIMEOUT_S
        try:
            with self._session().get(
                url, stream=True, timeout=TIMEOUT_S, allow_redirects=not is_page
            ) as response:
                return _answer(response, is_page, until_s)
        except requests.TooManyRedirects:
            return Answer("too many redirects", status=404)
        except (requests.exceptions.InvalidURL, requests.exceptions.InvalidSchema, UnicodeError):
            return Answer("malformed")
        except (requests.RequestException, HTTPError, OSError) as error:
            is_slow = "timed out" in str(error).lower()
            return Answer("timeout" if is_slow else "no connection", may_pass=True)


def _answer(response: requests.Response, is_page: bool, until_s: float) -> Answer:
    status, headers = response.status_code, response.headers
    if is_page and status in MOVED and headers.get("Location"):
        # Bytes of UTF-8 and blanks are there as the server has them; an address has neither.
        place = headers["Location"].encode("latin-1").decode("utf-8", "replace")
        return Answer(moved_to=requests.utils.requote_uri(urljoin(response.url, place)))
    if status != requests.codes.ok:
        wait_s = _seconds(headers.get("Retry-After", ""))
        return Answer(f"HTTP {status}", b"", status, "", status in PASSING, wait_s)
    kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if is_page and kind and kind not in PAGE_TYPES:
        return Answer("no page", status=status)
    body = bytearray()
    # Piece by piece as it comes: a server that sends a byte a second would be waited for.
    while chunk := response.raw.read1(CHUNK_BYTES, decode_content=True):
        body += chunk
        if len(body) > MOST_BYTES:
            if is_page:
                return Answer("too large", status=status)
            break
        if time.monotonic() > until_s:
            return Answer("timeout", may_pass=True)
    return Answer("", bytes(body), status)


def _seconds(retry_after: str) -> float:
    """Return what ``Retry-After`` says, in seconds or as a date; 0 when it says nothing."""
    if retry_after.strip().isdecimal():
        return float(retry_after)
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    return 0.0
