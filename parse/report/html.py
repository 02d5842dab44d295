"""The report as one page that works offline: style, script and figures stand in it.

Everything that comes from a log, a name or a path is escaped by the template engine; links are
relative and percent-encoded; and a policy in the page itself allows no script or style but ours, by
their hashes, and no request at all.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

TEMPLATES = Path(__file__).resolve().parent / "templates"


def render_html(context: dict[str, Any], template: str = "report") -> str:
    """The page, from what ``report_context`` or ``simulated_context`` collects."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    environment.filters["line"] = one_line
    style, script = (_own_file(name) for name in ("report.css", "report.js"))
    page = environment.get_template(f"{template}.html.j2")
    return page.render(context, style=style, script=script, policy=_policy(style, script))


def one_line(text: object) -> str:
    """Text without line breaks, control characters or marks that turn its direction around."""
    return "".join(c if c.isprintable() else " " for c in str(text)).strip()


def _own_file(name: str) -> markupsafe.Markup:
    """A file of ours that goes into the page as it is."""
    return markupsafe.Markup((TEMPLATES / name).read_text(encoding="utf-8"))


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; "
        f"script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
