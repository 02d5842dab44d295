"""The model of memory beside what was measured: the figures of docs/memory.md stay true."""

from statistics import median

import pytest

from benchmarks.memory.cases import key_of, load_cases
from benchmarks.memory.measure import measure, read_results
from benchmarks.memory.table import MEASURED, PHASES, as_markdown, rows_of, summary


@pytest.mark.parametrize("phase", PHASES)
def test_predictions_of_cases_that_nothing_was_fitted_to_keep_the_goal(phase):
    """Half within 5%, none more than 15% under; over by a fifth would refuse what fits."""
    rows = rows_of("judged", MEASURED)
    errors = [row.error(phase) for row in rows]
    assert len(rows) >= 60
    assert median(map(abs, errors)) < 0.02
    assert min(errors) > -0.08
    assert max(errors) < 0.12


def test_no_case_is_both_fitted_and_judged():
    cases = load_cases()
    keys = {name: [key_of(case) for case in cases[name]] for name in cases}
    assert not set(keys["fitted"]) & set(keys["judged"])
    assert all(len(set(found)) == len(found) for found in keys.values())


def test_a_case_that_has_a_result_is_not_measured_again(tmp_path, monkeypatch):
    cases, path = load_cases()["fitted"][:2], tmp_path / "results.jsonl"
    ran = []

    def run(case, allocator):
        ran.append(key_of(case))
        return {"error": "killed"} if len(ran) == 2 else {"train_bytes": 1}

    monkeypatch.setattr("benchmarks.memory.measure._run", run)
    assert measure(cases, path) == 1
    assert list(read_results(path)) == [key_of(cases[0])]
    assert measure(cases, path) == 0
    assert ran == [key_of(cases[0]), key_of(cases[1]), key_of(cases[1])]


def test_the_table_shows_every_case_with_its_errors():
    rows = rows_of("fitted", MEASURED)
    text = as_markdown(rows)
    assert text.count("\n") == len(rows) + 1
    first = rows[0]
    assert f"({first.error('train'):+.1%})" in text.splitlines()[2]
    assert f"| this model, train | {len(rows)} |" in summary(rows)
