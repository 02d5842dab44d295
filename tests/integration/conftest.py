"""What tests of trainers share."""

import pytest
from trainer_runs import write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Prefix of a small corpus, in a folder that may only be read."""
    prefix = tmp_path_factory.mktemp("data") / "corpus"
    write_corpus(prefix)
    return prefix
