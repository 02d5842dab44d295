"""What tests of trainers and of runs share."""

import subprocess
import sys

import pytest
from trainer_runs import write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Prefix of a small corpus, in a folder that may only be read."""
    prefix = tmp_path_factory.mktemp("data") / "corpus"
    write_corpus(prefix)
    return prefix


@pytest.fixture
def sleeper():
    """A process that has nothing to do with any run, and outlives it."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    assert process.poll() is None
    process.kill()
    process.wait()
