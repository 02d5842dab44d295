"""Whether a run that came to its end has trained, as ``parse`` judges its loss."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

from configs.files import ROOT
from launch.records.ledger import UNTRAINED
from launch.records.run_folder import RunFolder, Status

JUDGE_S = 300.0
"""Seconds after which no verdict is waited for."""


def with_verdict(status: Status, folder: RunFolder) -> Status:
    """The status of a run; of one that is ``ok``, its loss's verdict where that is a bad one.

    A log that cannot be judged says nothing against a run.
    """
    if status.status != "ok":
        return status
    # In a session of its own: Ctrl-C is ours to answer.
    command = [sys.executable, "-m", "parse.verdict", str(folder.log)]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=JUDGE_S,
            check=False,  # 1 tells of a loss that failed
            start_new_session=True,
        )
        found = json.loads(done.stdout)
        word, text = str(found["word"]), str(found["text"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return status
    if word not in UNTRAINED:
        return status
    return replace(status, status=word, exit_code=1, cause=f"ended, but its loss is {text}")
