"""State that is replaced, after an update that failed too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from deep_optimizer_states.gate import Background
from deep_optimizer_states.zero.homes import StateHomes
from deep_optimizer_states.zero.update import UpdatePhase


@contextlib.contextmanager
def loading(
    background: Background, update: UpdatePhase, homes: StateHomes, is_whole: bool
) -> Iterator[None]:
    """Replace the state.

    Args:
        background: Where updates run.
        update: What is made ready again after one that failed.
        homes: To where loaded moments return.
        is_whole: Whether moments are loaded as well, so that nothing is left of the failure.
    """
    what = "loading a checkpoint"
    with background.overlooking_failure():
        if background.has_failed:
            update.forget_failure()
        with background.under_way(what), background.changing(what):
            yield
            homes.return_home()
        if is_whole:
            background.forget_failure()
