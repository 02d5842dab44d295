"""`python -m benchmarks.memory` where the package of its models is not installed."""

import pytest

from benchmarks.memory import __main__ as memory
from configs.errors import ConfigError


@pytest.mark.parametrize("command", ["table", "measure"])
def test_what_lacks_is_named_with_the_command_that_installs_it(command, monkeypatch):
    monkeypatch.setattr(memory, "has_models", lambda: False)
    with pytest.raises(ConfigError, match=r"^needs transformers, .*: run `make setup-tests`$"):
        memory.main([command])
