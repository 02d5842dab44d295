"""``--simulate`` from the command line to figures and report."""

import json

import pytest
from programs import rows_of

from launch.sweep import main


@pytest.mark.timeout(900)
def test_a_sweep_is_simulated_and_shown(tmp_path, monkeypatch, capsys):
    for module in ("canvas", "current"):
        monkeypatch.setattr(f"plots.{module}.FORMATS", ("svg",))
    results = tmp_path / "my results"
    words = ["--sweep", "stride", "--only", "7B*", "--results-dir", str(results)]
    assert main(["--simulate", "--machine", "h100x4", *words]) == 0
    assert capsys.readouterr().err == ""
    folder = results / "simulated-h100x4" / "stride"
    rows = rows_of(folder, "runs")
    sources = [row["source"] for row in rows]
    assert (sources.count("simulated"), sources.count("published")) == (9, 7)
    # The paper's shape: its hybrid updates faster than stock, the more so the smaller the stride.
    rate = {
        (row["source"], row["engine"], row["stride"]): float(row["update_rate"]) for row in rows
    }
    for source in ("simulated", "published"):
        assert rate[source, "stride", "2"] > rate[source, "stride", "8"]
        assert rate[source, "stride", "8"] > rate[source, "stock", "0"]
    for stem in ("stride", "iteration-breakdown"):
        svg = (folder / "figures" / f"{stem}.svg").read_text()
        assert ">simulated</text>" in svg
        assert "simulated · profile h100x4" in svg.partition("</desc>")[0]
        assert "measured" not in svg.partition("</desc>")[0]
    assert json.loads((folder / "sweep.json").read_text())["source"] == "simulated"
    report = (folder / "report.md").read_text()
    assert report.startswith("# stride, simulated on h100x4\n")
    assert "update: off by" in report
    assert "simulated and published" in (folder / "report.html").read_text()
