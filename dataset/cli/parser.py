"""A parser that names the flag that was meant."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any


class FlagParser(argparse.ArgumentParser):
    """Refuses unknown flags first: argparse would complain of the value behind one instead."""

    def parse_known_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: Any = None,  # noqa: ANN401
    ) -> tuple[Any, list[str]]:
        """Parse, as argparse does."""
        for word in args or ():
            if word == "--":
                break
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag not in self._option_string_actions:
                self.error(f"unrecognized arguments: {word}{self._meant(flag)}")
        return super().parse_known_args(args, namespace)

    def _meant(self, flag: str) -> str:
        known = [name for name in self._option_string_actions if name.startswith("--")]
        begun = [name for name in known if name.startswith(flag)]
        near = begun or get_close_matches(flag, known, 1)
        return f"; did you mean {near[0]}?" if near else ""
