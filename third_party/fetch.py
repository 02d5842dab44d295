"""Fetches what ``versions.toml`` lists, each at its exact commit: ``fetch.py [NAME ...]``.

A checkout lies in ``third_party/src/NAME`` and is never changed once it is there. A fetch that was
stopped leaves nothing but a folder beside it, which the next one starts from.
"""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
FULL_COMMIT = re.compile(r"[0-9a-f]{40}")
ANY_COMMIT = re.compile(r"[0-9a-f]{12,40}")
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")
_OFFLINE = re.compile(
    r"Could not resolve|Failed to connect|Connection (?:refused|timed out)|unable to access|"
    r"Network is unreachable|Could not read from remote",
    re.IGNORECASE,
)


class FetchError(RuntimeError):
    """A project cannot be had; the message says why in words for the user."""


@dataclass(frozen=True)
class Version:
    """One project at one commit."""

    name: str
    url: str
    commit: str
    """40 hexadecimal digits; at least 12 of them."""
    licence: str
    why: str
    hint: str = ""
    """Advice on its use."""
    build: tuple[str, ...] = ()
    """Options of pip for those that have to be built; empty for the others."""
    group: str = ""
    """A name that several share. They are fetched where it or their own name is given."""


def read_versions(path: Path) -> dict[str, Version]:
    """The list.

    Raises:
        FetchError: the file is missing or malformed; names the entry.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise FetchError(f"{path}: {error}") from None
    versions = {}
    for name, table in tables.items():
        try:
            version = Version(name, **{**table, "build": tuple(table.get("build", ()))})
        except TypeError as error:
            raise FetchError(f"{path}: [{name}]: {error}") from None
        if not _NAME.fullmatch(name) or not ANY_COMMIT.fullmatch(version.commit):
            raise FetchError(f"{path}: [{name}]: the name or the commit is not one")
        versions[name] = version
    return versions


def fetch(version: Version, folder: Path) -> str:
    """Make the checkout ``folder/NAME``, or find it made.

    Returns:
        A line that says which.

    Raises:
        FetchError: another commit or changes are there, or the fetch fails.
    """
    path = folder / version.name
    if path.exists():
        _require_untouched(version, path)
        return f"{version.name}: ready in {path}"
    partial = folder / f".{version.name}.partial"
    partial.mkdir(parents=True, exist_ok=True)
    if not (partial / ".git").exists():
        _git(partial, "init", "--quiet")
    reference = _download(version, partial)
    _git(partial, "checkout", "--quiet", "--detach", "--force", reference)
    commit = _head(partial)
    if not commit.startswith(version.commit):
        raise FetchError(f"{version.name}: {version.url} gave {commit}, not {version.commit}")
    partial.rename(path)
    return f"{version.name}: {commit} in {path}"


def _download(version: Version, path: Path) -> str:
    """Get the commit, alone where the server gives single commits; the name to check it out by."""
    if FULL_COMMIT.fullmatch(version.commit):
        done = _run(path, "fetch", "--quiet", "--depth", "1", "--", version.url, version.commit)
        if done.returncode == 0:
            return "FETCH_HEAD"
    # Some servers refuse single commits, and a shortened one says nothing to any of them.
    shallow = ["--unshallow"] if (path / ".git" / "shallow").exists() else []
    refs = "+refs/heads/*:refs/remotes/origin/*"
    done = _run(path, "fetch", "--quiet", "--tags", *shallow, "--", version.url, refs)
    if done.returncode:
        raise FetchError(f"{version.name}: {_reason(version, done.stderr)}")
    return f"{version.commit}^{{commit}}"


def _reason(version: Version, said: str) -> str:
    words = " ".join(said.split())
    if _OFFLINE.search(said):
        return (
            f"{version.url} cannot be reached ({words}); on a machine with a network run "
            f"`python third_party/fetch.py {version.name}` and copy third_party/src/{version.name}"
        )
    return f"{version.url}: {words}"


def _require_untouched(version: Version, path: Path) -> None:
    advice = "it is left as it is; move it away to fetch it anew"
    if not (path / ".git").exists():
        raise FetchError(f"{version.name}: {path} is no git checkout; {advice}")
    commit = _head(path)
    if not commit.startswith(version.commit):
        raise FetchError(f"{version.name}: {path} is at {commit}, not {version.commit}; {advice}")
    # What a run compiles inside the checkout is no change of it.
    if changes := _git(path, "status", "--porcelain", "--untracked-files=no"):
        raise FetchError(f"{version.name}: {path} has changes ({changes.split()[-1]}); {advice}")


def _head(path: Path) -> str:
    return _git(path, "rev-parse", "HEAD").strip()


def _git(path: Path, *words: str) -> str:
    done = _run(path, *words)
    if done.returncode:
        raise FetchError(f"git {words[0]} in {path}: {' '.join(done.stderr.split())}")
    return done.stdout


def _run(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    # Never asks for a password: a repository that is gone would.
    command = ["git", "-C", str(path), "-c", "core.askPass=true", "-c", "credential.helper="]
    try:
        return subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise FetchError("git is not installed") from None


def build(version: Version, folder: Path) -> None:
    """Build a checkout into this environment, by pip.

    Raises:
        FetchError: there is nothing to build, or it fails.
    """
    if not version.build:
        raise FetchError(f"{version.name}: nothing to build")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", *version.build]
    done = subprocess.run([*pip, str(folder / version.name)], check=False)
    if done.returncode:
        raise FetchError(f"{version.name}: pip ended with exit code {done.returncode}")


def choose(names: Sequence[str], versions: dict[str, Version]) -> list[Version]:
    """The entries of the names, or of a group's; without a name all that are in no group.

    Raises:
        FetchError: one is unknown; the nearest is named.
    """
    chosen: list[Version] = []
    for name in names or [""]:
        found = [each for each in versions.values() if name in (each.name, each.group)]
        if not found:
            near = difflib.get_close_matches(name, versions, n=1, cutoff=0.3)
            hint = f"did you mean '{near[0]}'? " if near else ""
            raise FetchError(f"unknown name {name!r}: {hint}known: {', '.join(versions)}")
        chosen += found
    return chosen


def main(arguments: Sequence[str]) -> int:
    """Fetch from the command line; 1 when something could not be had."""
    parser = argparse.ArgumentParser(prog="fetch.py", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="[default all that are in no group]"
    )
    parser.add_argument("--build", action="store_true", help="build the named ones too")
    parser.add_argument("--list", action="store_true", help="show what there is, and leave")
    parser.add_argument("--versions", type=Path, default=HERE / "versions.toml", metavar="FILE")
    parser.add_argument("--folder", type=Path, default=HERE / "src", metavar="DIR")
    given = parser.parse_args(arguments)
    if given.build and not given.names:
        parser.error("--build needs the names of what to build")
    failed = 0
    try:
        versions = read_versions(given.versions)
        chosen = choose(given.names or (versions if given.list else []), versions)
    except FetchError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if shutil.which("git") is None:
        sys.stderr.write("error: git is not installed\n")
        return 2
    for version in chosen:
        if given.list:
            _say(f"{version.name}: {version.url} at {version.commit}; {version.licence}")
            continue
        failed += not _fetch_one(version, given.folder, given.build)
    return 1 if failed else 0


def _fetch_one(version: Version, folder: Path, with_build: bool) -> bool:
    try:
        _say(fetch(version, folder))
        if with_build:
            build(version, folder)
    except FetchError as error:
        sys.stderr.write(f"error: {error}\n")
        return False
    _say(f"  licence: {version.licence}")
    if version.hint:
        _say(f"  {version.hint}")
    return True


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
