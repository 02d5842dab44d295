"""DeepSpeed is asked in a process of its own, which takes seconds: only where a test is of that."""

import in_process
import pytest


@pytest.fixture
def real_process():
    """Ask DeepSpeed as a user does."""


@pytest.fixture(autouse=True)
def quick_ask(request, monkeypatch):
    if "real_process" not in request.fixturenames:
        monkeypatch.setattr("ds_config.__main__.ask", in_process.ask)
