"""The process that forks the ranks of tests: what ends when one fails."""

import os

import prepared
import pytest

MODULES = ("fractions",)
SCRIPT = """
import os, sys, time
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


def test_a_rank_that_fails_ends_the_others_and_the_next_job_runs(run):
    codes, texts = run("fail")
    assert codes == [None, 1]
    assert texts[1].endswith("wrong on purpose\n")
    assert run("a")[0] == [0, 0]
