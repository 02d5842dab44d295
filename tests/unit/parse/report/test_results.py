"""The table that a report opens with: the columns that a study argues with."""

import json

import pytest
from programs import report
from rows import rows

from configs.errors import ConfigError
from configs.study import Result, study_from
from parse.results import Cell, ResultRow, Results

STUDY = {
    "name": "ovens", "title": "Ovens", "reference": "gas",
    "gate": {"kind": "quality", "metric": "crumb", "margin": 1.0, "seeds": 2},
    "engines": {"gas": {"title": "gas"}, "wood": {"title": "wood"}},
    "results": {
        "crumb": {"title": "crumb", "unit": "%", "better": "higher"},
        "iteration_median_ms": {"title": "a loaf", "unit": "ms", "better": "lower"},
        "samples_per_s": {"title": "loaves", "unit": "loaves/s", "better": "higher"},
        "ash_g": {"title": "ash", "unit": "g", "better": "lower"},
        "smell": "how it smells",
    },
}  # fmt: skip


ASKED = {"question": {"text": "Is wood better?", "by": ["crumb", "iteration_median_ms"]}}


@pytest.fixture
def told(sweep_writer):
    """A report of two ovens with two seeds each; ``index`` is laid over the sweep's."""

    def write(ends, study=STUDY, **index):
        runs = [
            (engine, 0, {"point": {"seed": seed}, "end": ends[engine][seed]})
            for engine in ends
            for seed in (0, 1)
        ]
        folder = sweep_writer.write_runs(runs, study=study)
        old = json.loads((folder / "sweep.json").read_text())
        (folder / "sweep.json").write_text(json.dumps({**old, **index}))
        report([str(folder)])
        return (folder / "report.md").read_text()

    return write


ENDS = {
    "gas": [{"crumb": 70.0, "smell": 1}, {"crumb": 72.0, "smell": 2}],
    "wood": [{"crumb": 71.0}, {"crumb": 71.0}],
}


def results_in(text):
    return text.partition("## Results")[2].partition("\n## ")[0]


def test_a_report_opens_with_the_columns_of_its_study(told, sweep_writer):
    text = told(ENDS)
    assert text.index("## Results") < text.index("## Times")
    table = results_in(text)
    assert (
        "| point | source | crumb, % (higher is better) | a loaf, ms (lower is better) | "
        "loaves, loaves/s (higher is better) | runs |"
    ) in table
    assert "| tiny gas | measured | 71 (70 to 72) | 130.9 | 15.28 | 2 |" in table
    assert "| tiny wood | measured | 71 | 130.9 | 15.28 | 2 |" in table
    assert "smells" not in table
    assert "ash, g" not in table, "no sweep asked for it"
    page = (sweep_writer.folder / "report.html").read_text()
    assert 'data-value="71.0">71 (70 to 72)</td>' in page
    assert page.index('id="results"') < page.index('id="summary"')
    first = rows(sweep_writer.folder / "tables" / "runs.csv")[0]
    assert (first["crumb"], first["smell"], first["ash_g"]) == ("70.0", "1.0", "")
    assert float(first["samples_per_s"]) == pytest.approx(15.28, abs=0.01)


def test_what_a_sweep_asks_for_and_no_run_has_is_said(told):
    table = results_in(told(ENDS, results=["smell", "ash_g"]))
    assert "| point | source | how it smells | runs |" in table
    assert "| tiny gas | measured | 1.5 (1 to 2) | 2 |" in table
    assert "| tiny wood | measured |  | 2 |" in table
    assert "Empty: ash (in none of these runs)." in table


def test_a_run_says_why_it_has_no_value(told):
    reasons = {"reasons": {"ash_g": "it burnt <clean>", "unknown": "x"}}
    ends = {**ENDS, "gas": [{**end, **reasons} for end in ENDS["gas"]]}
    assert "Empty: ash (it burnt \\<clean\\>)." in results_in(told(ends))


def test_a_study_without_results_has_no_such_table(sweep_writer):
    study = {**STUDY, "results": {}, "gate": {}}
    folder = sweep_writer.write_runs([("gas", 0, {})], study=study)
    report([str(folder)])
    assert "## Results" not in (folder / "report.md").read_text()
    assert 'id="results"' not in (folder / "report.html").read_text()


def test_the_question_is_answered_by_what_these_runs_can_tell(told):
    wood = [{"crumb": 80.0}, {"crumb": 81.0}]
    text = results_in(told({**ENDS, "wood": wood}, {**STUDY, **ASKED}))
    assert "**Is wood better? crumb: tiny wood 80.5 % against 71 % of tiny gas (1.13x)." in text
    assert "Not answered by these runs: a loaf: measured on a CPU, which tells nothing" in text
    assert "0 of 1 points beside gas pass the gate (mean crumb over 2 seeds worse" in text


def test_none_that_is_better_is_said(told):
    text = results_in(told({**ENDS, "wood": [{"crumb": 70.5}] * 2}, {**STUDY, **ASKED}))
    assert "crumb: nothing better than the reference; nearest tiny wood 70.5 %" in text


def test_a_question_without_an_answer_says_why(told):
    text = results_in(told({"gas": ENDS["gas"]}, {**STUDY, **ASKED}))
    why = "crumb, a loaf: nothing is compared with the reference."
    assert f"Is wood better? These runs do not answer it. {why}" in text
    study = {**STUDY, "question": {"text": "?", "by": ["taste"]}}
    with pytest.raises(ConfigError, match="question: unknown result 'taste'"):
        study_from(study, "it")


def test_less_is_better_where_the_study_says_so(told):
    ends = {"gas": [{"ash_g": 10.0}] * 2, "wood": [{"ash_g": 5.0}] * 2}
    question = {"text": "Which leaves less?", "by": ["ash_g"]}
    text = results_in(told(ends, {**STUDY, "question": question}))
    assert "ash: tiny wood 5 g against 10 g of tiny gas (2.00x)." in text


def test_a_speed_up_that_is_withheld_stands_in_no_cell(told):
    speedup = {"title": "speed-up", "unit": "x", "better": "higher"}
    text = results_in(told(ENDS, {**STUDY, "results": {**STUDY["results"], "speedup": speedup}}))
    assert "speed-up, x" not in text
    assert "Empty: speed-up (measured on a CPU, which tells nothing about a GPU)." in text


def test_what_was_published_stands_below_with_its_source(told, monkeypatch):
    study = {**STUDY, "published": {"source": "a book"}, "elsewhere": {"taste": "eat `it`"}}
    said = {"crumb": {"a baker": 75.0}, "unknown": {"nobody": 1.0}}
    monkeypatch.setattr("parse.results.published_runs", lambda _study: said)
    text = results_in(told(ENDS, study))
    assert "| a baker, published | published | 75 publ. |  |  | 0 |" in text
    assert "publ.: a book; not measured here." in text
    assert "Not in these runs: taste; by `eat 'it'`." in text
    assert "nobody" not in text


def test_the_terminals_table_has_as_many_parts_as_its_width_asks_for():
    column = Result(title="time of an epoch without its validation", unit="s", better="lower")
    cell = Cell(12345.0, 12300.0, 12400.0)
    row = ResultRow("a point with a name that is too long for the table", "measured", 2, [cell] * 9)
    lost = ResultRow("lost", "measured", 0, [None] * 9, "1 oom-device")
    lines = Results(dict.fromkeys("abcdefghi", column), [row] * 30 + [lost], {}, "Yes.", []).lines()
    assert max(map(len, lines)) <= 100
    assert sum(line.count("12345 (12300 to 12400)") for line in lines) == 9 * 20
    assert lines[-2:] == ["... and 11 more in the report", "Yes."]


def test_the_terminals_table_keeps_names_whole_and_a_wide_column_within_the_width():
    column = Result(title="sent by all ranks, counted at the calls", unit="MiB", better="lower")
    cells = [Cell(12345.0, 12300.0, 12400.0), *[Cell(5.0, 5.0, 5.0)] * 4]
    name = "tiny, accumulation 4, stages 2, replicas 2, scheme "
    rows = [ResultRow(f"{name}{end}", "measured", 2, cells) for end in ("plain", "small")]
    lines = Results(dict.fromkeys("abcde", column), rows, {}, "Yes.", []).lines()
    assert max(map(len, lines)) <= 100
    text = " ".join(" ".join(lines).split())
    for row in rows:
        assert all(word in text for word in row.label.split())
    assert sum("12345 (12300 to 12400)" in line for line in lines) == 2
