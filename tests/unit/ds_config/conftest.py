"""DeepSpeed is asked in a process of its own, which takes seconds: only where a test is of that."""

import pytest


@pytest.fixture
def real_loader():
    """Ask the installed DeepSpeed."""


@pytest.fixture(autouse=True)
def quick_loader(request, monkeypatch):
    if "real_loader" not in request.fixturenames:
        monkeypatch.setattr("ds_config.__main__.answers", lambda table: [])
