"""Why links cannot be made, and the bytes that the kernel counts on a rank's own."""

from types import SimpleNamespace

import pytest

from configs.errors import ConfigError
from configs.study import make_point
from launch import links
from launch.links import link_sent_bytes, unavailable


@pytest.fixture(autouse=True)
def root_of_a_linux_with_all_commands(monkeypatch):
    monkeypatch.setattr(links.sys, "platform", "linux")
    monkeypatch.setattr(links.shutil, "which", lambda _: "/x")
    monkeypatch.setattr(links.os, "geteuid", lambda: 0)
    unavailable.cache_clear()
    yield
    unavailable.cache_clear()


class Kernel:
    """Notes what is tried, and lets or refuses it."""

    def __init__(self):
        self.commands, self.code = [], 0

    def run(self, command, **_options):
        self.commands.append(command)
        return SimpleNamespace(returncode=self.code, stderr="unshare:\n not permitted\n")


@pytest.fixture
def kernel(monkeypatch):
    made = Kernel()
    monkeypatch.setattr(links.subprocess, "run", made.run)
    return made


@pytest.mark.parametrize(
    ("module", "name", "value", "reason"),
    [
        ("sys", "platform", "darwin", "Linux shapes links, and this is darwin"),
        ("os", "geteuid", lambda: 1000, "only root may make network namespaces"),
        ("shutil", "which", lambda name: None if name == "tc" else "/x", "the command 'tc' of"),
        ("shutil", "which", lambda name: None if name == "nsenter" else "/x", "'nsenter' of"),
    ],
)
def test_what_this_machine_lacks_is_told_without_trying(
    module, name, value, reason, kernel, monkeypatch
):
    monkeypatch.setattr(getattr(links, module), name, value)
    assert reason in unavailable()
    assert kernel.commands == []


def test_a_rank_is_put_behind_a_link_before_it_is_said_that_links_can_be_made(kernel):
    assert unavailable() == ""
    (command,) = kernel.commands
    assert {"bridge", "rank"} < set(command)


def test_a_container_that_refuses_says_why(kernel):
    kernel.code = 1
    assert unavailable() == "this kernel or container refuses links (unshare: not permitted)"


def test_a_ranks_own_link_is_counted_and_links_as_they_are_are_not(monkeypatch):
    sent = {links.INTERFACE: SimpleNamespace(bytes_sent=5000), "lo": SimpleNamespace(bytes_sent=1)}
    monkeypatch.setattr(links.psutil, "net_io_counters", lambda **_options: sent)
    shaped = make_point({"model": "tiny", "link_mbit": 20})
    assert link_sent_bytes(shaped) == 5000
    assert link_sent_bytes(make_point({"model": "tiny"})) == 0
    del sent[links.INTERFACE]
    with pytest.raises(ConfigError, match="link_mbit = 20: this rank is behind no link"):
        link_sent_bytes(shaped)
