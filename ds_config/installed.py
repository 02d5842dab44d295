"""Asks the installed DeepSpeed for its keys and what it refuses; a program, run by ``release``.

It reads a JSON array from standard input, a configuration without its ``auto`` values and the same
as it was given. It prints an object: ``keys`` with a table of facts each, ``refusals``, each
``[key, what is wrong, remedy]``, and ``auto``, what its loader makes of each ``auto`` by itself.
"""

from __future__ import annotations

import contextlib
import difflib
import enum
import functools
import json
import logging
import re
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

from pydantic import BaseModel, ValidationError

Key = tuple[str, ...]
"""A key with the blocks around it: ``("zero_optimization", "stage")``."""
Refusal = tuple[str, str, str]
"""Key, what is wrong, remedy."""
LOADER = "(DeepSpeed)"
"""Key of a refusal of DeepSpeed's loader that names none."""
_MARK = "(path)"
"""A key that tells a model which block of the configuration it is made of."""


class _Block(dict[str, Any]):
    """A block of a configuration that notes which keys are looked up in it, with their defaults."""

    def __init__(self, path: Key, noted: dict[Key, Any], content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self._path, self._noted = path, noted

    def _note(self, name: str, default: object = None) -> None:
        key = (*self._path, name)
        if self._noted.get(key) is None:
            self._noted[key] = default

    def __contains__(self, name: object) -> bool:
        self._note(str(name))
        return super().__contains__(name)

    def __getitem__(self, name: str) -> Any:
        self._note(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._note(name, default)
        return super().get(name, default)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> _Block:
        return _Block(self._path, self._noted, self)


@functools.cache
def release_keys() -> tuple[dict[Key, dict[str, Any]], dict[Key, type[BaseModel]]]:
    """Return every key that the release reads with its facts, and the model of each block.

    DeepSpeed has no list of its keys. Its loader is given a configuration that notes each lookup,
    then once more for every key that was found, with a block under that key. What becomes a model
    of pydantic has the keys of the model.
    """
    noted: dict[Key, Any] = {}
    models: dict[Key, type[BaseModel]] = {}
    # The loader looks for sequence_parallel_size only where there are ranks.
    with _noting_models(models), mock.patch("deepspeed.comm.get_rank", return_value=0):
        made = _load(("train_batch_size",), 1, noted)
        tried: set[Key] = set()
        while untried := noted.keys() - tried:
            tried |= untried
            for key in sorted(untried):
                for value in (_Block(key, noted, {_MARK: key}), True, "text"):
                    _load(key, value, noted)
    for name, value in vars(made).items():
        if (name,) in noted and isinstance(value, Mapping):  # read without looking a key up
            noted |= {(name, inner): default for inner, default in value.items()}
    facts = {
        key: {"default": _plain(default), "kind": _kind_of(type(default))}
        for key, default in noted.items()
        if _MARK not in key
    }
    for path, model in models.items():
        facts |= dict(_fields(model, path))
    for key in _removed():
        facts[key] = {"removed": True}
    return facts, models


@contextlib.contextmanager
def _noting_models(models: dict[Key, type[BaseModel]]) -> Iterator[None]:
    from deepspeed.runtime.config_utils import DeepSpeedConfigModel

    make = DeepSpeedConfigModel.__init__

    def noting(model: BaseModel, strict: bool = False, **data: object) -> None:
        path = data.pop(_MARK, None)
        if isinstance(path, tuple):
            models[path] = type(model)
        make(model, strict=strict, **data)

    with mock.patch.object(DeepSpeedConfigModel, "__init__", noting):
        yield


def _load(key: Key, value: object, noted: dict[Key, Any]) -> object:
    """Load a configuration with one key; None where DeepSpeed refuses it."""
    from deepspeed.runtime.config import DeepSpeedConfig

    *blocks, name = key
    block = _Block((*blocks,), noted, {name: value})
    while blocks:
        name = blocks.pop()
        block = _Block((*blocks,), noted, {name: block})
    block.setdefault("train_batch_size", 1)  # the loader refuses a configuration without
    with contextlib.suppress(Exception):
        return DeepSpeedConfig(block)
    return None


def _fields(model: type[BaseModel], path: Key) -> Iterator[tuple[Key, dict[str, Any]]]:
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        fact = {
            "default": _plain(field.default),
            "kind": _kind_of(field.annotation, whole="integer"),
            "deprecated": extra.get("deprecated") is True,
            "replaced_by": extra.get("new_param", ""),
            "is_model": True,
        }
        for word in {field.alias or name, name}:
            yield (*path, word), fact
        for inner in _models_in(field.annotation):
            yield from _fields(inner, (*path, field.alias or name))


def _models_in(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models_in(part)


def _kind_of(annotation: object, whole: str = "number") -> str:
    """Return ``boolean``, ``integer`` or ``number``; nothing where other types are taken too.

    Args:
        annotation: A type, or the annotation of a model's field.
        whole: Kind of an integer. A loader without a model takes any number in its place.
    """
    parts = typing.get_args(annotation)
    if parts and typing.get_origin(annotation) is typing.Annotated:
        return _kind_of(parts[0], whole)
    kinds = {_kind_of(part, whole) for part in parts if part is not type(None)}
    if parts:
        return (
            kinds.pop() if len(kinds) == 1 else "number" if kinds == {"integer", "number"} else ""
        )
    if not isinstance(annotation, type) or issubclass(annotation, str):
        return ""
    if issubclass(annotation, bool):
        return "boolean"
    if issubclass(annotation, int) and not issubclass(annotation, enum.Flag):
        return whole
    return "number" if issubclass(annotation, float) else ""


def _plain(value: object) -> object:
    """Return a default as JSON holds it; None for a block and for anything else."""
    if isinstance(value, bool | int | float | str | list):
        return json.loads(json.dumps(value))
    return None


def _removed() -> Iterator[Key]:
    """Keys that the release knows only to refuse them."""
    from deepspeed.runtime import config

    yield from ((name,) for name in getattr(config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", ()))
    for name in getattr(config, "_REMOVED_ZERO_CONFIG_KEYS", ()):
        yield "zero_optimization", name


def refusals(
    plain: Mapping[str, Any], given: Mapping[str, Any], models: Mapping[Key, type[BaseModel]]
) -> list[Refusal]:
    """Return what DeepSpeed's loader, ``deepspeed.initialize`` and the plugin would refuse.

    Args:
        plain: The configuration without its ``auto`` values, for the loader.
        given: The same with them, for the names of optimizer and scheduler and the plugin's block.
        models: The model of each block.
    """
    found = [*_of_values(plain, models), *_of_optimizer(given), *_of_scheduler(given)]
    return [*(found or _of_loader(plain)), *_of_plugin(plain, given)]


def of_auto(key: Key) -> tuple[str, str]:
    """Return what becomes of an ``auto`` under a key that no framework filled.

    Returns:
        ``default`` where the loader takes what it takes without the key, ``refused`` with its
        words, or ``text`` where the text goes on into what is made of the configuration.
    """
    try:
        without = _loaded(key, {})
    except Exception:  # noqa: BLE001 - whatever it raises of the block alone
        return "text", ""
    try:
        return ("default" if _loaded(key, {key[-1]: "auto"}) == without else "text"), ""
    except Exception as error:  # noqa: BLE001 - whatever it raises
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return "refused", lines[-1]


def _loaded(key: Key, block: dict[str, Any]) -> Any:
    """Return what the loader makes of one block, as plain values that can be compared."""
    from deepspeed.runtime.config import DeepSpeedConfig

    for name in reversed(key[:-1]):
        block = {name: block}
    if key != ("train_batch_size",) or not block:
        block["train_batch_size"] = 1  # the loader refuses a configuration without
    with contextlib.redirect_stdout(None):
        return _values(DeepSpeedConfig(block))


def _values(made: Any) -> Any:
    if isinstance(made, Mapping):
        return {name: _values(value) for name, value in made.items()}
    if isinstance(made, list | tuple):
        return [_values(value) for value in made]
    if hasattr(made, "__dict__") and not isinstance(made, type | enum.Enum):
        inner = {name: value for name, value in vars(made).items() if name != "_param_dict"}
        return _values(inner)
    return repr(made)


def autos(table: Mapping[str, Any], at: Key = ()) -> Iterator[Key]:
    """Return every key whose value is ``auto``, with the blocks around it."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from autos(value, (*at, str(name)))
        elif value == "auto":
            yield (*at, str(name))


def _of_values(
    plain: Mapping[str, Any], models: Mapping[Key, type[BaseModel]]
) -> Iterator[Refusal]:
    """Judge the values of every block that becomes a model."""
    for path, model in models.items():
        block: Any = plain
        for name in path:
            block = block.get(name) if isinstance(block, Mapping) else None
        if not isinstance(block, Mapping):
            continue
        try:
            model(**block)
        except ValidationError as error:
            for one in error.errors():
                key = ".".join((*path, *map(str, one["loc"])))
                if "dictionary or instance" in one["msg"]:
                    yield key, f"= {one['input']!r} is no block", "give an object: {...}"
                elif one["msg"].startswith("Input should be "):
                    choices = one["msg"].replace("Input should be", "give").partition(", unable")[0]
                    # The stages have two names for 3.
                    remedy = re.sub(r", (\w+) or \1$", r" or \1", choices)
                    yield key, f"= {one['input']!r}", remedy
                else:
                    yield key, f"is refused: {one['msg']}", ""
        except Exception:  # noqa: BLE001 - the loader will say the same
            continue


def _of_loader(table: Mapping[str, Any]) -> Iterator[Refusal]:
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(dict(table))
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        yield LOADER, "; ".join(lines), ""
    except Exception as error:  # noqa: BLE001 - whatever it raises
        yield LOADER, str(error) or type(error).__name__, ""


def _of_plugin(plain: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[Refusal]:
    """Read the plugin's block as its hook does, and beside it what the loader makes of the rest."""
    from deepspeed.runtime.config import DeepSpeedConfig

    from deep_optimizer_states.adapter.hooks import check_supported
    from deep_optimizer_states.config import BLOCK, read_settings
    from deep_optimizer_states.errors import DeepOptimizerStatesError

    try:
        settings = read_settings(given)
        if settings.enabled:
            made = None
            with contextlib.suppress(Exception):  # what the loader refuses is told by itself
                made = DeepSpeedConfig(_filled(plain, given))
            if made is not None:
                setattr(made, BLOCK, settings)
                check_supported(made)
    except DeepOptimizerStatesError as error:
        yield BLOCK, f"is refused by the plugin: {error}", ""


def _filled(plain: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``plain`` with what the plugin needs where a framework may fill it in."""
    zero, asked = dict(_block(plain, "zero_optimization")), _block(given, "zero_optimization")
    if asked.get("stage") == "auto":
        zero["stage"] = 3
    if _block(asked, "offload_optimizer").get("device") == "auto":
        zero["offload_optimizer"] = {**_block(zero, "offload_optimizer"), "device": "cpu"}
    return {**plain, "zero_optimization": zero} if asked else dict(plain)


def _of_optimizer(table: Mapping[str, Any]) -> Iterator[Refusal]:
    import torch
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    name = _block(table, "optimizer").get("type")
    if not isinstance(name, str) or name == "auto":
        return
    made, is_own = getattr(torch.optim, name, None), name.lower() in DEEPSPEED_OPTIMIZERS
    if not is_own and not isinstance(made, type):
        known = [*DEEPSPEED_OPTIMIZERS, *_classes(torch.optim)]
        yield _no_such("optimizer", name, known, "give AdamW")
        return
    is_tested = made in ZERO_SUPPORTED_OPTIMIZERS if not is_own else name.lower() != "lamb"
    is_allowed = table.get("zero_allow_untested_optimizer") is True
    if _block(table, "zero_optimization").get("stage") and not is_tested and not is_allowed:
        remedy = "set zero_allow_untested_optimizer to true at the top level, or give AdamW"
        yield "optimizer.type", f"= {name!r} is refused under ZeRO as untested", remedy


def _of_scheduler(table: Mapping[str, Any]) -> Iterator[Refusal]:
    from deepspeed.runtime import lr_schedules
    from torch.optim import lr_scheduler

    name = _block(table, "scheduler").get("type")
    known = [*lr_schedules.VALID_LR_SCHEDULES, *_classes(lr_scheduler)]
    if isinstance(name, str) and name not in ("auto", *known):
        yield _no_such("scheduler", name, known, "leave it out")


def _block(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    block = table.get(name)
    return block if isinstance(block, Mapping) else {}


def _classes(module: object) -> list[str]:
    return [name for name, kind in vars(module).items() if isinstance(kind, type)]


def _no_such(block: str, name: str, known: Iterable[str], otherwise: str) -> Refusal:
    by_lower = {one.lower(): one for one in sorted(known, reverse=True)}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.7)
    remedy = f"did you mean {by_lower[near[0]]}?" if near else otherwise
    return f"{block}.type", f"= {name!r} is no {block} of this DeepSpeed or torch", remedy


def main() -> None:
    """Answer one question."""
    plain, given = json.load(sys.stdin)
    import deepspeed  # noqa: F401 - writes into the log while it is imported

    logging.disable(logging.CRITICAL)
    sys.stdout.write(f"\n{json.dumps(answer(plain, given))}\n")


def answer(plain: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys and refusals as JSON holds them."""
    facts, models = release_keys()
    keys = {".".join(key): fact for key, fact in facts.items()}
    auto = {".".join(key): of_auto(key) for key in autos(given) if key in facts}
    return {"keys": keys, "refusals": refusals(plain, given, models), "auto": auto}


if __name__ == "__main__":
    main()
