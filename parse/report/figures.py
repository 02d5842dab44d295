"""Figures of a sweep folder, as the report shows them."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TITLES = {
    "iteration-breakdown": "Iteration by phase",
    "models": "Models",
    "stride": "Update throughput and iteration time against the stride",
    "micro-batch": "Iteration time and TFLOP/s against the micro-batch",
    "subgroup-size": "Update and iteration time against the subgroup size",
    "data-parallel": "Weak scaling over data-parallel ranks",
    "offload-ratio": "Iteration and update time against the resident share",
    "accumulation": "Gradient accumulation",
    "gpu-hogging": "A co-process takes a share of the device",
    "update-rates": "Update throughput",
    "memory": "Memory over the phases of an iteration",
    "utilisation": "Utilisation over the time of a run",
    "loss": "Losses over each other",
}
"""By the file's stem; other figures go by their stem."""
SOURCES = ("measured", "simulated", "published")

_LARGEST_SVG_BYTES = 1_500_000
"""An SVG beyond this, a scatter of many samples, goes into the page as PNG."""
_DESCRIPTION = re.compile(rb"<desc>(.{1,4000}?)</desc>", re.DOTALL)


@dataclass(frozen=True)
class FigureFile:
    """One figure, in all the formats that lie there."""

    stem: str
    paths: dict[str, Path]
    """By ending: ``png``, ``svg``, ``pdf``."""

    @property
    def title(self) -> str:
        """What it shows."""
        return TITLES.get(self.stem, self.stem)

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

    @property
    def data_uri(self) -> str:
        """The figure itself, to stand in the page."""
        svg, png = self.paths.get("svg"), self.paths.get("png")
        if svg and (png is None or svg.stat().st_size <= _LARGEST_SVG_BYTES):
            return _data_uri("image/svg+xml", svg)
        assert png is not None
        return _data_uri("image/png", png)


def find_figures(folder: Path, wanted: Sequence[str]) -> list[FigureFile]:
    """Figures that lie in a folder: those asked for in their order, then the others by name."""
    found: dict[str, dict[str, Path]] = {}
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            kind = path.suffix[1:].lower()
            if kind in ("png", "svg", "pdf") and path.is_file() and not path.name.startswith("."):
                found.setdefault(path.stem, {})[kind] = path
    shown = [stem for stem, paths in found.items() if "png" in paths or "svg" in paths]
    order = [name for name in dict.fromkeys(wanted) if name in shown]
    return [
        FigureFile(stem, found[stem]) for stem in (*order, *(s for s in shown if s not in order))
    ]


def _data_uri(kind: str, path: Path) -> str:
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"
