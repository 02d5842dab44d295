"""Which address is asked for next: every host by its own rules, none too often."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.robotparser import RobotFileParser

from dataset.crawl.pages import Answer

# As the standard library's reader of these rules has it: who must log in must not look.
FORBIDDEN = (401, 403)
# Hosts remembered although nothing is asked of them any more.
MOST_KNOWN = 50_000


@dataclass
class Task:
    """An address to ask for."""

    number: int
    """Place of its page in the list, from 0."""
    listed: str
    """The address in the list."""
    url: str
    """Where it leads."""
    hops: int = 0
    """How often it moved."""
    attempts: int = 0
    """Requests that brought nothing."""

    @property
    def host(self) -> str:
        """Who is asked."""
        return urlsplit(self.url).netloc.lower()


@dataclass
class Host:
    """One host: what it is to be asked, and since when it may be."""

    robots_url: str
    waiting: deque[Task] = field(default_factory=deque)
    num_active: int = 0
    free_s: float = 0.0
    """When the next request may begin."""
    delay_s: float = 0.0
    rules: RobotFileParser | None = None
    """None until they are known."""
    attempts: int = 0
    """At its rules."""
    closed: str = ""
    """Why nothing more is asked of it."""
    is_listed: bool = False


class Turn(NamedTuple):
    """What is to be done now."""

    host: Host
    task: Task | None
    """None where the host's rules are to be asked for."""
    refusal: str = ""
    """Why nothing is to be asked for after all."""


class Hosts:
    """Takes addresses and gives them out when their time has come; times are in seconds.

    Args:
        user_agent: Whom rules may name.
        delay_s: Between the beginnings of two requests to a host; its rules may ask for more.
        at_once: Requests to a host at a time.
    """

    def __init__(self, user_agent: str, delay_s: float, at_once: int) -> None:
        self._user_agent, self._delay_s, self._at_once = user_agent, delay_s, at_once
        self._hosts: dict[str, Host] = {}
        self._free: list[tuple[float, int, Host]] = []
        self._numbers = count()
        self._most_known = MOST_KNOWN
        self.num_waiting = 0

    def add(self, task: Task) -> None:
        """Take an address."""
        name = task.host
        if name not in self._hosts:
            if len(self._hosts) >= self._most_known:
                self._forget()
            robots_url = f"{urlsplit(task.url).scheme}://{name}/robots.txt"
            self._hosts[name] = Host(robots_url, delay_s=self._delay_s)
        host = self._hosts[name]
        host.waiting.append(task)
        self.num_waiting += 1
        self._list(host)

    def next_s(self) -> float | None:
        """When something may be asked for; None when only answers can change that."""
        return self._free[0][0] if self._free else None

    def take(self, now_s: float) -> Turn | None:
        """What to do now; None when nothing's time has come."""
        while self._free and self._free[0][0] <= now_s:
            host = heapq.heappop(self._free)[2]
            host.is_listed = False
            if host.free_s > now_s:  # it was put off since
                self._list(host)
                continue
            task = None
            if host.rules or host.closed:
                task = host.waiting.popleft()
                self.num_waiting -= 1
                if refusal := self._refusal(host, task):
                    self._list(host)
                    return Turn(host, task, refusal)
            host.num_active += 1
            host.free_s = now_s + host.delay_s
            self._list(host)
            return Turn(host, task)
        return None

    def release(self, host: Host, free_s: float = 0.0) -> None:
        """An answer came; the host is left alone until ``free_s``, if that is later."""
        host.num_active -= 1
        host.free_s = max(host.free_s, free_s)
        self._list(host)

    def _refusal(self, host: Host, task: Task) -> str:
        if host.closed or host.rules is None:
            return host.closed
        return "" if host.rules.can_fetch(self._user_agent, task.url) else "robots.txt"

    def _forget(self) -> None:
        """Drop hosts that nothing is asked of; their rules are asked for again when need be."""
        self._hosts = {
            name: host for name, host in self._hosts.items() if host.waiting or host.num_active
        }
        self._most_known = max(MOST_KNOWN, 2 * len(self._hosts))

    def set_rules(self, host: Host, answer: Answer) -> None:
        """Read a host's rules, or what their lack means."""
        rules, lines = RobotFileParser(), []
        if not answer.reason:
            lines = answer.body.decode("utf-8", "replace").splitlines()
        elif answer.status in FORBIDDEN:
            lines = ["User-agent: *", "Disallow: /"]
        rules.parse(lines)
        rules.modified()
        host.rules = rules
        asked_s = rules.crawl_delay(self._user_agent) or 0
        host.delay_s = max(self._delay_s, float(asked_s))
        # The rules were a request, too.
        host.free_s += host.delay_s - self._delay_s

    def _list(self, host: Host) -> None:
        """Have a host in the heap when it may be asked; rules come first and alone."""
        at_once = self._at_once if host.rules or host.closed else 1
        if host.waiting and not host.is_listed and host.num_active < at_once:
            host.is_listed = True
            heapq.heappush(self._free, (host.free_s, next(self._numbers), host))
