import sys
from pathlib import Path

import pytest

FAKES = Path(__file__).resolve().parent / "fakes"


@pytest.fixture
def fake_trainer(monkeypatch):
    """Makes the module ``fake_trainer`` runnable by the ranks; call it to say how runs end."""
    monkeypatch.setenv("PYTHONPATH", str(FAKES))

    def choose(how: str) -> str:
        monkeypatch.setenv("FAKE_TRAINER", how)
        return "fake_trainer"

    return choose


@pytest.fixture(params=["plain", "with space", 'it\'s; "quoted" $HOME', "two\nlines"])
def odd_dir(request, tmp_path):
    path = tmp_path / request.param
    path.mkdir()
    return path


@pytest.fixture
def sleeper():
    """A process that has nothing to do with any run."""
    import subprocess

    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()
