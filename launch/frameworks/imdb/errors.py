"""What a user has to mend."""

from __future__ import annotations

from configs.errors import ConfigError


class ImdbError(ConfigError):
    """Reviews, tokenizer or settings are not as the program needs them."""
