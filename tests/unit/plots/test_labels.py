"""No text of a figure lies over another, as the renderer places them."""

import csv
import itertools
import math

import pytest
from matplotlib import style
from matplotlib.path import Path as Outline
from matplotlib.text import Text

from configs.study import load_study
from plots.registry import figures
from plots.style import STYLE_FILE
from plots.tables import read_tables

SIZES = [10**7, 2 * 10**7, 5 * 10**7, 10**8, 2 * 10**8, 5 * 10**8, 10**9, 2 * 10**9]
STRIDES = [("stock", 0), ("all-host", 0), *(("stride", k) for k in (2, 3, 4))]


def outline(text):
    """Corners of a text as it is drawn; a slanted one is turned around its anchor."""
    degrees = text.get_rotation()
    if text.get_rotation_mode() != "anchor":
        return Text.get_window_extent(text).corners()[[0, 1, 3, 2]]  # without the line to a mark
    x, y = text.get_transform().transform(text.get_position())
    text.set_rotation(0)
    flat = text.get_window_extent().corners()[[0, 1, 3, 2]] - (x, y)
    text.set_rotation(degrees)
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return flat @ [[cos, sin], [-sin, cos]] + (x, y)


def overlapping(figure):
    """Pairs of texts that overlap, and texts beyond the edge of the figure."""
    with style.context(STYLE_FILE):  # as it is saved
        figure.draw_without_rendering()
    hidden = beyond_the_ends(figure)
    texts = [
        text
        for text in figure.findobj(Text)
        if text.get_text().strip() and text.get_visible() and text.get_gid() != "watermark"
        and text not in hidden
    ]  # fmt: skip
    shapes = [(text.get_text(), outline(text)) for text in texts]
    width = figure.bbox.width
    found = [
        (a, "the edge") for a, at in shapes if at[:, 0].min() < -1 or at[:, 0].max() > width + 1
    ]
    for (a, one), (b, other) in itertools.combinations(shapes, 2):
        if Outline(shrunk(one)).intersects_path(Outline(shrunk(other)), filled=True):
            found.append((a, b))
    return found


def shrunk(corners):
    """Boxes of texts hold some air: a pixel of them may be shared."""
    middle = corners.mean(axis=0)
    return [*(middle + 0.94 * (corners - middle)), middle + 0.94 * (corners[0] - middle)]


def beyond_the_ends(figure):
    """Ticks beyond the ends of an axis have names too, which are not drawn."""
    found = set()
    for ax in figure.axes:
        for axis, at in ((ax.xaxis, 0), (ax.yaxis, 1)):
            low, high = sorted(axis.get_view_interval())
            names = axis.get_ticklabels()
            found |= {name for name in names if not low <= name.get_position()[at] <= high}
    return found


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("subgroup-size", {"model": ["7B", "13B"], "subgroup_numel": SIZES}),
        ("offload-ratio", {"offload_ratio": [1.0, 0.99, 0.98, 0.9, 0.5, 0.0]}),
        ("models", {"model": ["7B", "20B"], "micro_batch_size": [1, 16]}),
        ("iteration-breakdown", {"model": ["7B", "13B"], "subgroup_numel": SIZES[:3]}),
        ("loss", {"model": ["7B", "13B"], "subgroup_numel": SIZES[:2]}),
    ],
)
def test_no_text_lies_over_another(draw, sweep, name, settings):
    sweep.grid(engines=STRIDES, **settings)
    assert overlapping(draw(name, sweep)) == []


def test_titles_of_an_iteration_do_not_overlap_however_many_there_are(draw, sweep):
    run = sweep.add("stock")
    keys = {key: run[key] for key in ("path", "label", "case", "engine")}
    for place in range(30):
        title = f"Engine before micro-batch {place}"
        sweep.memory.append({**keys, "iteration": 2, "title": title, "allocated_gib": place})
    figure = draw("memory", sweep)
    assert overlapping(figure) == []
    names = [name.get_text() for name in figure.axes[0].get_xticklabels()]
    assert names[0] == "Engine before micro-batch 0"


def ladder(folder):
    """Rungs that are close to each other, in two types, on the study of the ladder."""
    study, rows = load_study("zero-ladder"), []
    for place, (engine, dtype) in enumerate(itertools.product(study.engines, ("fp32", "bf16"))):
        label = f"{engine} {dtype}"
        rows.append({
            "path": label, "label": label, "case": "tiny", "engine": engine, "device": "cpu",
            "hardware": "", "iteration_ms": 30, "warmup_iterations": 1, "timed_iterations": 9,
            "point": label, "status": "ok", "verdict": "trains", "dtype": dtype, "model": "tiny",
            "dp": 1 + (dtype == "bf16"), "micro_batch_size": 2, "global_batch_size": 4,
            "max_allocated_gib": 0.4 + 0.001 * place, "host_peak_gib": 0.5 + 0.001 * place,
        })  # fmt: skip
    folder.mkdir()
    (folder / "study.json").write_text(study.as_json())
    with (folder / "runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    (folder / "iterations.csv").write_text("path,label,case,engine,iteration,loss\n")
    tables = read_tables(folder)
    return figures(tables.study)["ladder"].draw(tables)


def test_marks_that_are_close_have_names_beside_each_other(tmp_path):
    figure = ladder(tmp_path / "tables")
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert {"a", "ZeRO-1, fp16", "ZeRO-3, both offloaded"} <= {*texts}
    assert overlapping(figure) == []
    over = [
        text.get_text()
        for ax in figure.axes
        for text in ax.texts
        for line in ax.lines
        if Text.get_window_extent(text).contains(*ax.transData.transform(line.get_xydata()[0]))
    ]
    assert over == []


def test_names_of_ticks_that_have_room_stay_level(draw, sweep):
    sweep.grid(model=["7B"], dp=[1, 2, 4])
    figure = draw("data-parallel", sweep)
    assert overlapping(figure) == []
    labels = figure.axes[0].get_xticklabels()
    assert [label.get_text() for label in labels] == ["1", "2", "4"]
    assert {label.get_rotation() for label in labels} == {0}
