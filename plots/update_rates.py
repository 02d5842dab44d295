"""Update throughput of each engine and offload ratio: what the CPU and the GPU do by themselves."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plots.bars import face
from plots.canvas import WIDTH_INCHES, canvas, fold, footnote, plain, watermark
from plots.observations import observe
from plots.series import Panel, Value, describe, remarks, split, summarise, variants
from plots.style import engine_order, engine_title, sweep_style
from plots.tables import PlotError, Tables
from plots.units import UPDATE_RATE, Scale, short

_BAR_INCHES = 0.3
_Row = tuple[str, str, float, str, Value]


def unsupported(tables: Tables) -> str:
    """Why the figure is not worth drawing unasked; empty when it is."""
    values = observe(tables).values
    known = values[values["update_rate"].notna()]
    if known.empty:
        return "no run has both its number of parameters and the time of its update"
    ratios = known["offload_ratio"].dropna().unique()
    return "" if len(ratios) > 1 else "no two offload ratios"


def draw(tables: Tables) -> Figure:
    """Horizontal bars, a panel a model.

    Raises:
        PlotError: no run has an update throughput.
    """
    data = observe(tables)
    if data.values["update_rate"].isna().all():
        raise PlotError(unsupported(tables))
    panels = [(panel, _rows(panel)) for panel in split(data, "offload_ratio")]
    panels = [(panel, rows) for panel, rows in panels if rows]
    values = [row[-1] for _, rows in panels for row in rows]
    scale = UPDATE_RATE.scale(v.high for v in values)
    longest = max(v.high for v in values) / scale.divisor
    places = variants(data.runs)
    sizes = [len(rows) for _, rows in panels]
    with canvas():
        lines = sum(1 + fold(panel.title, 52).count("\n") for panel, _ in panels)
        height = 0.7 + 0.16 * lines + sum(0.3 + _BAR_INCHES * size for size in sizes)
        figure = Figure(figsize=(WIDTH_INCHES, height))
        axes = figure.subplots(
            len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": sizes}
        )[:, 0]
        for ax, (panel, rows) in zip(axes, panels, strict=True):
            _draw_panel(ax, rows, scale, places)
            ax.set_title(fold(panel.title, 52), loc="left")
            watermark(ax, {row[3] for row in rows})
        axes[-1].set_xlim(0, 1.12 * longest)
        axes[-1].set_xlabel(UPDATE_RATE.label(scale).replace("\n", " "))
        where = tables.provenance(set(data.values["path"]))
        footnote(figure, describe(values), *remarks(data.runs, data.failed), where)
    return figure


def _rows(panel: Panel) -> list[_Row]:
    """Label, engine, stride, source and value of each bar: by engine, the host's share falling."""
    keys = ["engine", "stride", "source", "offload_ratio"]
    found = []
    for (engine, stride, source, ratio), rows in panel.values.groupby(
        keys, sort=False, dropna=False
    ):
        name = engine_title(engine, stride, source)
        # A ratio that nobody says is NaN, which equals nothing.
        label = f"{name}, ratio {ratio:g}" if ratio == ratio else name
        found += [
            (-ratio, (label, engine, stride, source, value))
            for value in summarise(rows, "", UPDATE_RATE.column)
        ]
    found.sort(key=lambda item: (engine_order(item[1][1]), item[1][2], item[0]))
    return [row for _, row in found]


def _draw_panel(
    ax: Axes, rows: list[_Row], scale: Scale, places: dict[tuple[str, float], int]
) -> None:
    for place, (_, engine, stride, source, value) in enumerate(rows):
        style = sweep_style(engine, places.get((engine, stride), 0), source)
        low, median, high = (v / scale.divisor for v in (value.low, value.median, value.high))
        ax.barh(place, median, 0.7, **face(style, source))
        ax.errorbar(
            median, place, xerr=([median - low], [high - median]), color="black", capsize=2,
            elinewidth=0.9,
        )  # fmt: skip
        ax.annotate(
            short(median), (high, place), xytext=(4, 0), textcoords="offset points", va="center",
            fontsize=8, fontweight="bold",
        )  # fmt: skip
    ax.set_yticks(range(len(rows)), [plain(row[0]) for row in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.grid(visible=False, axis="y")
