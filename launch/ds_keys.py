"""Refuses keys of DeepSpeed's JSON that no release reads.

DeepSpeed reads over a key that it does not know, so that a setting with a typo in its name is lost,
and what was to be compared with stock is stock.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import tomllib
from collections.abc import Mapping
from typing import Any

from configs.errors import ConfigError
from configs.files import ROOT
from configs.study import Study
from configs.templates import fields_in, laid_over
from deep_optimizer_states import config as plugin, errors
from launch.train_loop.runfile import COMPRESSION
from optimus_cc.settings import Settings as Compression

KEYS = ROOT / "ds_config" / "words.toml"
"""What each key of DeepSpeed means, those of other releases than the installed one among them."""
CHECKED = "zero_optimization"
"""The block whose keys are checked beside those of the top level, with the blocks in it."""
WITHOUT_DEEPSPEED = "without_deepspeed"
"""Key of an engine's ``ds_config`` that leaves DeepSpeed out altogether."""
_COMMENT = ("_", "$", "/", "#", "comment")
_ALIKE = 0.6


@functools.cache
def _known() -> dict[str, Any]:
    """Return every key, with a table of those in it for each block that is checked."""
    table = tomllib.loads(KEYS.read_text(encoding="utf-8"))
    renamed = [name.removeprefix(f"{CHECKED}.") for name in table["renamed"]]
    more = {**dict.fromkeys(renamed), "offload_optimizer": dict.fromkeys(plugin.PAPER_KEYS)}
    known: dict[str, Any] = dict.fromkeys([*table["keys"], *table["gone"]])
    known[CHECKED] = laid_over(table["keys"][CHECKED], more)
    return known


def _of_studies() -> dict[str, Any]:
    """Return what a study's ``ds_config`` may hold beside DeepSpeed's own keys."""
    compression = dict.fromkeys(field.name for field in dataclasses.fields(Compression))
    return {plugin.BLOCK: None, COMPRESSION: compression, WITHOUT_DEEPSPEED: None}


def check_study(study: Study) -> None:
    """Refuse keys of a study's ``ds_config`` that nobody reads.

    Raises:
        ConfigError: there is one; names study, engine, key and the nearest that there is.
    """
    ours, source = _of_studies(), f"study '{study.name}'"
    _check(study.ds_config, {**_known(), **ours}, f"{source}: ds_config")
    for name, engine in study.engines.items():
        where = f"{source}, engine '{name}': ds_config"
        _check(engine.ds_config, {**_known(), **ours}, where)
        _check_plugins_block(laid_over(study.ds_config, engine.ds_config), where)


def check_json(table: Mapping[str, Any], source: str) -> None:
    """Refuse keys of a DeepSpeed JSON of the user's own that no release reads.

    Raises:
        ConfigError: there is one; names source, key and the nearest that there is.
    """
    _check(table, _known(), source)


def _check(table: Mapping[str, Any], known: Mapping[str, Any], where: str, block: str = "") -> None:
    for key, value in table.items():
        name = f"{block}{key}"
        if not block and key.startswith(_COMMENT):
            continue
        if key not in known:
            near = difflib.get_close_matches(key.lower(), known, n=1, cutoff=_ALIKE)
            guess = f"did you mean '{block}{near[0]}'? Else leave" if near else "leave"
            raise ConfigError(
                f"{where}: {name} = {value!r}: no release of DeepSpeed reads this key, so that "
                f"the setting would be lost: {guess} it out (`python -m ds_config explain FILE` "
                "tells what each key does)"
            )
        if isinstance(value, Mapping) and isinstance(known[key], Mapping):
            _check(value, known[key], where, f"{name}.")


def _check_plugins_block(config: Mapping[str, Any], where: str) -> None:
    """Check the block, of one with fields of a point, whose values are not known yet, the keys."""
    block = config.get(plugin.BLOCK)
    if isinstance(block, Mapping) and fields_in(block):
        fields = plugin.Settings.model_fields
        block = {k: fields[k].default if k in fields else value for k, value in block.items()}
    try:
        plugin.read_settings({plugin.BLOCK: block})
    except errors.ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
