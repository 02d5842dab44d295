"""An explanation as text, page or JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

import jinja2

from ds_config.explain import Explanation, KeyLine, Note

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{{ source }}</title>
<style>
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 62rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .6rem; }
tr { border-bottom: 1px solid #8886; }
code { font-size: .9em; } td:first-child { min-width: 14rem; }
.fault { border-left: .3rem solid #d33; padding-left: .6rem; }
.warning { border-left: .3rem solid #d90; padding-left: .6rem; }
@media (max-width: 40rem) { tr { display: block; padding: .4rem 0; border-bottom: 1px solid #8886; }
  th { display: none; } td { display: block; border: 0; padding: .1rem 0; } }
</style>
<h1>{{ source }}</h1>
<p>Read as DeepSpeed {{ found.version }}: {{ verdict }}</p>
{% for title, kind, notes in groups if notes %}<h2>{{ title }}</h2>
{% for note in notes %}<p class="{{ kind }}"><code>{{ note.key }}</code> {{ note.text
}}{% if note.remedy %}: <em>{{ note.remedy }}</em>{% endif %}</p>
{% endfor %}{% endfor %}<h2>Keys</h2>
<div class="wide"><table><tr><th>key<th>value<th>default<th>meaning</tr>
{% for line in found.keys %}<tr><td><code>{{ line.key }}</code><td>{{ value(line) }}<td>{{
default(line) }}<td>{{ line.meaning }}{{ more(line) }}</tr>
{% endfor %}</table></div></html>
"""


def as_json(source: str, found: Explanation) -> str:
    """``unknown``, ``faults``, ``warnings`` and ``keys``, with the release that was asked."""
    return json.dumps({"source": source, **asdict(found)}, indent=2, default=str)


def as_text(source: str, found: Explanation) -> str:
    """What is wrong first, then key by key."""
    lines = [f"{source}, read as DeepSpeed {found.version}: {_verdict(found)}", ""]
    for title, _, notes in _groups(found):
        if notes:
            lines += [title, *(f"  {_sentence(note)}" for note in notes), ""]
    for line in found.keys:
        depth = "  " * line.key.count(".")
        name = line.key.rpartition(".")[2]
        head = name if line.is_block else f"{name} = {_value(line)}"
        lines.append(f"{depth}{head}")
        about = f"{line.meaning}{_more(line)}"
        default = "" if line.is_block else f" Default: {_default(line)}." if _default(line) else ""
        lines.append(f"{depth}    {about}{default}")
    return "\n".join(lines) + "\n"


def as_page(source: str, found: Explanation) -> str:
    """One HTML page that needs nothing beside it."""
    environment = jinja2.Environment(autoescape=True)
    helpers = {"value": _value, "default": _default, "more": _more}
    return environment.from_string(_PAGE).render(
        source=source, found=found, verdict=_verdict(found), groups=_groups(found), **helpers
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
    return "" if line.is_block else json.dumps(line.value, default=str)


def _default(line: KeyLine) -> str:
    return "" if line.default is None or line.is_block else json.dumps(line.default, default=str)


def _more(line: KeyLine) -> str:
    more = f" auto becomes {line.auto}." if line.auto else ""
    if line.cost_bytes:
        more += f" Takes {_bytes(line.cost_bytes)} of the device."
    return more


def _bytes(count: int) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
