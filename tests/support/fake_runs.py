"""Single runs from the command line, with a trainer that ends as the test asks."""

import json
import os
import subprocess
import sys
from pathlib import Path

from processes import wait_for

ROOT = Path(__file__).resolve().parents[2]
FAKES = ROOT / "tests" / "unit" / "launch" / "fakes"


def start(how, results, *arguments, point="tiny", enter=None):
    """Start a run; ``enter`` is called in its process before the program is loaded."""
    prefix = results.parent / "data"
    for end in (".bin", ".idx"):
        Path(f"{prefix}{end}").touch()
    fixed = ["--results-dir", str(results), "--data-prefix", str(prefix), "--device", "cpu"]
    # A type that is named is one that torch need not be asked for.
    command = [sys.executable, "-m", "launch.run", point, *fixed, "--dtype", "fp32"]
    return subprocess.Popen(
        [*command, "--trainer-module", "fake_trainer", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(FAKES), "FAKE_TRAINER": how},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=enter,
    )


def finish(process):
    """Exit code, output and errors."""
    out, err = process.communicate()
    return process.returncode, out, err


def run_dir(results):
    (path,) = results.glob("single/log-*/run-001")
    return path


def status(results):
    return json.loads((run_dir(results) / "status.json").read_text())


def pids(results, count):
    """Ids of the ranks and of their children, once all are there."""

    def look():
        files = list(results.glob("single/log-*/run-001/pids-*"))
        found = [int(pid) for file in files for pid in file.read_text().split()]
        return found if len(found) == count else None

    return wait_for(look)
