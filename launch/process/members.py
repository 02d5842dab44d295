"""Which processes belong to a run, and how they are ended; no other process is ever touched.

A process belongs to the run when it is in the session of one of its commands, or carries the run's
token in its environment. The token is what finds ranks whose launcher was killed, since torchrun
gives each rank a session of its own, and what is left of a run whose driver is dead.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping

import psutil

TOKEN_VARIABLE = "DOS_RUN_TOKENS"
"""Environment variable that marks the processes of a run; nested runs add theirs after a colon."""
GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL."""
POLL_S = 0.05
YOUNG_S = 1.0
"""Age below which a process may still be about to load its program."""

_TOKEN = re.compile(r"[0-9a-f]{32}")


def new_token() -> str:
    """Return a mark that no other run has."""
    return secrets.token_hex(16)


def mark(environment: Mapping[str, str], token: str) -> dict[str, str]:
    """Return the environment of a run's processes."""
    tokens = [*filter(None, environment.get(TOKEN_VARIABLE, "").split(":")), token]
    return {**environment, TOKEN_VARIABLE: ":".join(tokens)}


class Members:
    """Living processes of one run."""

    def __init__(self, token: str) -> None:
        """Know the run by its token; ``leaders`` come as its commands start."""
        if not _TOKEN.fullmatch(token):
            # An empty one would be "in" the environment of every process there is.
            raise ValueError(f"{token!r} is not the token of a run")
        self.token = token
        self.leaders: set[int] = set()
        """Processes that were started in sessions of their own and are not reaped yet."""
        self._verdicts: dict[int, psutil.Process | None] = {}

    def all(self) -> list[psutil.Process]:
        """Return every living one. psutil tells a reused process id from the process we saw."""
        return [process for process in psutil.process_iter() if self._has(process)]

    def sample(self) -> list[psutil.Process]:
        """Return every living one, cheaply: an id is judged when it is first seen.

        For measuring alone: an id that is reused between two calls keeps its old verdict. One
        thread may call it.
        """
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208 - fast
        for pid in self._verdicts.keys() - pids:
            del self._verdicts[pid]
        for pid in pids - self._verdicts.keys():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                is_ours = self._has(process)
                # What has just been forked has no environment until its program is loaded.
                if is_ours or time.time() - process.create_time() > YOUNG_S:
                    self._verdicts[pid] = process if is_ours else None
        return [process for process in self._verdicts.values() if process is not None]

    def end(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """Ask every one to end; wait until they have, for at most the grace or until ``hurry``."""
        for member in self.all():
            with contextlib.suppress(psutil.Error):
                member.terminate()
                if member.status() == psutil.STATUS_STOPPED:
                    member.resume()  # a stopped process gets its signal when it goes on
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and not hurry():
            if not self.all():
                return
            time.sleep(POLL_S)

    def kill(self) -> None:
        """Kill what is left, again while it starts new processes."""
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            members = self.all()
            if not members:
                return
            for member in members:
                with contextlib.suppress(psutil.Error):
                    member.kill()
            time.sleep(POLL_S)

    def _has(self, process: psutil.Process) -> bool:
        if process.pid == os.getpid():
            return False
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            if process.pid in self.leaders or os.getsid(process.pid) in self.leaders:
                return True
            tokens = process.environ().get(TOKEN_VARIABLE, "").split(":")
            # Asked again here: an empty token would be everybody's.
            return bool(self.token) and self.token in tokens
        except (psutil.Error, OSError):  # it ended meanwhile, or is another user's
            return False


def end_leftovers(token: str) -> list[int]:
    """End what is still alive of a run whose driver is dead.

    Only processes that carry the run's token in their environment are touched: SIGTERM, then
    SIGKILL after the grace.

    Returns:
        Ids of the processes that were there; empty as well when ``token`` is not one.
    """
    try:
        members = Members(token)
    except ValueError:
        return []
    found = [process.pid for process in members.all()]
    if found:
        members.end()
        members.kill()
    return found
