"""Tells what the installed DeepSpeed refuses of a configuration; a program, asked by ``loader``.

It reads a JSON array from standard input, the configuration without its ``auto`` values and the
configuration as it was given, and prints an array of ``[key, what is wrong, remedy]``. Its lists of
optimizers and schedulers are those of the release that it imports.
"""

from __future__ import annotations

import difflib
import inspect
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Complaint = tuple[str, str, str]
"""Key, what is wrong, remedy."""
_ADAM_WORDS = {"torch_adam", "adam_w_mode", "fp32_optimizer_states", "foreach", "max_grad_norm"}
"""Parameters of Adam that DeepSpeed takes out before it makes the optimizer, or refuses itself."""


def complaints(plain: Mapping[str, Any], given: Mapping[str, Any]) -> list[Complaint]:
    """Return what DeepSpeed's loader and ``deepspeed.initialize`` would refuse.

    Args:
        plain: The configuration without its ``auto`` values, for the loader.
        given: The same with them, for the names of optimizer and scheduler.
    """
    refusal = _of_loader(plain)
    found = [*_of_optimizer(given), *_of_scheduler(given)]
    return [*found, ("(DeepSpeed)", refusal, "")] if refusal else found


def _of_loader(table: Mapping[str, Any]) -> str:
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(dict(table))
    except Exception as error:  # noqa: BLE001 - whatever it raises
        if hasattr(error, "errors"):
            lines = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            return "; ".join(lines)
        return str(error) or type(error).__name__
    return ""


def _of_optimizer(table: Mapping[str, Any]) -> Iterator[Complaint]:
    """Judge the optimizer as the engine does: by its name, its parameters and the stage."""
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    name, params = _block(table, "optimizer")
    if not name:
        return
    own = name.lower() if name.lower() in DEEPSPEED_OPTIMIZERS else ""
    made = getattr(torch.optim, name, None)
    if not own and not isinstance(made, type):
        torchs = [n for n, kind in vars(torch.optim).items() if isinstance(kind, type)]
        words = _near(name, [*torchs, *(n.capitalize() for n in DEEPSPEED_OPTIMIZERS)])
        yield "optimizer.type", f"= {name!r} is no optimizer of this DeepSpeed or torch", words
        return
    stage = _of(table, "zero_optimization", "stage")
    is_tested = made in ZERO_SUPPORTED_OPTIMIZERS if not own else own != "lamb"
    if stage and not is_tested and table.get("zero_allow_untested_optimizer") is not True:
        remedy = "set zero_allow_untested_optimizer to true at the top level, or give AdamW"
        yield "optimizer.type", f"= {name!r} is refused under ZeRO as untested", remedy
    kinds: list[Any] = [] if own else [made]
    if own in ("adam", "adamw"):  # which of them is made follows from stage, device and torch_adam
        kinds = [torch.optim.AdamW, FusedAdam, DeepSpeedCPUAdam]
    if kinds and params is not None:
        known = {word for kind in kinds for word in inspect.signature(kind).parameters}
        yield from _foreign("optimizer", name, params, known | (_ADAM_WORDS if own else set()))


def _of_scheduler(table: Mapping[str, Any]) -> Iterator[Complaint]:
    """Judge the scheduler by its name and its parameters."""
    from deepspeed.runtime import lr_schedules
    from torch.optim import lr_scheduler

    name, params = _block(table, "scheduler")
    if not name:
        return
    made = getattr(lr_schedules, name, getattr(lr_scheduler, name, None))
    if not isinstance(made, type):
        torchs = [n for n, kind in vars(lr_scheduler).items() if isinstance(kind, type)]
        words = _near(name, [*lr_schedules.VALID_LR_SCHEDULES, *torchs])
        yield "scheduler.type", f"= {name!r} is no scheduler of this DeepSpeed or torch", words
        return
    enabled = [_of(table, kind, "enabled") for kind in ("fp16", "bf16")]
    if not hasattr(lr_schedules, name) and (
        _of(table, "zero_optimization", "stage") or True in enabled
    ):
        words = "give one of DeepSpeed's, or make it in the program"
        yield "scheduler.type", f"= {name!r} takes no optimizer of ZeRO or of 16-bit weights", words
    if params is None:
        yield "scheduler.params", "is missing", "give it, {} where nothing is to be set"
        return
    parameters = list(inspect.signature(made).parameters.values())[1:]  # the optimizer is first
    yield from _foreign("scheduler", name, params, {one.name for one in parameters})
    for one in parameters:
        if one.default is one.empty and one.name not in params:
            yield f"scheduler.params.{one.name}", f"is missing, and {name} needs it", "give it"


def _of(table: Mapping[str, Any], block: str, name: str) -> Any:  # noqa: ANN401
    inside = table.get(block)
    return inside.get(name) if isinstance(inside, Mapping) else None


def _block(table: Mapping[str, Any], name: str) -> tuple[str, Mapping[str, Any] | None]:
    """Return type and parameters; an empty type where there is nothing to judge."""
    kind, params = _of(table, name, "type"), _of(table, name, "params")
    if not isinstance(kind, str) or kind == "auto":
        return "", None
    return kind, params if isinstance(params, Mapping) else None


def _foreign(
    block: str, name: str, params: Mapping[str, Any], known: set[str]
) -> Iterator[Complaint]:
    for word in params:
        if word not in known:
            yield f"{block}.params.{word}", f"is no parameter of {name}", _near(word, known)


def _near(name: str, known: Iterable[str]) -> str:
    """Return the remedy for a name that is not known: the nearest one, whatever its case."""
    by_lower = {one.lower(): one for one in sorted(known)}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f"did you mean {by_lower[near[0]]}?" if near else "leave it out"


def main() -> None:
    """Answer one question."""
    plain, given = json.load(sys.stdin)
    import deepspeed  # noqa: F401 - writes into the log while it is imported

    logging.disable(logging.CRITICAL)
    sys.stdout.write(f"\n{json.dumps(complaints(plain, given))}\n")


if __name__ == "__main__":
    main()
