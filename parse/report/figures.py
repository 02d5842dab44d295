"""Figures of a sweep folder, as the report shows them."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from parse.unmeasured import MEASURED, SOURCES

_LARGEST_SVG_BYTES = 1_500_000
"""An SVG beyond this, a scatter of many samples, goes into the page as PNG."""
_DESCRIPTION = re.compile(rb"<desc>(.{1,4000}?)</desc>", re.DOTALL)
_PAGE = re.compile(r"(?P<figure>.+)-page-(?P<number>\d+)")
_TYPES = {"png": "image/png", "svg": "image/svg+xml", "pdf": "application/pdf"}


def find_figures(
    folder: Path, wanted: Sequence[str], titles: Mapping[str, str], *, on_cpu: bool
) -> list[dict[str, Any]]:
    """Figures that lie in a folder: those asked for in their order, then the others by name.

    Args:
        folder: Where they lie.
        wanted: Names of those asked for.
        titles: What figures show, by their names; others go by their name.
        on_cpu: Whether what was measured was measured on a CPU.

    Returns:
        What the templates show of each page of each figure; ``figure`` is its name.
    """
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.glob("[!.]*")):
        kind = path.suffix[1:].lower()
        if kind in _TYPES and path.is_file():
            found.setdefault(path.stem, {})[kind] = path
    order = []
    for stem, paths in found.items():
        page = _PAGE.fullmatch(stem)
        figure, number = (page["figure"], int(page["number"])) if page else (stem, 1)
        if "png" in paths or "svg" in paths:
            rank = wanted.index(figure) if figure in wanted else len(wanted)
            title = titles.get(figure, figure) + (f" (page {number})" if page else "")
            order.append((rank, figure, number, _entry(figure, title, paths, on_cpu)))
    return [entry for *_, entry in sorted(order, key=lambda item: item[:3])]


def _entry(figure: str, title: str, paths: Mapping[str, Path], on_cpu: bool) -> dict[str, Any]:
    """What a template shows, with links relative to the report."""
    links = {kind: f"./figures/{quote(p.name, errors='replace')}" for kind, p in paths.items()}
    description = _description(paths["svg"]) if "svg" in paths else ""
    words = re.findall(r"\w+", description.lower())
    source = " and ".join(source for source in SOURCES if source in words) or MEASURED
    in_page = "svg"
    if "png" in paths and ("svg" not in paths or paths["svg"].stat().st_size > _LARGEST_SVG_BYTES):
        in_page = "png"
    content = base64.b64encode(paths[in_page].read_bytes()).decode("ascii")
    return {
        "figure": figure,
        "title": title,
        "source": f"{source} on a CPU" if on_cpu and source == MEASURED else source,
        "description": description,
        "links": links,
        "image": links.get("png") or links["svg"],
        "data_uri": f"data:{_TYPES[in_page]};base64,{content}",
    }


def _description(path: Path) -> str:
    """What an SVG says of itself; empty where it says nothing."""
    with path.open("rb") as file:
        found = _DESCRIPTION.search(file.read(20_000))
    return html.unescape(" ".join(found[1].decode(errors="replace").split())) if found else ""
