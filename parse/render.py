"""Pages of reports, from the templates.

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
    """Return one page that works offline, with style, script and figures in it."""
    environment = _environment(autoescape=True)
    environment.filters["line"] = one_line
    style, script = (
        markupsafe.Markup((TEMPLATES / name).read_text(encoding="utf-8"))
        for name in ("report.css", "report.js")
    )
    hashes = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
        for text in (style, script)
    ]
    policy = (
        f"default-src 'none'; img-src data:; style-src 'sha256-{hashes[0]}'; "
        f"script-src 'sha256-{hashes[1]}'; base-uri 'none'; form-action 'none'"
    )
    page = environment.get_template(f"{template}.html.j2")
    return page.render(context, style=style, script=script, policy=policy)


def render_markdown(context: dict[str, Any], template: str = "report") -> str:
    """Return the same for a repository; what logs say is escaped by the filter ``text``."""
    environment = _environment(autoescape=False)
    environment.filters["text"] = _escape
    environment.filters["code"] = lambda text: one_line(f".{text}")[1:]
    return environment.get_template(f"{template}.md.j2").render(context).rstrip("\n") + "\n"


def _environment(autoescape: bool) -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=autoescape,
    )


def _escape(text: object) -> str:
    """Plain text for Markdown, safe inside a table's cell."""
    line = one_line("" if text is None else text)
    # A reader of Markdown decodes entities, so that "&lt;" would come out as "<".
    for character in "\\`*_[]|<>&":
        line = line.replace(character, f"\\{character}")
    return line


def one_line(text: object) -> str:
    """Return text without line breaks, control characters or marks that turn its direction."""
    return "".join(c if c.isprintable() else " " for c in str(text)).strip()
