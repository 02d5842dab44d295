import json
import shutil

import pytest
from full_disk import files_of_at_most

from deep_optimizer_states.core import timeline
from deep_optimizer_states.core.timeline import (
    Recorder,
    Span,
    TimelineFile,
    chrome_trace,
    main,
    read_rows,
    summarize,
)

SPANS = [
    Span("CPU", "step of tile 0", 1.0, 1.4),
    Span("CPU", "step of tile 1", 1.5, 1.9),
    Span("H2D", "prefetch of tile 2", 1.0, 1.3),
    Span("H2D", "prefetch of tile 3", 1.2, 1.4),  # overlaps: counted once
    Span("GPU", "wait: PREFETCHED", 1.0, 1.9),
    Span("grads", "gradient flush", 0.2, 1.1),  # began before the update
]


def test_busy_time_counts_work_once_inside_the_update_and_no_waits():
    summary = summarize(SPANS, 1.0, 2.0)
    assert summary.busy_s == pytest.approx({"CPU": 0.8, "H2D": 0.4, "grads": 0.1})
    assert list(summary.busy_s) == ["CPU", "H2D", "grads"]
    assert summary.bound_by == "CPU"
    assert summary.share_of_limit == pytest.approx(0.8)


def test_the_line_names_the_binding_lane_and_the_others():
    text = summarize(SPANS, 1.0, 2.0).text(7)
    assert text == ("update 7: 1000.0 ms, bound by CPU (800.0 ms of work, 80%); H2D 40%, grads 10%")
    assert summarize([], 1.0, 2.0).text(1) == "update 1: 1000.0 ms, no lane had work"


def test_a_recorder_gives_each_span_once():
    recorder = Recorder()
    recorder.add("CPU", "a", 1.0, 2.0)
    recorder.add_later(lambda: Span("GPU", "b", 3.0, 4.0))
    assert [span.what for span in recorder.take()] == ["a", "b"]
    assert recorder.take() == []


def test_a_file_becomes_a_trace(tmp_path, capsys):
    for rank in (0, 3):
        file = TimelineFile(tmp_path / "t", rank)
        assert file.write(SPANS, 1.0, 2.0).startswith("update 1:")
        assert file.write(SPANS[:1], 3.0, 4.0).startswith("update 2:")
    assert main([str(tmp_path / "t")]) == 0
    trace = json.loads((tmp_path / "t" / "trace.json").read_text())
    events = trace["traceEvents"]
    assert {event["pid"] for event in events} == {0, 3}
    names = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert list(names) == list(timeline.LANES)
    work = [e for e in events if e.get("cat") == "work" and e["pid"] == 3]
    first = next(e for e in work if e["name"] == "step of tile 0")
    assert (first["tid"], first["ts"], first["dur"]) == (names["CPU"], 1e6, pytest.approx(4e5))
    assert [e["name"] for e in events if e.get("cat") == "wait"] == ["wait: PREFETCHED"] * 2
    updates = [e for e in events if e.get("cat") == "update" and e["pid"] == 0]
    assert [e["args"]["bound by"] for e in updates] == ["CPU", ""]


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path):
    file = TimelineFile(tmp_path, 0)
    file.write(SPANS, 1.0, 2.0)
    path = tmp_path / "rank-0.jsonl"
    whole = read_rows(path)
    path.write_text(path.read_text() + '{"update": 2, "begin_s": 1.')
    assert read_rows(path) == whole
    assert chrome_trace({0: whole})["displayTimeUnit"] == "ms"


def test_a_folder_without_timelines_is_said_and_other_names_are_no_ranks(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "no rank-N.jsonl" in capsys.readouterr().err
    TimelineFile(tmp_path, 0).write(SPANS, 1.0, 2.0)
    (tmp_path / "rank-0 (copy).jsonl").write_text("")
    assert main([str(tmp_path)]) == 0


def test_a_folder_that_vanishes_is_warned_of_once(tmp_path, caplog):
    folder = tmp_path / "t"
    file = TimelineFile(folder, 0)
    file.write(SPANS, 1.0, 2.0)
    shutil.rmtree(folder)
    assert file.write(SPANS, 3.0, 4.0).startswith("update 2:")
    folder.mkdir()
    assert file.write(SPANS, 5.0, 6.0).startswith("update 3:")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert str(folder / "rank-0.jsonl") in record.getMessage()
    assert "No such file or directory" in record.getMessage()
    assert not list(folder.iterdir())  # off is off


def test_an_update_that_did_not_fit_is_warned_of_and_spoils_no_other(tmp_path, caplog):
    path, file = tmp_path / "rank-0.jsonl", TimelineFile(tmp_path, 0)
    file.write(SPANS, 1.0, 2.0)
    whole = read_rows(path)
    with files_of_at_most(path.stat().st_size + 20):
        file.write(SPANS, 3.0, 4.0)
        file.write(SPANS, 5.0, 6.0)
    assert read_rows(path) == whole
    assert [str(path) in record.getMessage() for record in caplog.records] == [True]


def test_a_trace_that_cannot_be_written_is_said_and_leaves_the_old_one(tmp_path, capsys):
    TimelineFile(tmp_path, 0).write(SPANS, 1.0, 2.0)
    assert main([str(tmp_path)]) == 0
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    capsys.readouterr()
    with files_of_at_most(100):
        assert main([str(tmp_path)]) == 2
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files
    told = capsys.readouterr()
    assert "File too large" in told.err
    assert str(tmp_path / "trace.json") in told.err
    assert told.err.count("\n") == 1
    assert not told.out
