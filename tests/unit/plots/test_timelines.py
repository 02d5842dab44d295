import numpy as np
import pytest

from configs.study import default_study
from plots.tables import PlotError, read_tables
from plots.timelines import draw_memory, draw_utilisation

ENGINES = {name: row.style for name, row in default_study().engines.items()}

TITLES = ("before forward", "after forward", "before forward", "after forward", "after step")


def keys(run):
    return {key: run[key] for key in ("path", "label", "case", "engine")}


@pytest.fixture
def phases(sweep):
    """Two engines; allocated memory is the iteration times ten plus the place in it."""
    for run in (sweep.add("stride", 2), sweep.add("stock")):
        for iteration in range(4):
            for place, title in enumerate(TITLES):
                sweep.memory.append({
                    **keys(run), "iteration": iteration or "", "title": title,
                    "allocated_gib": 10 * iteration + place, "cached_gib": 50,
                    "host_used_gib": 100 + place,
                })  # fmt: skip
    return sweep


def test_memory_is_the_median_over_iterations_at_each_title_in_order(phases, tmp_path):
    device, machine = draw_memory(read_tables(phases.write(tmp_path)), None).axes
    allocated = {line.get_color(): line for line in device.lines}
    assert list(allocated) == [ENGINES["stock"].colour, ENGINES["stride"].colour]
    for line in allocated.values():
        assert list(line.get_ydata()) == [25, 26, 27, 28, 29]
    assert [label.get_text() for label in machine.get_xticklabels()] == list(TITLES)
    assert list(machine.lines[0].get_ydata()) == [100, 101, 102, 103, 104]
    labels = device.get_ylabel(), machine.get_ylabel()
    assert labels == ("device memory (GiB)", "machine's\nmemory (GiB)")
    for run in phases.runs:
        run["device"] = "cpu"
    process, _ = draw_memory(read_tables(phases.write(tmp_path)), None).axes
    assert process.get_ylabel() == "process memory (GiB)"


@pytest.mark.parametrize("figure", [draw_memory, draw_utilisation])
def test_what_was_simulated_is_watermarked(phases, samples, tmp_path, figure):
    for run in phases.runs:
        run["source"] = "simulated"
    axes = figure(read_tables(phases.write(tmp_path)), None).axes
    assert all([t.get_text() for t in ax.texts] == ["simulated"] for ax in axes)


def test_a_title_that_one_engine_lacks_is_a_gap(phases, tmp_path):
    phases.memory = [
        row for row in phases.memory
        if not (row["engine"] == "stock" and row["title"] == "after step")
    ]  # fmt: skip
    device, _ = draw_memory(read_tables(phases.write(tmp_path)), None).axes
    assert np.isnan(device.lines[0].get_ydata()[-1])


@pytest.mark.parametrize("change", [{"iteration": ""}, {"title": ""}, {"path": "of another table"}])
def test_memory_of_no_iteration_is_refused(phases, tmp_path, change):
    for row in phases.memory:
        row.update(change)
    tables = read_tables(phases.write(tmp_path))
    with pytest.raises(PlotError, match=r"memory\.csv holds no"):
        draw_memory(tables, None)


@pytest.fixture
def samples(sweep):
    """Two engines on two devices, sampled at 0, 1 and 2 s."""
    for run in (sweep.add("stride", 2), sweep.add("stock"), sweep.add("stock")):
        for time in range(3):
            for device in (0, 1):
                sweep.monitor.append({
                    **keys(run), "time_s": time, "device_id": device, "cpu_percent": 10 * time,
                    "host_used_bytes": 2**30, "gpu_util_percent": 20 + 40 * device,
                    "gpu_memory_used_bytes": 2**31, "pcie_rx_bytes_per_s": "",
                    "pcie_tx_bytes_per_s": 5e8,
                })  # fmt: skip
    return sweep


def test_a_row_a_resource_that_is_known(samples, tmp_path):
    axes = draw_utilisation(read_tables(samples.write(tmp_path)), None).axes
    assert [ax.get_ylabel().replace("\n", " ") for ax in axes] == [
        "CPU (%)", "host memory (GiB)", "GPU (%)", "whole GPU's memory (GiB)",
        "PCIe from GPU (GB/s)",
    ]  # fmt: skip
    assert axes[-1].get_xlabel().endswith("(s)")


def test_devices_are_summed_or_averaged_and_the_host_counts_once(samples, tmp_path):
    axes = draw_utilisation(read_tables(samples.write(tmp_path)), None).axes
    values = [list(ax.lines[0].get_ydata()) for ax in axes]
    assert values == [[0, 10, 20], [1, 1, 1], [40, 40, 40], [4, 4, 4], [1, 1, 1]]
    found = [[line for line in ax.lines if line.get_gid() != "end"] for ax in axes]
    assert all(len(lines) == 2 for lines in found), "one line an engine, repeats left out"
    assert axes[0].lines[0].get_color() == ENGINES["stock"].colour


def test_each_line_ends_where_its_run_does(sweep, tmp_path):
    for engine, stride, end in (("stock", 0, 5000), ("stride", 2, 3001)):
        run = sweep.add(engine, stride)
        sweep.monitor += [{**keys(run), "time_s": t, "cpu_percent": 50} for t in range(end + 1)]
    (ax,) = draw_utilisation(read_tables(sweep.write(tmp_path)), None).axes
    ends = {line.get_color(): line.get_xdata()[-1] for line in ax.lines}
    assert ends == {ENGINES["stock"].colour: 5000, ENGINES["stride"].colour: 3001}
    lines = [line.get_xdata()[-1] for line in ax.lines if line.get_gid() != "end"]
    assert lines == [5000, 3001]
    assert ax.get_xlim() == (0, 5000)


def test_long_runs_are_thinned_to_means(sweep, tmp_path):
    run = sweep.add("stock")
    sweep.monitor = [{**keys(run), "time_s": t, "cpu_percent": t % 2} for t in range(12_000)]
    (ax,) = draw_utilisation(read_tables(sweep.write(tmp_path)), None).axes
    assert len(ax.lines[0].get_xdata()) == 600
    assert set(ax.lines[0].get_ydata()) == {0.5}


def test_samples_of_nothing_are_refused(samples, tmp_path):
    for row in samples.monitor:
        row.update(dict.fromkeys([k for k in row if k not in (*keys(row), "time_s")], ""))
    with pytest.raises(PlotError, match="no sample of a processor"):
        draw_utilisation(read_tables(samples.write(tmp_path)), None)
