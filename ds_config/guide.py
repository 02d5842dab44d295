"""``python -m ds_config guide`` writes the tables of keys in ``docs``.

``docs/guide.md`` is made from the keys of the installed DeepSpeed, and the table in
``docs/plugin.md`` from those of the plugin's own block.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import jinja2

from configs.files import ROOT
from deep_optimizer_states.config import Settings
from deep_optimizer_states.core.host import bytes_of_gradients, bytes_of_state
from ds_config.auto import AUTO_SIZES, tables
from ds_config.explain import newer_name, text_of, words
from ds_config.installed import Key
from ds_config.release import Answer, KeyFact
from ds_config.rules import ZERO, buckets

FILE = ROOT / "docs" / "guide.md"
PLUGIN_FILE = ROOT / "docs" / "plugin.md"
_PLUGIN_KEYS = re.compile(r"(?<=<!-- keys -->\n).*?(?=<!-- end of keys -->)", re.DOTALL)
_TEMPLATE = Path(__file__).with_name("guide.md.jinja")
_ILLNESSES = ROOT / "parse" / "illnesses.toml"


def guide(answer: Answer) -> str:
    """Return the whole guide for the release that answered."""
    known, fills = answer.keys, tables()
    environment = jinja2.Environment(
        trim_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    environment.filters["code"] = lambda name: f"`{name}`"
    text = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        version=answer.version,
        host_bytes=bytes_of_state() + bytes_of_gradients(),
        host_bytes_summed=bytes_of_state() + bytes_of_gradients(accumulation=2),
        bucket=_bucket,
        auto=[
            (name, *(fills[framework].get(name, "an error") for framework in fills))
            for name in sorted({name for table in fills.values() for name in table})
        ],
        sizes=[(name, f"{size(4096):,}") for name, size in AUTO_SIZES.items()],
        illnesses={
            name: _cell(row["remedy"])
            for name, row in tomllib.loads(_ILLNESSES.read_text(encoding="utf-8")).items()
        },
        refused=sorted(".".join(key) for key, fact in known.items() if fact.removed),
        renamed=[
            (".".join(key), newer_name(key, known))
            for key, fact in sorted(known.items())
            if fact.deprecated and fact.replaced_by
        ],
        blocks=[
            (".".join(block), words().get(block, ""), [_row(key, known) for key in keys])
            for block, keys in _keys_by_block(known).items()
        ],
    )
    return text.rstrip() + "\n"


def plugin_page(page: str) -> str:
    """Return ``docs/plugin.md`` with the table of the block's keys made anew."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        meaning = _cell(" ".join((field.description or "").split())).replace("``", "`")
        lines.append(f"| `{name}` | `{json.dumps(field.default)}` | {meaning} |")
    return _PLUGIN_KEYS.sub(lambda _: "\n".join(lines) + "\n", page)


def _bucket(elements: float) -> str:
    table = {"bf16": {"enabled": True}, ZERO: {"stage": 3, "reduce_bucket_size": elements}}
    found = buckets(table)
    assert found
    return f"{found.num_bytes / 1e9:.1f} GB"


def _keys_by_block(known: Mapping[Key, KeyFact]) -> dict[Key, list[Key]]:
    """Return the keys of each block, ordered as in the words, the top level first."""
    places: dict[Key, list[Key]] = {}
    for key in [*(key for key in words() if key in known), *sorted(known.keys() - words().keys())]:
        is_block = any(other[: len(key)] == key and other != key for other in known)
        is_alias = key[0] == "bfloat16" or (*key[:-1], f"stage3_{key[-1]}") in known
        if not known[key].removed and not is_alias and not is_block:
            places.setdefault(key[:-1], []).append(key)
    return places


def _row(key: Key, known: Mapping[Key, KeyFact]) -> tuple[str, str, str]:
    mark = " (auto)" if key[0] == ZERO and key[-1] in AUTO_SIZES else ""
    return key[-1], _cell(text_of(known[key].default)), _cell(words().get(key, "")) + mark


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
