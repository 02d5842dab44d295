"""`download`: pages of a list of addresses to one file of JSON lines, however often stopped."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from queue import Empty, SimpleQueue

from dataset.crawl.hosts import Hosts, Task, Turn
from dataset.crawl.journal import NAME, Journal
from dataset.crawl.pages import Answer, Fetcher
from dataset.crawl.text import Extract, decoded, extractor
from dataset.crawl.urls import UrlFilter, is_fit
from dataset.errors import DatasetError
from dataset.files import writing
from dataset.locks import locked
from dataset.outputs import JSON_LINES, report_path, require_new, write_report, written
from dataset.progress import Progress
from dataset.readers.blocks import Bad, Reading, blocks

PLAN = "plan.json"
# Addresses looked at beside each other, so that one host with many does not keep all waiting.
WINDOW = 100_000
MOST_HOPS = 5
FIRST_WAIT_S = 2.0
ID_BYTES = 8


@dataclass(frozen=True)
class DownloadSettings:
    """How pages are asked for."""

    user_agent: str
    extract: str = "article"
    """``article`` or ``visible``."""
    host_delay_s: float = 1.0
    host_at_once: int = 1
    at_once: int = 32
    timeout_s: float = 30.0
    most_bytes: int = 10 << 20
    attempts: int = 3
    longest_wait_s: float = 600.0
    """A host that asks to be left alone for longer is given up."""


def download(
    reading: Reading,
    settings: DownloadSettings,
    output: Path,
    say: Callable[[str], None],
    restart: bool = False,
) -> dict[str, int]:
    """Write the texts of pages, in the list's order, each with its address and an id.

    What became of an address is written down at once: killed at any moment, the same call goes on
    with what is missing.

    Args:
        reading: Lists with an address a line, or records with one under the key.
        settings: How pages are asked for.
        output: File to write, packed by its ending; must not exist.
        say: Gets one line for each thing worth telling.
        restart: Drop unfinished work of an earlier run.

    Returns:
        What was done, counted by name; also in a file beside the output.

    Raises:
        DatasetError: A file is in the way or cannot be used, or unfinished work is of other
            addresses or options.
    """
    extract = extractor(settings.extract)
    require_new(output, JSON_LINES)
    require_new(report_path(output))
    folder = output.with_name(f"{output.name}.parts")
    with locked(folder, drop_empty=True):
        bad: list[Bad] = []
        counts = Counter({"read": sum(1 for _ in _urls(reading, bad)), "written": 0})
        counts["bad lines"] = len(bad)
        if not counts["read"]:
            first = f" ({reading.words(bad[0])})" if bad else ""
            raise DatasetError(f"the input holds no address under '{reading.keys[0]}'{first}")
        _claim(folder, reading, settings, restart)
        journal = Journal(folder / NAME, counts["read"])
        try:
            if journal.num_done:
                say(f"going on: what became of {journal.num_done:,} addresses is known")
            _Download(reading, settings, journal, extract).run()
            with written(output, report_path(output)) as file:
                for reason, record in journal.outcomes():
                    counts[f"dropped: {reason}" if record is None else "written"] += 1
                    if record is not None:
                        line = json.dumps(record, ensure_ascii=False)
                        file.write(line.encode(errors="replace") + b"\n")
                write_report(output, counts, map(reading.words, bad))
        finally:
            journal.close()
        (folder / NAME).unlink()
        (folder / PLAN).unlink()
    return dict(counts)


def _claim(folder: Path, reading: Reading, settings: DownloadSettings, restart: bool) -> None:
    """See that unfinished work is this; what decides nothing in a text may be another."""
    plan = {
        "input": [[str(f.path), f.size_bytes, f.modified_ns] for f in reading.files],
        "key": reading.keys[0],
        "extract": settings.extract,
        "most_bytes": settings.most_bytes,
    }
    path = folder / PLAN
    if path.exists() and not restart:
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            changed = [name for name, value in plan.items() if before.get(name) != value]
        except (ValueError, AttributeError):
            changed = ["its plan, which cannot be read"]
        if not changed:
            return
        if (folder / NAME).exists():
            raise DatasetError(
                f"{folder} holds unfinished work with other {', '.join(changed)}: give the same "
                "again to go on, or --restart to drop it"
            )
    (folder / NAME).unlink(missing_ok=True)
    with writing(path):
        path.write_text(json.dumps(plan) + "\n", encoding="utf-8")


def _urls(reading: Reading, bad: list[Bad]) -> Generator[str, None, None]:
    for block in blocks(reading):
        for record in block.records(reading.keys, bad):
            yield from map(str.strip, record.texts[reading.keys[0]])


class _Download:
    """One thread decides what is asked for and writes; others ask and make texts."""

    def __init__(
        self, reading: Reading, settings: DownloadSettings, journal: Journal, extract: Extract
    ) -> None:
        self._settings, self._journal, self._extract = settings, journal, extract
        self._source = _urls(reading, [])
        self._urls = enumerate(self._source)
        self._filter = UrlFilter()
        self._hosts = Hosts(settings.user_agent, settings.host_delay_s, settings.host_at_once)
        self._fetcher = Fetcher(settings.user_agent, settings.timeout_s, settings.most_bytes)
        self._answers: SimpleQueue[tuple[Turn, Answer, str]] = SimpleQueue()
        self._num_active = self._num_pages = 0
        self._progress = Progress("downloading", reading.total_bytes)
        self._done_bytes = 0

    def run(self) -> None:
        """Find out what becomes of every address."""
        pool = ThreadPoolExecutor(self._settings.at_once)
        is_over = False
        try:
            while not is_over:
                self._fill()
                self._start(pool)
                is_over = not self._num_active and not self._hosts.num_waiting
                if not is_over:
                    self._wait()
        finally:
            # After Ctrl-C nobody wants to wait for a slow server.
            pool.shutdown(wait=is_over, cancel_futures=True)
            self._fetcher.close()
            self._source.close()
            self._progress.close()

    def _fill(self) -> None:
        while self._hosts.num_waiting < WINDOW:
            number, url = next(self._urls, (-1, ""))
            if number < 0:
                return
            reason = self._filter.reason(url)
            if self._journal.has(number):
                self._tell_progress(url)
            elif reason:
                self._finish(number, url, reason)
            else:
                self._hosts.add(Task(number, url, url))

    def _start(self, pool: ThreadPoolExecutor) -> None:
        while self._num_active < self._settings.at_once:
            turn = self._hosts.take(time.monotonic())
            if turn is None:
                return
            if turn.task and turn.refusal:
                self._finish(turn.task.number, turn.task.listed, turn.refusal)
            else:
                self._num_active += 1
                pool.submit(self._ask, turn)

    def _ask(self, turn: Turn) -> None:
        """Ask, in a thread of its own."""
        text = ""
        try:
            if turn.task is None:
                answer = self._fetcher.robots(turn.host.robots_url)
            else:
                answer = self._fetcher.page(turn.task.url)
                if not answer.reason:
                    page = decoded(answer.body, answer.content_type)
                    is_plain = answer.content_type.startswith("text/plain")
                    text = (page if is_plain else self._extract(page)).strip()
        except Exception as error:  # noqa: BLE001 - one odd page is not to end all
            answer = Answer(f"error: {type(error).__name__}")
        self._answers.put((turn, answer, text))

    def _wait(self) -> None:
        """Take the next answer, or wait for the next host's time."""
        next_s = self._hosts.next_s() if self._num_active < self._settings.at_once else None
        wait_s = None if next_s is None else max(0.0, next_s - time.monotonic())
        try:
            turn, answer, text = self._answers.get(timeout=wait_s)
        except Empty:
            return
        self._num_active -= 1
        if turn.task is None:
            self._take_rules(turn, answer)
        else:
            self._take_page(turn, turn.task, answer, text)

    def _take_rules(self, turn: Turn, answer: Answer) -> None:
        host, free_s = turn.host, 0.0
        if not answer.may_pass:
            self._hosts.set_rules(host, answer)
        else:
            host.attempts += 1
            free_s = self._put_off(turn, answer, host.attempts)
            if not free_s:
                # Whoever cannot be asked what is allowed is not asked for anything.
                host.closed = host.closed or f"robots.txt: {answer.reason}"
        self._hosts.release(host, free_s)

    def _take_page(self, turn: Turn, task: Task, answer: Answer, text: str) -> None:
        free_s = 0.0
        if answer.moved_to:
            task.hops += 1
            task.url = answer.moved_to
            if task.hops > MOST_HOPS:
                self._finish(task.number, task.listed, "too many redirects")
            elif not is_fit(task.url):
                self._finish(task.number, task.listed, "malformed")
            else:
                self._hosts.add(task)
        elif answer.may_pass:
            task.attempts += 1
            free_s = self._put_off(turn, answer, task.attempts)
            if free_s:
                self._hosts.add(task)
            else:
                self._finish(task.number, task.listed, answer.reason)
        else:
            reason = answer.reason or ("" if text else "no text")
            self._finish(task.number, task.listed, reason, text)
        self._hosts.release(turn.host, free_s)

    def _put_off(self, turn: Turn, answer: Answer, attempts: int) -> float:
        """Until when a host is left alone before another attempt; 0 for no other."""
        if answer.retry_after_s > self._settings.longest_wait_s:
            turn.host.closed = f"{answer.reason}, for longer than --longest-wait"
            return 0.0
        if attempts >= self._settings.attempts:
            return 0.0
        wait_s = max(answer.retry_after_s, FIRST_WAIT_S * 2.0 ** (attempts - 1))
        return time.monotonic() + wait_s

    def _finish(self, number: int, url: str, reason: str, text: str = "") -> None:
        name = blake2b(url.encode(), digest_size=ID_BYTES).hexdigest()
        record = None if reason else {"id": name, "url": url, "text": text}
        self._journal.add(number, reason, record)
        self._num_pages += not reason
        self._tell_progress(url)

    def _tell_progress(self, url: str) -> None:
        self._done_bytes += len(url) + 1
        self._progress.reach(self._done_bytes, f"{self._num_pages:,} pages")
