"""Make ``deepspeed.initialize`` use our optimizer where the config asks for it."""

from __future__ import annotations

from deep_optimizer_states.adapter import hooks
from deep_optimizer_states.adapter.guard import check_deepspeed


def install(allow_unverified: bool = False) -> None:
    """Teach this process's DeepSpeed the ``"deep_optimizer_states"`` block and the paper's keys.

    Call it once, before ``deepspeed.initialize``. DeepSpeed's files are not touched; a config
    without an enabled block behaves as before. Calling it again changes nothing.

    Args:
        allow_unverified: Take a DeepSpeed of which equal bits cannot be promised, with a warning
            that names what differs. ``DEEP_OPTIMIZER_STATES_ALLOW_UNVERIFIED=1`` does the same.

    Raises:
        UnsupportedDeepSpeedError: DeepSpeed is missing, or its code is not known; names what
            differs.
    """
    if hooks.originals:
        return
    check_deepspeed(allow_unverified)
    # Unless the check's import of DeepSpeed has called this already, through the hook of `run`.
    if not hooks.originals:
        hooks.put_in()


def uninstall() -> None:
    """Undo :func:`install`; engines that exist keep their optimizer."""
    hooks.take_out()
