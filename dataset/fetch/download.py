"""A file from the web: in one go or in many, checked, never half there."""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import IO, Any

from dataset.digest import file_digest
from dataset.errors import DatasetError
from dataset.fetch.catalogue import RemoteFile
from dataset.locks import locked
from dataset.progress import Progress

TIMEOUT_S = 60.0
READ_BYTES = 1 << 18
# Attempts that bring nothing; one that brings something starts the count again.
MOST_ATTEMPTS = 4
WAIT_S = 1.0
PARTIAL_ENDING = ".partial"
_SHA256 = re.compile(r'"?([0-9a-f]{64})"?')


@dataclass(frozen=True)
class _Reply:
    """What the server says of a file."""

    start: int
    """Where in the file its bytes begin."""
    total_bytes: int | None
    tag: str | None
    """Changes when the file does."""
    sha256: str | None


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Keeps the digest that the hub sends beside a redirect to its storage."""

    sha256: str | None = None

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str,
        headers: Message, newurl: str,
    ) -> urllib.request.Request | None:  # fmt: skip
        self.sha256 = _digest_in(headers) or self.sha256
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]


def _digest_in(headers: Any) -> str | None:  # noqa: ANN401 - any mapping of headers
    found = _SHA256.fullmatch(headers.get("X-Linked-ETag") or "")
    return found[1] if found else None


def fetch(
    files: Sequence[RemoteFile], folder: Path, base_url: str, say: Callable[[str], None]
) -> None:
    """Have all ``files`` in ``folder``; those that are there are checked, not fetched.

    Raises:
        DatasetError: One cannot be had, or is not what it should be; the message says where to put
            the files by hand.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatasetError(f"--data-dir {folder}: {error.strerror}") from error
    with locked(folder):
        for file in files:
            target = folder / file.name
            if target.is_file():
                _require_digest(target, file.sha256, f"{target}: delete it and run again")
                continue
            url = f"{base_url}/{file.path}"
            try:
                download(url, target, file.sha256, say)
            except OSError as error:
                reason = getattr(error, "reason", None) or error
                raise DatasetError(
                    f"cannot get {url} ({reason}).\n{_by_hand(files, folder, base_url)}"
                ) from error


def _by_hand(files: Sequence[RemoteFile], folder: Path, base_url: str) -> str:
    lines = [f"Without a network, put these files into {folder} and run the same command again:"]
    for file in files:
        state = "there" if (folder / file.name).is_file() else f"from {base_url}/{file.path}"
        lines.append(f"  {file.name}  {state}")
    return "\n".join(lines)


def download(url: str, target: Path, sha256: str | None, say: Callable[[str], None]) -> None:
    """Fetch one file, going on where an earlier attempt stopped.

    Args:
        url: Where it is.
        target: Where it goes, in one step once it is whole and checked.
        sha256: Its digest; None to take the one the server announces, if it does.
        say: Gets one line for each thing worth telling.

    Raises:
        OSError: It cannot be had.
        DatasetError: Its digest is wrong.
    """
    partial = target.with_name(target.name + PARTIAL_ENDING)
    say(f"fetching {url}")
    failures = 0
    while True:
        before = _size(partial)
        try:
            announced = _fetch_rest(url, partial)
            break
        except urllib.error.HTTPError as error:
            error.close()
            if error.code < 500 and error.code != 429:
                raise
            last: Exception = error
        except (OSError, http.client.HTTPException) as error:
            last = error
        failures = 1 if _size(partial) > before else failures + 1
        if failures >= MOST_ATTEMPTS:
            raise last if isinstance(last, OSError) else OSError(repr(last))
        say(f"{last}: trying again from {_size(partial):,} bytes")
        time.sleep(WAIT_S * failures)
    _require_digest(partial, sha256 or announced, f"what {url} sent was dropped: run again")
    _tag_path(partial).unlink(missing_ok=True)
    partial.replace(target)


def _fetch_rest(url: str, partial: Path) -> str | None:
    """Append what is missing; returns the digest that the server announced."""
    headers = {"Accept-Encoding": "identity", "User-Agent": "deep-optimizer-states"}
    have, tag = _size(partial), _read_tag(partial)
    if have and tag:
        # Without a tag nobody knows whether the file is still the same: from the start.
        headers |= {"Range": f"bytes={have}-", "If-Range": tag}
    redirects = _Redirects()
    opener = urllib.request.build_opener(redirects)
    request = urllib.request.Request(url, headers=headers)
    try:
        with opener.open(request, timeout=TIMEOUT_S) as response:
            reply = _understand(response, redirects.sha256)
            if reply.start not in (0, have):
                raise OSError(f"the server sent bytes from {reply.start}, not from {have}")
            _write_tag(partial, reply.tag)
            _copy(response, partial, reply)
            return reply.sha256
    except urllib.error.HTTPError as error:
        if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        error.close()
        if error.headers.get("Content-Range") == f"bytes */{have}":
            return _digest_in(error.headers) or redirects.sha256  # it was whole
        partial.unlink()
        raise OSError("the file changed on the server") from error


def _understand(response: Any, redirected_sha256: str | None) -> _Reply:  # noqa: ANN401
    headers = response.headers
    length = headers.get("Content-Length")
    start = 0
    if response.status == http.client.PARTIAL_CONTENT:
        found = re.match(r"bytes (\d+)-", headers.get("Content-Range", ""))
        if not found:
            raise OSError("the server sent a part without saying which")
        start = int(found[1])
    tag = headers.get("ETag")
    return _Reply(
        start=start,
        total_bytes=start + int(length) if length else None,
        tag=tag if tag and not tag.startswith("W/") else headers.get("Last-Modified"),
        sha256=_digest_in(headers) or redirected_sha256,
    )


def _copy(response: Any, partial: Path, reply: _Reply) -> None:  # noqa: ANN401 - an HTTP response
    progress = Progress("fetching", reply.total_bytes, reply.start)
    done = reply.start
    with partial.open("r+b" if reply.start else "wb") as file:
        file.seek(reply.start)
        while data := response.read(READ_BYTES):
            file.write(data)
            done += len(data)
            progress.update(done)
    progress.close()
    if reply.total_bytes is not None and done < reply.total_bytes:
        raise OSError(f"the connection ended {reply.total_bytes - done:,} bytes early")


def _require_digest(path: Path, sha256: str | None, what_to_do: str) -> None:
    if sha256 is None:
        return
    found = file_digest(path)
    if found == sha256:
        return
    if path.suffix == PARTIAL_ENDING:
        path.unlink()
        _tag_path(path).unlink(missing_ok=True)
    raise DatasetError(f"wrong SHA-256 {found}, should be {sha256}; {what_to_do}")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tag_path(partial: Path) -> Path:
    return partial.with_name(f"{partial.name}.tag")


def _read_tag(partial: Path) -> str | None:
    try:
        tag = json.loads(_tag_path(partial).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return str(tag) if tag else None


def _write_tag(partial: Path, tag: str | None) -> None:
    _tag_path(partial).write_text(json.dumps(tag), encoding="utf-8")
