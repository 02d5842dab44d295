"""Predictions and published values among runs: read like them, never taken for them."""

import json

import pytest
from programs import parse_logs as main, report
from rows import rows

TIMES = {"forward_ms": 100.0, "backward_ms": 200.0, "update_ms": 300.0, "iteration_ms": 650.0}
ENGINES = {"stock": 1.0, "all-host": 0.8, "stride": 0.5}


@pytest.fixture
def simulated(tmp_path):
    """Writes a sweep of three predicted engines, stock beside its published values."""
    folder = tmp_path / "a simulated sweep"
    runs = []

    def add(engine, source, status="ok", point=(), **values):
        run = folder / engine / f"{source}-{len(runs)}"
        run.mkdir(parents=True)
        fields = {
            "model": {"name": "7B"}, "engine": engine, "stride": 2 if engine == "stride" else 0,
            "dp": 4, "micro_batch_size": 1, "global_batch_size": 4, **dict(point),
        }  # fmt: skip
        run_json = {"source": source, "point": fields, "point_key": engine, "log": "values.json"}
        (run / "run.json").write_text(json.dumps(run_json))
        (run / "values.json").write_text(json.dumps({"parameters": 6_000_000_000, **values}))
        if source == "simulated":
            (run / "status.json").write_text(json.dumps({"status": status, "cause": "too big"}))
        runs.append({"name": engine, "engine": engine, "log": "values.json", "status": status,
                     "run_dir": run.relative_to(folder).as_posix()})  # fmt: skip

    def write():
        about = {
            "machine": "h|100", "machine_source": "a fit", "software": "the paper's",
            "kinds": {"a_rate": "fitted", "b_rate": "assumed"},
            "residuals": {"rows": 7, "median": 0.01, "worst": 0.21, "update_s": [0.01, 0.21]},
        }  # fmt: skip
        index = {"name": "small | sweep", "figures": ["stride"], "simulated": about, "runs": runs}
        (folder / "sweep.json").write_text(json.dumps(index))
        return folder

    for engine, factor in ENGINES.items():
        times = {name: factor * ms for name, ms in TIMES.items()}
        add(engine, "simulated", **times, about="profile h|100", bound_ms=90.0,
            binding="host Adam",
            device_memory_bytes=2**31)  # fmt: skip
    write.add = add
    return write


@pytest.fixture
def whole(simulated):
    simulated.add("stock", "published", **{**TIMES, "update_ms": 200.0}, about="a DOI")
    return simulated()


def test_every_row_of_every_table_says_where_it_is_from(whole, write_log, tmp_path):
    assert main([str(whole), str(write_log()), "--out", str(tmp_path / "t")]) == 0
    expected = {"runs": 1, "iterations": 5}
    for name, measured in expected.items():
        found = [row["source"] for row in rows(tmp_path / "t" / f"{name}.csv")]
        assert found == ["simulated"] * 3 + ["published"] + ["measured"] * measured
    assert {row["source"] for row in rows(tmp_path / "t" / "comparisons.csv")} == {"simulated"}


def test_nothing_of_a_prediction_is_warm_up(whole, tmp_path):
    main([str(whole), "--out", str(tmp_path / "t"), "--warmup", "3"])
    for row in rows(tmp_path / "t" / "runs.csv"):
        assert (row["warmup_iterations"], row["timed_iterations"]) == ("0", "1")
        assert row["verdict"] == row["loss_last"] == ""
    (first, *_) = rows(tmp_path / "t" / "runs.csv")
    assert (first["iteration_ms"], first["update_median_ms"]) == ("650.0", "300.0")
    assert float(first["update_rate"]) == pytest.approx(6e9 / 0.3)
    assert {row["warmup"] for row in rows(tmp_path / "t" / "iterations.csv")} == {"0"}


def test_a_predicted_ratio_is_never_a_speed_up(whole, tmp_path):
    main([str(whole), "--out", str(tmp_path / "t")])
    found = rows(tmp_path / "t" / "comparisons.csv")
    assert {row["engine"] for row in found} == {"all-host", "stride"}
    for row in found:
        assert float(row["ratio"]) == pytest.approx(1 / ENGINES[row["engine"]])
        assert (row["speedup"], row["equality"]) == ("", "not compared")
        assert row["withheld"] == "simulated: a predicted ratio, not a measured speed-up"


def test_a_measured_run_is_never_held_against_a_predicted_one(whole, sweep_writer, tmp_path):
    """Nor the other way round: each keeps to its kind."""
    measured = sweep_writer.write(engines=(("stride", 2),))
    same = json.loads(next(whole.glob("stock/sim*/run.json")).read_text())
    run = next(measured.glob("*/*/run.json"))
    ours = json.loads(run.read_text())
    point = {**same["point"], "engine": "stride", "stride": 2}
    run.write_text(json.dumps({**ours, "point": point}))
    main([str(whole), str(measured), "--out", str(tmp_path / "t")])
    found = rows(tmp_path / "t" / "comparisons.csv")
    (row,) = (r for r in found if r["source"] == "measured" and r["phase"] == "iteration")
    assert (row["reference_label"], row["ratio"]) == ("", "")
    assert {r["reference_repeats"] for r in found if r["source"] == "simulated"} == {"1"}


WORDS = ("stock", "stock, published")


def test_the_report_is_headed_simulated_and_gives_no_verdict(whole, capsys):
    assert report([str(whole)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    [ours, theirs] = (next(x for x in lines if x.startswith(f"7B {w} ")) for w in WORDS)
    assert set(ours.split()[2:]) & {"sim.", "publ."} == {"sim."}
    assert set(theirs.split()[3:]) & {"sim.", "publ."} == {"publ."}
    assert not any("equal to" in line for line in lines)
    text, page = ((whole / f"report.{kind}").read_text() for kind in ("md", "html"))
    assert text.startswith("# small \\| sweep, simulated on h\\|100\n")
    assert "<h1>small | sweep, simulated on h|100</h1>" in page
    assert page.count('class="tag">simulated') >= 2
    for shown in (text, page):
        assert "Simulated: nothing was run." in shown
        for word in ("equal to stock", "speed-up 2", "trains", "measured on"):
            assert word not in shown


def test_the_report_shows_predictions_beside_published_values(whole):
    report([str(whole)])
    text = (whole / "report.md").read_text()
    assert "| 7B stock | 650.0 | 100.0 | 200.0 | 300.0 | simulated |" in text
    assert "| 7B stride 2 | 325.0 | 50.0 | 100.0 | 150.0 | simulated |" in text
    assert "withheld: simulated: a predicted ratio, not a measured speed-up | 2.000 |" in text
    assert "| 7B stock | update | 300 | 200 | +50% | a DOI |" in text
    assert "- update: off by 50% in the median and 50% at worst over 1 published value" in text
    assert "| fitted rates | a\\_rate |" in text
    fit = "7 published rows off by 1.0% in the median, 21.0% at worst; agreement with them is"
    assert fit in text


def test_a_point_that_does_not_fit_says_why(simulated):
    simulated.add("stride", "simulated", "oom-device", {"dp": 1, "global_batch_size": 1},
                  iteration_ms=None, fits=False)  # fmt: skip
    folder = simulated()
    assert report([str(folder)]) == 0
    text = (folder / "report.md").read_text()
    assert "no times; 1 of 1 oom-device" in text
    assert "| too big |" in text
    assert "## Simulated beside published" not in text


def test_what_is_published_says_so_in_every_table_and_count(whole):
    report([str(whole)])
    text, page = ((whole / f"report.{kind}").read_text() for kind in ("md", "html"))
    assert "\n3 simulated: 3 fit; 1 published.\n" in text
    table = text.partition("## Times")[2].partition("##")[0]
    assert "| 7B stock | 650.0 | 100.0 | 200.0 | 300.0 | simulated |" in table
    assert "| 7B stock, published | 650.0 | 100.0 | 200.0 | 200.0 | published |" in table
    results = text.partition("## Results")[2].partition("##")[0]
    assert "| 7B stock | simulated | 650 sim. |" in results
    assert "| 7B stock, published | published | 650 publ. |" in results
    assert "Predicted, not measured: iteration: " in results
    assert "| 7B stock, published | published |" in text.partition("## Runs")[2]
    for name in ("runs", "iterations"):
        labels = [row["label"] for row in rows(whole / "tables" / f"{name}.csv")]
        assert labels[-1] == "7B stock, published"
        assert len(set(labels)) == 4
    # Green is what was measured.
    assert 'class="number ok"' not in page
    assert '<td class="ok">' not in page


def test_a_simulated_report_tells_of_no_statistics_and_no_losses(whole):
    report([str(whole)])
    text, page = ((whole / f"report.{kind}").read_text() for kind in ("md", "html"))
    for shown in (text, page):
        for word in ("Student", "95%", "finished repeats", "no loss in the log", "is bitwise: "):
            assert word not in shown


def test_what_is_not_predicted_is_empty_with_the_reason(simulated):
    folder = simulated()
    index = json.loads((folder / "sweep.json").read_text())
    index |= {"results": ["checkpoint_stall_ms", "host_peak_gib"]}
    index |= {"figures_left_out": {"loss": "nothing is trained"}}
    (folder / "sweep.json").write_text(json.dumps(index))
    for path in folder.glob("*/*/values.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "host_peak_gib": 7.5}))
    report([str(folder)])
    text = (folder / "report.md").read_text()
    assert "Empty: stall of a checkpoint (not predicted: " in text
    assert "| point | source | host memory of all ranks, GiB (lower is better) | runs |" in text
    assert "| 7B stock | simulated | 7.5 sim. | 1 |" in text
    assert "Not predicted: loss (nothing is trained)." in text
    found = json.loads((folder / "tables" / "findings.json").read_text())["results"]
    assert list(found["columns"]) == ["host_peak_gib"]
    assert found["rows"][0] == {
        "label": "7B stock", "source": "simulated", "runs": 1, "values": [7.5],
    }  # fmt: skip
