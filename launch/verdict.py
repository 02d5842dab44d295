"""Whether a run that came to its end has trained, as ``parse`` judges its loss."""

from __future__ import annotations

from dataclasses import replace

from launch.records.ledger import UNTRAINED
from launch.records.run_folder import RunFolder, Status
from parse.log import read_log
from parse.records import LogError
from parse.verdict import judge_log


def with_verdict(status: Status, folder: RunFolder) -> Status:
    """Return the status of a run: that of one which is ``ok`` is its loss's where that is bad.

    A log that cannot be read says nothing against a run.
    """
    if status.status != "ok":
        return status
    try:
        found = judge_log(read_log(folder.log))
    except LogError:
        return status
    if found.word not in UNTRAINED:
        return status
    cause = f"ended, but its loss is {found.text}"
    return replace(status, status=found.word, exit_code=1, cause=cause)
