"""Lists of addresses made one: what leads to no text, or is there already, is left out."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b
from ipaddress import IPv4Address
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from dataset.errors import DatasetError
from dataset.outputs import TEXT_LINES, report_path, require_new, write_report, written
from dataset.progress import Progress
from dataset.readers.blocks import Bad, Reading, blocks

BLACKLIST = Path(__file__).with_name("blacklist.toml")
SHORTEST_CHARACTERS = 9
REASONS = ("domain", "extension", "too short", "malformed", "duplicate")
# Below a country's two letters these are no site's own name: it stands before them (x.co.uk).
SHARED_LABELS = frozenset(
    ("ac", "asso", "biz", "co", "com", "edu", "gen", "go", "gob", "gouv", "gov", "id", "ind",
     "info", "mil", "ne", "net", "nom", "or", "org", "sch", "web")
)  # fmt: skip
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_UNFIT = re.compile(r"[\s\x00-\x20\x7f]")


class UrlFilter:
    """Says of one address after the other why it goes.

    Args:
        domains: Names of sites, or hosts with what lies below them.
        extensions: How paths end.
    """

    def __init__(self, domains: Iterable[str] = (), extensions: Iterable[str] = ()) -> None:
        self._domains = frozenset(map(str.lower, domains))
        self._extensions = tuple(map(str.lower, extensions))
        # Digests: a set of tens of millions of addresses would take all memory.
        self._seen: set[bytes] = set()

    @classmethod
    def of_file(cls, blacklist: Path = BLACKLIST) -> UrlFilter:
        """Read the lists ``domains`` and ``extensions`` of a TOML file.

        Raises:
            DatasetError: It cannot be used.
        """
        try:
            lists = tomllib.loads(blacklist.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DatasetError(f"--blacklist {blacklist}: cannot be read: {error}") from error
        for name in ("domains", "extensions"):
            entries = lists.get(name)
            if not isinstance(entries, list) or not all(isinstance(one, str) for one in entries):
                raise DatasetError(
                    f'--blacklist {blacklist}: {name} must be a list of names, such as ["a", "b"]'
                )
        return cls(lists["domains"], lists["extensions"])

    def reason(self, url: str) -> str:
        """Why an address goes, one of `REASONS`; empty when it stays."""
        parts = _split(url)
        host = (parts.hostname or "") if parts else ""
        if host and self._is_listed(host):
            return "domain"
        if parts and self._extensions and parts.path.lower().endswith(self._extensions):
            return "extension"
        if len(url) < SHORTEST_CHARACTERS:
            return "too short"
        if not parts or not is_fit(url):
            return "malformed"
        digest = blake2b(normalized(parts).encode(), digest_size=8).digest()
        if digest in self._seen:
            return "duplicate"
        self._seen.add(digest)
        return ""

    def _is_listed(self, host: str) -> bool:
        labels = host.rstrip(".").split(".")
        if site_name(labels) in self._domains:
            return True
        return any(".".join(labels[at:]) in self._domains for at in range(len(labels) - 1))


def site_name(labels: list[str]) -> str:
    """The label that a site was registered under: ``bbc`` of www.bbc.co.uk; empty for none."""
    is_below = len(labels) > 2 and len(labels[-1]) == 2 and labels[-2] in SHARED_LABELS
    at = -3 if is_below else -2
    return labels[at] if len(labels) >= -at else ""


def is_fit(url: str) -> bool:
    """Whether a page can be asked for by this address: http or https, a host, no spaces."""
    parts = _split(url)
    if not parts or parts.scheme not in ("http", "https") or _UNFIT.search(url) or parts.username:
        return False
    try:
        parts.port  # noqa: B018 - it is checked when it is read
        host = (parts.hostname or "").encode("idna").decode().rstrip(".")
        labels = host.split(".")
        if labels[-1].isdecimal():
            IPv4Address(host)
            return True
    except ValueError:
        return False
    return len(labels) > 1 and all(_LABEL.fullmatch(label) for label in labels)


def normalized(parts: SplitResult) -> str:
    """The address as one string for all its spellings: host in lower case, no fragment."""
    default = {"http": 80, "https": 443}.get(parts.scheme)
    port = f":{parts.port}" if parts.port not in (None, default) else ""
    query = f"?{parts.query}" if parts.query else ""
    return f"{parts.scheme}://{parts.hostname}{port}{parts.path or '/'}{query}"


def _split(url: str) -> SplitResult | None:
    try:
        return urlsplit(url)
    except ValueError:  # brackets that are no address
        return None


def sift(reading: Reading, blacklist: Path, output: Path) -> dict[str, int]:
    """Write the addresses that stay, one a line, in the order in which they come first.

    Args:
        reading: Lists with an address a line, or records with one under the key.
        blacklist: As for `UrlFilter.of_file`.
        output: List to write, packed by its ending; must not exist.

    Returns:
        What was done, counted by name; also in a file beside the list.

    Raises:
        DatasetError: A file is in the way or cannot be used, or no address stays.
    """
    require_new(output, TEXT_LINES)
    require_new(report_path(output))
    sieve, (key,) = UrlFilter.of_file(blacklist), reading.keys
    counts = Counter(dict.fromkeys(["read", "written", *(f"dropped: {r}" for r in REASONS)], 0))
    bad: list[Bad] = []
    progress = Progress("sifting", reading.total_bytes)
    with written(output, report_path(output)) as file:
        for block in blocks(reading):
            for record in block.records((key,), bad):
                for url in map(str.strip, record.texts[key]):
                    counts["read"] += 1
                    if reason := sieve.reason(url):
                        counts[f"dropped: {reason}"] += 1
                    else:
                        counts["written"] += 1
                        file.write(url.encode() + b"\n")
            progress.reach(block.consumed_bytes, f"{counts['written']:,} kept")
        progress.close()
        if not counts["written"]:
            first = f"; the first bad line is {reading.words(bad[0])}" if bad else ""
            raise DatasetError(f"no address stays: {_listed(counts)}{first}")
        counts["bad lines"] = len(bad)
        write_report(output, counts, map(reading.words, bad))
    return dict(counts)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items() if count) or "none came"
