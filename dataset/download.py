"""Pages by trafilatura: by each host's rules, and none asked too often."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from urllib.parse import urlsplit
from urllib.robotparser import RobotFileParser

from courlan import validate_url
from trafilatura.downloads import fetch_response
from trafilatura.settings import use_config

PAGE_TYPES = ("text/html", "application/xhtml+xml")
FORBIDDEN = (401, 403)
MOST_BYTES = 10 << 20
"""Largest page, unpacked."""

Page = tuple[str, str, str]
"""Address, why there is no page (empty when there is one), HTML."""


def host_of(url: str) -> str:
    """Return who is asked for a page: the host with its port; empty for no address."""
    return urlsplit(url).netloc.lower() if validate_url(url)[0] else ""


class Fetcher:
    """Asks for pages.

    Args:
        user_agent: Who asks; ``robots.txt`` goes by it.
        delay_s: Between two requests to a host; its ``Crawl-delay`` may ask for more.
    """

    def __init__(self, user_agent: str, delay_s: float) -> None:
        self._user_agent, self._delay_s = user_agent, delay_s
        self._config = use_config()
        settings = {
            "USER_AGENTS": user_agent.replace("%", "%%"),
            "MAX_FILE_SIZE": str(MOST_BYTES),
            "INSECURE_SSL_FALLBACK": "off",
            "SSRF_PROTECTION": "off",  # a list may name hosts of one's own network
        }
        for name, value in settings.items():
            self._config.set("DEFAULT", name, value)

    def pages(self, urls: Iterable[str], at_once: int) -> Iterator[Page]:
        """Yield each address with its page, or with the reason why there is none.

        Args:
            urls: Addresses; those of a host are asked for one after the other.
            at_once: Hosts that are asked at a time.
        """
        by_host = defaultdict(list)
        for url in urls:
            by_host[host_of(url)].append(url)
        found: SimpleQueue[Page] = SimpleQueue()
        pool = ThreadPoolExecutor(at_once)
        try:
            for host, some in by_host.items():
                pool.submit(self._all_of_host, host, some, found)
            for _ in range(sum(map(len, by_host.values()))):
                yield found.get()
        finally:
            # After Ctrl-C nobody wants to wait for a slow server.
            pool.shutdown(wait=False, cancel_futures=True)

    def _all_of_host(self, host: str, urls: list[str], found: SimpleQueue[Page]) -> None:
        left = list(urls)
        try:
            if host:
                rules, closed = self._rules(urls[0])
                delay_s = max(self._delay_s, float(rules.crawl_delay(self._user_agent) or 0))
            while left:
                url = left[0]
                if not host:
                    reason, page = "malformed", ""
                elif closed or not rules.can_fetch(self._user_agent, url):
                    reason, page = closed or "robots.txt", ""
                else:
                    time.sleep(delay_s)
                    reason, page = self._page(url)
                found.put((left.pop(0), reason, page))
        except Exception as error:  # noqa: BLE001 - one odd host is not to end all
            for url in left:
                found.put((url, f"error: {type(error).__name__}", ""))

    def _rules(self, url: str) -> tuple[RobotFileParser, str]:
        """Return a host's rules, and why nothing is asked of it."""
        parts, rules = urlsplit(url), RobotFileParser()
        address = f"{parts.scheme}://{parts.netloc}/robots.txt"
        answer = fetch_response(address, decode=True, config=self._config)
        lines = (answer.html or "").splitlines() if answer and answer.status == 200 else []
        if answer and answer.status in FORBIDDEN:
            lines = ["User-agent: *", "Disallow: /"]
        rules.parse(lines)
        # Whoever cannot be asked what is allowed is not asked for anything.
        return rules, "" if answer else "robots.txt: no answer"

    def _page(self, url: str) -> tuple[str, str]:
        # Redirects, what may pass when it is asked again, and Retry-After are trafilatura's.
        answer = fetch_response(url, decode=True, config=self._config)
        if answer is None:
            return "no answer", ""
        kind = (answer.headers or {}).get("content-type", "").partition(";")[0].strip().lower()
        if answer.status != 200:
            return f"HTTP {answer.status}", ""
        if kind and kind not in PAGE_TYPES:
            return "no page", ""
        return "", answer.html or ""
