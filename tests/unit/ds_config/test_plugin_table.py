"""The table of the plugin's keys in docs/plugin.md; ``make golden`` writes it anew."""

import json
import os
import re
from pathlib import Path

from deep_optimizer_states.config import Settings

PAGE = Path(__file__).resolve().parents[3] / "docs" / "plugin.md"


def table():
    """Make the rows of every key, its default and its meaning."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in Settings.model_fields.items():
        meaning = " ".join((field.description or "").split()).replace("``", "`").replace("|", "\\|")
        lines.append(f"| `{name}` | `{json.dumps(field.default)}` | {meaning} |")
    return "\n".join(lines) + "\n"


def test_golden_table_of_the_plugins_keys():
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(r"(?<=<!-- keys -->\n).*?(?=<!-- end of keys -->)", text, re.DOTALL)
    if os.environ.get("GOLDEN_REWRITE"):
        PAGE.write_text(text.replace(found[0], table()), encoding="utf-8")
    assert found[0] == table(), "make golden"
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| \S", found[0], re.MULTILINE)
    assert {name: json.loads(default) for name, default in rows} == Settings().model_dump()
