"""Say in a file of a checkpoint which save it belongs to, and refuse files of more than one.

[Note: where the identity is] A dict has no room for that: a key of its own would be handed to the
caller as ``client_state``, and ``ds_config`` is a mere path where the engine was given one. So it
goes where torch keeps the ``_metadata`` of a module's ``state_dict``: into an attribute of an
``OrderedDict``, which is pickled with it and has the same keys and values as before.
"""

from __future__ import annotations

import zipfile
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch

from deep_optimizer_states.errors import CheckpointError

MOMENTS = ("exp_avg", "exp_avg_sq")
UPDATES = "updates of Adam"
NO_MOMENTS = "none, for it has no moments"
_ATTRIBUTE = "_deep_optimizer_states"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "dp_world_size")
_SCHEDULER_COUNTERS = {"last_batch_iteration", "last_epoch"}
"""DeepSpeed's and torch's. Other entries may be of one rank, such as the best loss it has seen."""
_NOT_WHOLE = "the checkpoint is not whole; load another one"
_NOT_HERE = "it needs what cannot be imported here"


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


class Head(NamedTuple):
    """What a file says of the save that it belongs to.

    Attributes:
        path: Its path.
        identity: The identity of its save, None in files of stock or blocking saves.
        counters: What is the same in all files of its kind.
    """

    path: str
    identity: Identity | None
    counters: dict[str, Any]


def read_file(path: str) -> dict[str, Any]:
    """Open a file that ``torch.save`` wrote; tensors are read when they are looked at.

    Raises:
        CheckpointError: It is missing or damaged.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"{path} is missing: {_NOT_WHOLE}")
    is_mapped = zipfile.is_zipfile(path)
    if not is_mapped and is_archive(path):
        raise CheckpointError(f"{path} cannot be read, for it is cut off: {_NOT_WHOLE}")
    try:
        found = torch.load(path, map_location="cpu", weights_only=False, mmap=is_mapped)
    except MemoryError:
        raise
    except Exception as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        told = _NOT_HERE if isinstance(error, (ImportError, AttributeError)) else _NOT_WHOLE
        raise CheckpointError(f"{path} cannot be read ({why}): {told}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}: {_NOT_WHOLE}")
    return found


def is_archive(path: str) -> bool:
    """Return whether a file is of the format that torch maps into memory, or was cut off from it.

    Files of another format are read by DeepSpeed alone, where it can.
    """
    if not Path(path).is_file():
        return True
    with Path(path).open("rb") as stream:
        return stream.read(2) in (b"", b"P", b"PK")


def head_of_model(path: str, content: Mapping[str, Any]) -> Head:
    """Return the head of a file of weights and counters."""
    counters = {key: content[key] for key in _COUNTERS if key in content}
    schedule = content.get("lr_scheduler")
    counted = schedule if isinstance(schedule, Mapping) else {}
    for key in sorted(counted.keys() & _SCHEDULER_COUNTERS):
        counters[f"lr_scheduler.{key}"] = counted[key]
    return Head(path, identity_of(content), counters)


def head_of_state(path: str, content: Mapping[str, Any], states: Iterable[Any]) -> Head:
    """Return the head of a file of one rank's state, given Adam's state of each flat tensor."""
    steps = {int(state.get("step", 0)) for state in states if all(key in state for key in MOMENTS)}
    updates = ", ".join(map(str, sorted(steps))) or NO_MOMENTS
    return Head(path, identity_of(content), {UPDATES: updates})


def refuse_mixture(heads: Sequence[Head]) -> None:
    """Refuse files of more than one save.

    Args:
        heads: Those of the files of a checkpoint, of any kind and in any order.

    Raises:
        CheckpointError: Names a file that is not of the save which most files are of, and how.
    """
    saves = {head.path: _told(head.identity) for head in heads}
    _refuse_others(saves, "{other} is of {it}, and {path} of {most}")
    for key in {key: None for head in heads for key in head.counters}:
        values = {head.path: head.counters[key] for head in heads if key in head.counters}
        _refuse_others(values, f"{{other}} has {key} = {{it}}, and {{path}} has {{most}}")


def _refuse_others(values: Mapping[str, Any], text: str) -> None:
    counted = Counter(map(repr, values.values())).most_common()
    if len(counted) < 2:
        return
    path, most = next(item for item in values.items() if repr(item[1]) == counted[0][0])
    other, it = next(item for item in values.items() if repr(item[1]) != counted[0][0])
    told = text.format(other=other, it=it, path=path, most=most)
    raise CheckpointError(f"{told}: the files are of different saves; load another checkpoint")


def _told(identity: Identity | None) -> str:
    if identity is None:
        return "a save without an identity"
    return f"save {identity['id']} (step {identity['step']}, tag {identity['tag']!r})"
