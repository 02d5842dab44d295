"""The hub's own client against a hub on this machine."""

import hashlib
import os
import random
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from dataset.fetch import HubFile, fetch, hub_endpoint
from dataset.files import DatasetError

ROOT = Path(__file__).resolve().parents[3]
CONTENT = random.Random(0).randbytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
PATH = "some/thing/resolve/main/sub/file.bin"
LIMIT_S = 120


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    """The client waits between its attempts; here they follow at once."""
    clock = types.SimpleNamespace(**{name: getattr(time, name) for name in ("time", "monotonic")})
    clock.sleep = lambda seconds: None
    monkeypatch.setattr("huggingface_hub.utils._http.time", clock)
    monkeypatch.setattr("huggingface_hub.file_download.time", clock)


@pytest.fixture
def site(hub):
    hub.files[PATH] = CONTENT
    return hub


def get(site, folder, sha256=SHA256):
    lines = []
    file = HubFile("here.bin", "some/thing", "sub/file.bin", sha256)
    (path,) = fetch([file], folder / "hand", site.url, folder / "cache", lines.append)
    assert not list(folder.rglob("*.incomplete"))
    return path.read_bytes(), lines


def test_a_file_is_fetched_once(site, tmp_path):
    assert get(site, tmp_path) == (CONTENT, [f"fetching {site.url}/{PATH}"])
    assert get(site, tmp_path)[0] == CONTENT
    assert [method for method, _ in site.asked].count("GET") == 1


FETCH = """
import sys
from pathlib import Path
from dataset.fetch import HubFile, fetch
file = HubFile("here.bin", "some/thing", "sub/file.bin", None)
print(fetch([file], Path(sys.argv[1]), sys.argv[2], None, print)[0])
"""


def fetching(site, home, **environment):
    command = [sys.executable, "-c", FETCH, str(home / "hand"), site.url]
    environment = {**os.environ, "HF_HOME": str(home), **environment}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip


def test_the_hubs_home_and_offline_mode_are_respected_and_nothing_else_is_told(site, tmp_path):
    out, _ = fetching(site, tmp_path).communicate(timeout=LIMIT_S)
    path = Path(out.splitlines()[-1])
    assert path.is_relative_to(tmp_path / "hub")
    assert path.read_bytes() == CONTENT
    assert {name for _, name in site.asked} == {PATH}
    assert not any("torch" in agent for agent in site.agents)
    site.asked.clear()
    out, _ = fetching(site, tmp_path, HF_HUB_OFFLINE="1").communicate(timeout=LIMIT_S)
    assert (out.splitlines()[-1], site.asked) == (str(path), [])
    out, _ = fetching(site, tmp_path / "new", HF_HUB_OFFLINE="1").communicate(timeout=LIMIT_S)
    assert f"DatasetError: cannot get {site.url}/{PATH} (" in out


def test_a_file_put_there_by_hand_is_checked(site, tmp_path):
    (tmp_path / "hand").mkdir()
    by_hand = tmp_path / "hand" / "here.bin"
    by_hand.write_bytes(b"wrong")
    with pytest.raises(DatasetError, match=r"wrong SHA-256 .*here.bin: delete it and run again"):
        get(site, tmp_path)
    assert by_hand.read_bytes() == b"wrong"
    by_hand.write_bytes(CONTENT)
    assert get(site, tmp_path) == (CONTENT, [])
    assert site.asked == []


def test_offline_it_says_which_files_go_where(tmp_path):
    files = [HubFile("a.bin", "x", "a.bin", None), HubFile("b.bin", "x/y", "b.bin", None)]
    (tmp_path / "a.bin").write_bytes(b"there")
    with pytest.raises(DatasetError) as caught:
        fetch(files, tmp_path, "http://127.0.0.1:1", tmp_path / "cache", lambda line: None)
    message = str(caught.value)
    assert "cannot get http://127.0.0.1:1/x/y/resolve/main/b.bin ([Errno" in message
    assert f"put these files into {tmp_path} and run the same command again" in message
    assert "a.bin  there\n  b.bin  from http://127.0.0.1:1/x/y/resolve/main/b.bin" in message


def test_a_file_that_is_not_there_is_not_asked_for_again(site, tmp_path):
    del site.files[PATH]
    with pytest.raises(DatasetError, match=rf"cannot get .*{PATH} \(.*404"):
        get(site, tmp_path)
    assert len(site.asked) == 1


def test_a_mirror_of_the_environment_is_asked_instead_of_the_hub(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://env/")
    assert hub_endpoint() == "http://env"
    monkeypatch.delenv("HF_ENDPOINT")
    assert hub_endpoint().startswith("https://")
