import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from third_party.fetch import (
    FULL_COMMIT,
    FetchError,
    Version,
    choose,
    fetch,
    main,
    read_versions,
)

ROOT = Path(__file__).resolve().parents[3]
LISTED = ROOT / "third_party" / "versions.toml"


def git(path, *words):
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(path), *identity, *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def upstream(tmp_path):
    """A repository with three commits; the second is the one wanted."""
    path = tmp_path / "up stream"
    path.mkdir()
    git(path, "init", "--quiet", "--initial-branch=main")
    commits = []
    for number in range(3):
        (path / "file.txt").write_text(f"{number}\n")
        git(path, "add", ".")
        git(path, "commit", "--quiet", "-m", f"number {number}")
        commits.append(git(path, "rev-parse", "HEAD"))
    version = Version("thing", path.as_uri(), commits[1], "MIT", "a test")
    return version, path, tmp_path / "src"


def test_the_exact_commit_is_checked_out(upstream):
    version, _, folder = upstream
    assert version.commit in fetch(version, folder)
    assert git(folder / "thing", "rev-parse", "HEAD") == version.commit
    assert (folder / "thing" / "file.txt").read_text() == "1\n"
    assert [path.name for path in folder.iterdir()] == ["thing"]


def test_a_server_that_gives_no_single_commits_is_cloned(upstream):
    version, path, folder = upstream
    git(path, "config", "uploadpack.allowAnySHA1InWant", "false")
    git(path, "config", "uploadpack.allowReachableSHA1InWant", "false")
    fetch(version, folder)
    assert git(folder / "thing", "rev-parse", "HEAD") == version.commit


def test_a_shortened_commit_is_found_out(upstream):
    version, _, folder = upstream
    fetch(replace(version, commit=version.commit[:18]), folder)
    assert git(folder / "thing", "rev-parse", "HEAD") == version.commit


def test_a_stopped_fetch_goes_on(upstream):
    version, path, folder = upstream
    with pytest.raises(FetchError):
        fetch(replace(version, url=(path.parent / "gone").as_uri()), folder)
    assert not (folder / "thing").exists()
    assert (folder / ".thing.partial").is_dir()
    fetch(version, folder)
    assert not (folder / ".thing.partial").exists()


def test_a_checkout_that_is_there_is_left_alone(upstream):
    version, _, folder = upstream
    fetch(version, folder)
    (folder / "thing" / "compiled.so").write_text("made by a run")
    assert "ready" in fetch(replace(version, url="file:///gone"), folder)


@pytest.mark.parametrize("how", ["changed", "other commit", "no checkout"])
def test_what_is_not_ours_is_never_touched(upstream, how):
    version, _, folder = upstream
    fetch(version, folder)
    file = folder / "thing" / "file.txt"
    if how == "changed":
        file.write_text("mine\n")
    elif how == "other commit":
        git(folder / "thing", "commit", "--quiet", "--allow-empty", "-m", "mine")
    else:
        (folder / "thing" / ".git").rename(folder / "thing" / "git")
    before = {path: path.stat().st_mtime_ns for path in (folder / "thing").rglob("*.txt")}
    with pytest.raises(FetchError, match="it is left as it is"):
        fetch(version, folder)
    assert {path: path.stat().st_mtime_ns for path in (folder / "thing").rglob("*.txt")} == before


def write(path, version, **more):
    table = {"url": version.url, "commit": version.commit, "licence": "MIT", "why": "x", **more}
    path.write_text(f"[{version.name}]\n" + "".join(f'{k} = "{v}"\n' for k, v in table.items()))


def test_one_that_fails_does_not_stop_the_others(upstream, tmp_path, capsys):
    version, _, folder = upstream
    path = tmp_path / "versions.toml"
    gone = 'url = "file:///gone"\ncommit = "0123456789ab"\nlicence = "MIT"\nwhy = "x"\n'
    write(path, version)
    path.write_text(f"[gone]\n{gone}" + path.read_text())
    assert main(["--versions", str(path), "--folder", str(folder)]) == 1
    output = capsys.readouterr()
    assert "error: gone: file:///gone" in output.err
    assert "cannot be reached" in output.err
    assert "licence: MIT" in output.out
    assert (folder / "thing").is_dir()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"commit": "main"}, "the name or the commit is not one"),
        ({"comit": "x"}, "comit"),
        ({"commit": "--upload-pack=x"}, "is not one"),
    ],
)
def test_a_wrong_list_is_refused(upstream, tmp_path, capsys, more, words):
    path = tmp_path / "versions.toml"
    write(path, upstream[0], **more)
    assert main(["--versions", str(path)]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error


def test_an_unknown_name_gets_its_nearest(capsys):
    assert main(["megatron"]) == 2
    assert "did you mean 'megatron-deepspeed'?" in capsys.readouterr().err


def test_a_group_is_fetched_by_its_name_alone():
    versions = read_versions(LISTED)
    names = [version.name for version in choose(["deepspeed-tests"], versions)]
    assert len(names) == 3
    assert [name for name in names if not name.startswith("deepspeed-tests-")] == []
    assert choose(names[:1], versions) == [versions[names[0]]]
    assert {*names}.isdisjoint(version.name for version in choose([], versions))


def test_the_list_names_url_commit_and_licence_of_each():
    versions = read_versions(LISTED)
    assert set(versions) == {
        *("megatron-deepspeed", "deepspeed-fork", "artifact", "apex"),
        *("optimus-cc", "powersgd", "lm-eval"),
        *(f"deepspeed-tests-{release}" for release in ("0.18.9", "0.19.5", "0.19.8")),
    }
    assert versions["megatron-deepspeed"].commit.startswith("6acc370a")
    for version in versions.values():
        assert version.url.startswith("https://github.com/")
        assert FULL_COMMIT.fullmatch(version.commit) or version.name == "apex"
        assert version.licence
        assert version.why
