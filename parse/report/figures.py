"""Figures of a sweep folder, as the report shows them."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from parse.unmeasured import SOURCES

_LARGEST_SVG_BYTES = 1_500_000
"""An SVG beyond this, a scatter of many samples, goes into the page as PNG."""
_DESCRIPTION = re.compile(rb"<desc>(.{1,4000}?)</desc>", re.DOTALL)


@dataclass(frozen=True)
class FigureFile:
    """One figure, in all the formats that lie there."""

    stem: str
    title: str
    """What it shows."""
    paths: dict[str, Path]
    """By ending: ``png``, ``svg``, ``pdf``."""

    @property
    def description(self) -> str:
        """What the SVG says of itself; empty without one."""
        path = self.paths.get("svg")
        if path is None:
            return ""
        with path.open("rb") as file:
            found = _DESCRIPTION.search(file.read(20_000))
        return html.unescape(" ".join(found[1].decode(errors="replace").split())) if found else ""

    @property
    def source(self) -> str:
        """``measured``, ``simulated``, ``published``, or several of them."""
        words = re.findall(r"\w+", self.description.lower())
        return " and ".join(source for source in SOURCES if source in words) or SOURCES[0]

    def entry(self, on_cpu: bool = False) -> dict[str, Any]:
        """What a template shows, with links relative to the report."""
        links = {
            kind: f"./figures/{quote(path.name, errors='replace')}"
            for kind, path in self.paths.items()
        }
        source = self.source
        return {
            "stem": self.stem,
            "title": self.title,
            "source": f"{source} on a CPU" if on_cpu and source == "measured" else source,
            "description": self.description,
            "links": links,
            "image": links.get("png") or links["svg"],
            "data_uri": self.data_uri,
        }

    @property
    def data_uri(self) -> str:
        """The figure itself, to stand in the page."""
        svg, png = self.paths.get("svg"), self.paths.get("png")
        if svg and (png is None or svg.stat().st_size <= _LARGEST_SVG_BYTES):
            return _data_uri("image/svg+xml", svg)
        assert png is not None
        return _data_uri("image/png", png)


def find_figures(
    folder: Path, wanted: Sequence[str], titles: Mapping[str, str]
) -> list[FigureFile]:
    """Figures that lie in a folder: those asked for in their order, then the others by name.

    Args:
        folder: Where they lie.
        wanted: Stems of those asked for.
        titles: What figures show, by their stem; others go by their stem.
    """
    found: dict[str, dict[str, Path]] = {}
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            kind = path.suffix[1:].lower()
            if kind in ("png", "svg", "pdf") and path.is_file() and not path.name.startswith("."):
                found.setdefault(path.stem, {})[kind] = path
    shown = [stem for stem, paths in found.items() if "png" in paths or "svg" in paths]
    order = [*(name for name in wanted if name in shown), *shown]
    return [FigureFile(s, titles.get(s, s), found[s]) for s in dict.fromkeys(order)]


def _data_uri(kind: str, path: Path) -> str:
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"
