"""The figure of ``advise``: time of every rung against its memory, what fits in colour."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D

from configs.errors import ConfigError
from configs.sources import SIMULATED
from deep_optimizer_states.units import GIB
from ds_config.search import PLUGIN, STOCK, NodeMemory, Rung
from plots.canvas import Mark, name_marks, save, sheet, watermark
from plots.current import FORMATS

_COLOURS = {PLUGIN: "#D55E00", STOCK: "#0072B2"}
_MARKERS = dict(enumerate("osD^"))
"""By stage."""
_INCHES = 3.6
_MARK_POINTS = 7.0


def draw(file: Path, rungs: Sequence[Rung], room: NodeMemory, title: str) -> Path:
    """Draw time against memory of a GPU and of the host, and return the SVG's path.

    Args:
        file: Path of the new files, whose ending is replaced by each format's.
        rungs: Those without a time are left out.
        room: The memory that there is, a line in each panel.
        title: What the figure is of.

    Raises:
        ConfigError: a file is there already, no rung has a time, or it cannot be written.
    """
    stem = file.with_suffix("") if file.suffix.removeprefix(".") in FORMATS else file
    for kind in FORMATS:
        if (path := stem.with_name(f"{stem.name}.{kind}")).exists():
            raise ConfigError(f"--figure {path}: is already there; give another name")
    if not stem.parent.is_dir():
        raise ConfigError(f"--figure {file}: {stem.parent} is no folder")
    timed = [rung for rung in rungs if rung.iteration_s is not None]
    if not timed:
        raise ConfigError(f"--figure {file}: no rung has a time: {rungs[0].no_time}")
    panels = [("host memory of a rank (GiB)", "host_bytes", room.host_bytes / room.ranks_a_node)]
    if room.device_bytes:
        panels.insert(0, ("memory of a GPU (GiB)", "device_bytes", room.device_bytes))
    marks: list[Mark] = []
    notes = [title, "predicted, not run", "letters: what is offloaded, o optimizer, w weights; "
             "h: 16-bit states; r: layers recomputed", "line: what there is"]  # fmt: skip
    with sheet(_handles(), _INCHES, (1, len(panels)), notes, sharey=True) as (figure, axes):
        for ax, (label, field, limit) in zip(axes[0], panels, strict=True):
            for rung in timed:
                at = getattr(rung.peaks, field) / GIB, rung.iteration_s or 0.0
                ax.plot(*at, **_look(rung))
                colour = "black" if rung.fits else "0.6"
                marks.append(Mark(ax, at, _MARK_POINTS, _letters(rung), colour))
            ax.axvline(limit / GIB, color="0.3", linewidth=0.8, linestyle="--")
            ax.set_xlabel(label)
            ax.set_xlim(left=0)
            ax.set_ylim(bottom=0)
            watermark(ax, {SIMULATED})
        axes[0][0].set_ylabel("time of an iteration (s)")
    name_marks(figure, marks)
    save(figure, stem.parent, stem.name, f"time of an iteration against memory: {title}")
    return stem.with_name(f"{stem.name}.svg")


def _look(rung: Rung) -> dict[str, Any]:
    colour = _COLOURS[rung.setting.engine] if rung.fits else "0.75"
    return {
        "linestyle": "none", "marker": _MARKERS[rung.setting.stage], "markersize": _MARK_POINTS,
        "color": colour, "markeredgecolor": "black" if rung.fits else "0.6",
        "markeredgewidth": 0.4, "markerfacecolor": colour if rung.fits else "white",
    }  # fmt: skip


def _letters(rung: Rung) -> str:
    setting = rung.setting
    return "".join(
        letter
        for letter, applies in (
            ("o", setting.optimizer_at != "none"),
            ("w", setting.weights_at != "none"),
            ("h", not setting.has_fp32_states),
            ("r", rung.checkpointing),
        )
        if applies
    )


def _handles() -> dict[str, Any]:
    made = {
        f"{engine}, fits": Line2D([], [], linestyle="none", marker="o", color=colour)
        for engine, colour in _COLOURS.items()
    }
    made["does not fit"] = Line2D(
        [], [], linestyle="none", marker="o", color="0.6", markerfacecolor="white"
    )
    return made | {
        f"stage {stage}": Line2D([], [], linestyle="none", marker=marker, color="0.3")
        for stage, marker in _MARKERS.items()
    }
