"""Run groups of rows as the ranks of a job, as every test here does."""

import json
from pathlib import Path

import pytest
from ranks import run_ranks

WORKER = Path(__file__).with_name("worker.py")


@pytest.fixture(scope="module")
def run_rows(tmp_path_factory):
    """``run_rows(GROUP)`` -> the report of each rank: what is wrong with each row, by group."""

    def run(groups, extent="few", num_ranks=1, **variables):
        folder = tmp_path_factory.mktemp("rows")
        words = (groups, extent, folder / "report", folder)
        run_ranks(WORKER, *words, num_ranks=num_ranks, **variables)
        return [json.loads((folder / f"report.{rank}").read_text()) for rank in range(num_ranks)]

    return run


@pytest.fixture(scope="module")
def check_rows(run_rows):
    """Run those rows of a group that are for so many ranks; nothing may be wrong with any."""

    def check(group, num_ranks=1, extent="few", **variables):
        reports = run_rows(group, extent, num_ranks, **variables)
        wrong = [
            f"{name}, rank {rank} of {num_ranks}:\n" + "\n".join(found)
            for rank, report in enumerate(reports)
            for name, found in report[group].items()
            if found
        ]
        assert not wrong, "\n\n".join(wrong)
        for report in reports:
            assert report[group], "no row was run"
            assert report["lanes left"] == []

    return check
