"""The model of memory beside what was measured: the figures of docs/prediction.md stay true."""

from statistics import median

from benchmarks.memory import __main__ as memory
from benchmarks.memory.__main__ import (
    MEASURED,
    PHASES,
    as_markdown,
    key_of,
    load_cases,
    measure,
    read_results,
    rows_of,
)


def test_predictions_of_cases_that_nothing_was_fitted_to_keep_the_goal():
    """Half within 5%, none more than 15% under; over by a fifth would refuse what fits."""
    rows = rows_of("judged", MEASURED)
    assert len(rows) == 68
    for phase in PHASES:
        errors = [row.error(phase) for row in rows]
        assert median(map(abs, errors)) < 0.02
        assert min(errors) > -0.08
        assert max(errors) < 0.15
    text = as_markdown(rows)
    assert text.count("\n") == 5 + 2 + len(rows)
    assert f"({rows[0].error('train'):+.1%})" in text
    assert "| train | 68 |" in text


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

    monkeypatch.setattr(memory, "run", run)
    assert measure(cases, path) == 1
    assert list(read_results(path)) == [key_of(cases[0])]
    assert measure(cases, path) == 0
    assert ran == [key_of(cases[0]), key_of(cases[1]), key_of(cases[1])]
