import pytest

from launch.hosts import namespaces
from launch.hosts.namespaces import unavailable


@pytest.fixture(autouse=True)
def asked_anew():
    unavailable.cache_clear()
    yield
    unavailable.cache_clear()


def test_another_system(monkeypatch):
    monkeypatch.setattr(namespaces.sys, "platform", "darwin")
    assert "this is darwin" in unavailable()


def test_a_command_that_is_missing(monkeypatch):
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: None if name == "tc" else "/x")
    assert "'tc'" in unavailable()


def test_another_user_than_root(monkeypatch):
    monkeypatch.setattr(namespaces.shutil, "which", lambda _: "/x")
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    assert unavailable() == "only root may make network namespaces"


def test_a_container_that_refuses(monkeypatch):
    monkeypatch.setattr(namespaces.shutil, "which", lambda _: "/x")
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces, "_PROBE", "echo not permitted >&2; exit 1")
    monkeypatch.setattr(namespaces, "_UNSHARED", ("sh", "-c"))
    found = unavailable()
    assert found == "this kernel or container refuses network namespaces (not permitted)"
