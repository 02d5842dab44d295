"""An explanation as text, page or JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jinja2

from ds_config.explain import Explanation, KeyLine
from ds_config.release import Note

_PAGE = Path(__file__).with_name("page.html.jinja")


def as_json(source: str, found: Explanation) -> str:
    """Return the fields of an explanation, the release that was asked among them."""
    return json.dumps({"source": source, **asdict(found)}, indent=2, default=str)


def as_text(source: str, found: Explanation) -> str:
    """Return what is wrong first, then key by key."""
    lines = [f"{source}, read as DeepSpeed {found.version}: {_verdict(found)}", ""]
    for title, _, notes in _groups(found):
        if notes:
            lines += [title, *(f"  {_sentence(note)}" for note in notes), ""]
    for line in found.keys:
        depth = "  " * line.key.count(".")
        name = line.key.rpartition(".")[2]
        head = name if line.is_block else f"{name} = {_value(line)}"
        lines.append(f"{depth}{head}")
        default = f"Default: {_default(line)}." if _default(line) else ""
        about = " ".join(filter(None, (line.meaning, _more(line), default)))
        lines.append(f"{depth}    {about}")
    return "\n".join(lines) + "\n"


def as_page(source: str, found: Explanation) -> str:
    """Return one HTML page that needs nothing beside it."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    helpers = {"value": _value, "default": _default, "more": _more}
    return environment.from_string(_PAGE.read_text(encoding="utf-8")).render(
        source=source,
        name=Path(source).name,
        found=found,
        verdict=_verdict(found).capitalize(),
        groups=_groups(found),
        **helpers,
    )


def _groups(found: Explanation) -> list[tuple[str, str, list[Note]]]:
    return [
        ("Unknown keys", "fault", found.unknown),
        ("Faults", "fault", found.faults),
        ("Warnings", "warning", found.warnings),
    ]


def _verdict(found: Explanation) -> str:
    if found.is_accepted:
        return "it would take this configuration."
    if found.faults:
        return "it would refuse this configuration."
    return "keys of this configuration do nothing."


def _sentence(note: Note) -> str:
    return f"{note.key}: {note.text}" + (f"; {note.remedy}" if note.remedy else "")


def _value(line: KeyLine) -> str:
    return "" if line.is_block else _json(line.value)


def _default(line: KeyLine) -> str:
    return "" if line.default is None or line.is_block else _json(line.default)


def _json(value: Any) -> str:  # noqa: ANN401
    """A value as one writes it: sizes of 1e9 elements are whole numbers."""
    whole = isinstance(value, float) and value.is_integer() and abs(value) >= 1e3
    return f"{value:.15g}" if whole else json.dumps(value, default=str)


def _more(line: KeyLine) -> str:
    more = [f"auto: {line.auto}."] if line.auto else []
    if line.cost_bytes:
        more.append(f"A buffer of it takes {_bytes(line.cost_bytes)} of the device.")
    return " ".join(more)


def _bytes(count: int) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
