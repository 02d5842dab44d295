"""Hears of every run of autograd in this process, whoever begins it.

DeepSpeed hears of a backward through the outputs of its engine. But ``torch.autograd.grad`` and the
backward of another engine may go through an engine's weights as well, by a graph that is older than
its last step. Autograd reads weights in C++, where nobody is told. All of these runs begin in one
method, of an object that torch has for this.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

from torch._C import _ImperativeEngine
from torch.autograd import Variable


class Listener(Protocol):
    """Who hears of runs of autograd."""

    def before_autograd(self) -> int:
        """Hear that a run begins; return what ``after_failed_autograd`` is to be told."""

    def after_failed_autograd(self, before: int) -> None:
        """Hear that an error came out of a run."""


_stock: Any = Variable._execution_engine
_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
os.register_at_fork(after_in_child=_listeners.clear)  # no update of theirs goes on there


class _Engine(_ImperativeEngine):
    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        before = [(listener, listener.before_autograd()) for listener in list(_listeners)]
        try:
            return super().run_backward(*args, **kwargs)
        except BaseException:
            for listener, what in before:
                listener.after_failed_autograd(what)
            raise


def listen(listener: Listener) -> None:
    """Let ``listener`` hear of runs of autograd until it says that it no longer listens."""
    engine: Any = Variable
    if not isinstance(engine._execution_engine, _Engine):
        engine._execution_engine = _Engine()
    _listeners.add(listener)


def stop_listening(listener: Listener) -> None:
    """Tell ``listener`` of no more runs; with the last one torch has its own object back."""
    _listeners.discard(listener)
    engine: Any = Variable
    if not _listeners and isinstance(engine._execution_engine, _Engine):
        engine._execution_engine = _stock
