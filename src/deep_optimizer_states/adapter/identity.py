"""Say in a file of a checkpoint which save it belongs to, unseen by those who do not ask.

A dict has no room for that: a key of its own would be handed to the caller as ``client_state``,
and ``ds_config`` is a mere path where the engine was given one. So it goes where torch keeps the
``_metadata`` of a module's ``state_dict``: into an attribute of an ``OrderedDict``, which is
pickled with it and has the same keys and values as before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypedDict

_ATTRIBUTE = "_deep_optimizer_states"


class Identity(TypedDict):
    """What all files of one save have in common.

    Attributes:
        id: Of this save, and of no other.
        tag: Its tag.
        step: The engine's ``global_steps``.
    """

    id: str
    tag: str
    step: int


def stamped(content: Mapping[str, Any], identity: Identity) -> OrderedDict[str, Any]:
    """Return a shallow copy of what a file is to hold, with the identity of its save."""
    made = OrderedDict(content)
    vars(made).update({**getattr(content, "__dict__", {}), _ATTRIBUTE: dict(identity)})
    return made


def identity_of(content: Mapping[str, Any]) -> Identity | None:
    """Return the identity in what ``torch.load`` gave, None in files of stock or blocking saves."""
    found: Identity | None = getattr(content, _ATTRIBUTE, None)
    return found
