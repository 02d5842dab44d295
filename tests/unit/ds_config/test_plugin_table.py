"""The table of the plugin's keys in docs/plugin.md; ``make golden`` writes it anew."""

import ast
import inspect
import itertools
import json
import os
import re
from pathlib import Path

from deep_optimizer_states.config import Settings

PAGE = Path(__file__).resolve().parents[3] / "docs" / "plugin.md"


def meanings():
    """Return the docstring below each field. Each rank imports ``Settings`` and needs none."""
    (definition,) = ast.parse(inspect.getsource(Settings)).body
    return {
        field.target.id: text.value.value
        for field, text in itertools.pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def table():
    """Make the rows of every key, its default and its meaning."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    texts = meanings()
    for name, field in Settings.model_fields.items():
        meaning = " ".join(texts[name].split()).replace("``", "`").replace("|", "\\|")
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
