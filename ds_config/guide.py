"""``python -m ds_config guide`` writes ``docs/guide.md`` from what the newest release says."""

from __future__ import annotations

import argparse
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from ds_config.explain import newer_name, words
from ds_config.expressions import Key, KeyFact
from ds_config.releases import history, keys_of, versions
from ds_config.rules import ZERO, Setting, buckets

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "guide.md"
_TEMPLATE = Path(__file__).with_name("guide.md.jinja")
_ILLNESSES = ROOT / "parse" / "diagnose" / "illnesses.toml"
_OLD = "0.8.2"
_AUTO = (
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
)
_SAME_AS = {"bfloat16": "bf16"}
"""Older names of blocks, which a release reads like the newer ones."""


@dataclass(frozen=True)
class _Rows:
    about: str
    keys: list[tuple[str, str, str]]


def register(commands: Any) -> None:  # noqa: ANN401 - argparse's class is not public
    """Add the command."""
    parser = commands.add_parser("guide", help="write docs/guide.md anew")
    parser.add_argument("--out", type=Path, default=FILE, metavar="FILE", help="[docs/guide.md]")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    # The project's own page is written anew; no other file is ever written over.
    mode = "w" if arguments.out.resolve() == FILE else "x"
    try:
        with arguments.out.open(mode, encoding="utf-8") as file:
            file.write(guide())
    except FileExistsError:
        sys.stderr.write(f"ds_config guide: error: --out {arguments.out}: is already there\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"ds_config guide: error: {arguments.out}: {error.strerror}\n")
        return 2
    sys.stdout.write(f"{arguments.out}\n")
    return 0


def guide() -> str:
    """The whole guide, for the newest release on file."""
    version = versions()[-1]
    known = keys_of(version)
    environment = jinja2.Environment(
        trim_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    environment.filters["code"] = lambda name: f"`{name}`"
    text = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        version=version,
        has_memory=(FILE.parent / "memory.md").is_file(),
        bucket=_bucket,
        since=_since,
        auto_keys=_AUTO,
        auto=lambda name, hidden: Setting(version, hidden).auto((ZERO, name)).split(" (give")[0],
        illnesses=_illnesses(),
        refused=sorted(".".join(key) for key, fact in known.items() if fact.removed),
        moved=list(_moved(known)),
        renamed=_renamed(known),
        new=_new(known),
        blocks=_blocks(known),
    )
    return text.rstrip() + "\n"


def _bucket(elements: float) -> str:
    table = {"bf16": {"enabled": True}, ZERO: {"stage": 3, "reduce_bucket_size": elements}}
    found = buckets(table, Setting(""))
    assert found
    return f"{found.num_bytes / 1e9:.1f} GB"


def _since(key: Key) -> str:
    return f" (since {history(key)[0][0]})"


def _illnesses() -> dict[str, str]:
    table = tomllib.loads(_ILLNESSES.read_text(encoding="utf-8"))
    return {name: row["remedy"].replace("|", "\\|") for name, row in table.items()}


def _moved(known: dict[Key, KeyFact]) -> list[tuple[str, str, str, str]]:
    old = keys_of(_OLD)
    found = []
    for key, fact in known.items():
        if key not in old or fact.removed or isinstance(fact.default, dict | list):
            continue
        if old[key].default != fact.default:
            when = next(v for v, f in reversed(history(key)) if f and f.default == fact.default)
            found.append((".".join(key), _text(old[key].default), _text(fact.default), when))
    return found


def _renamed(known: dict[Key, KeyFact]) -> list[tuple[str, str]]:
    return [
        (".".join(key), newer_name(key, known))
        for key, fact in known.items()
        if fact.deprecated and fact.replaced_by
    ]


def _new(known: dict[Key, KeyFact]) -> list[str]:
    """Keys of the top level and of ZeRO that 0.8.2 did not have."""
    old = keys_of(_OLD)
    shown = [key for key in known if len(key) == 1 or (len(key) == 2 and key[0] == ZERO)]
    return [
        ".".join(key)
        for key in sorted(shown)
        if key not in old and not known[key].removed and not _is_alias(key, known)
    ]


def _is_alias(key: Key, known: dict[Key, KeyFact]) -> bool:
    return key[0] in _SAME_AS or (*key[:-1], f"stage3_{key[-1]}") in known


def _blocks(known: dict[Key, KeyFact]) -> list[tuple[str, _Rows]]:
    """Keys by the block they are in, the top level first, then as the words are ordered."""
    places: dict[Key, list[Key]] = {}
    ordered = [*(key for key in words() if key in known), *sorted(known.keys() - words().keys())]
    for key in ordered:
        is_block = any(other[: len(key)] == key and other != key for other in known)
        if not known[key].removed and not _is_alias(key, known) and not is_block:
            places.setdefault(key[:-1], []).append(key)
    return [
        (
            ".".join(block),
            _Rows(
                words().get(block, ""),
                [(key[-1], _text(known[key].default), _meaning(key)) for key in keys],
            ),
        )
        for block, keys in places.items()
    ]


def _meaning(key: Key) -> str:
    mark = " (auto)" if key[0] == ZERO and key[-1] in _AUTO else ""
    return words().get(key, "").replace("|", "\\|") + mark


def _text(value: Any) -> str:  # noqa: ANN401
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value).replace("|", "\\|")
