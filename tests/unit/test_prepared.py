"""The process that forks the ranks of tests: what a rank gets, and what ends when one fails."""

import os
import signal

import prepared
import pytest

MODULES = ("fractions",)
SCRIPT = """
import json, os, sys, time
found = {"words": sys.argv[1:], "name": __name__, "prepared": "fractions" in sys.modules,
         "tested": "deep_optimizer_states" in sys.modules, "rank": os.environ.get("RANK"),
         "home": os.environ.get("HOME"), "folder": sys.path[0] == os.path.dirname(sys.argv[0])}
print(json.dumps(found), flush=True)
if "fail" in sys.argv:
    if os.environ["RANK"] == "1":
        sys.exit("wrong on purpose")
    time.sleep(1000)
"""


@pytest.fixture
def run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    outputs = [tmp_path / f"rank{rank}" for rank in range(2)]

    def run(*words):
        environments = [{"RANK": str(rank), "PATH": os.environ["PATH"]} for rank in range(2)]
        codes = prepared.run(MODULES, [script, *words], environments, outputs)
        return codes, [output.read_text() for output in outputs]

    return run


def test_ranks_are_as_if_they_had_been_started(run):
    codes, texts = run("a", "b c")
    assert codes == [0, 0]
    for rank, text in enumerate(texts):
        assert text == (
            '{"words": ["a", "b c"], "name": "__main__", "prepared": true, "tested": false, '
            f'"rank": "{rank}", "home": null, "folder": true}}\n'
        )


def test_a_rank_that_fails_ends_the_others_and_the_next_job_runs(run):
    codes, texts = run("fail")
    assert codes == [None, 1]
    assert texts[1].endswith("wrong on purpose\n")
    assert run("a")[0] == [0, 0]


def test_when_it_was_killed_another_one_is_started(run):
    assert run("a")[0] == [0, 0]
    server = next(s for (modules, _), s in prepared._servers.items() if modules == MODULES)
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    assert run("a")[0] == [0, 0]
