from types import SimpleNamespace

import pytest

from parse.compare import differences


def run(commit, code=None):
    kept = {"git": {"commit": commit, "dirty": False}}
    if code is not None:
        kept["code"] = {"sha256": code, "files": {}}
    log = SimpleNamespace(device=None, metrics=None)
    return SimpleNamespace(provenance=kept, log=log, hardware="")


@pytest.mark.parametrize(
    ("runs", "texts"),
    [
        ([run("abc", "1"), run("abd", "1")], []),
        ([run("abc", "1"), run("abc", "2")], ["code differs (1, 2)"]),
        ([run("abc"), run("abd")], ["commit differs (abc, abd)"]),
        (
            [run("abc", "1"), run("abd")],
            ["code differs (1, not known)", "commit differs (abc, abd)"],
        ),
    ],
)
def test_the_code_that_runs_counts_and_the_commit_only_where_it_is_not_known(runs, texts):
    assert differences(runs) == texts
