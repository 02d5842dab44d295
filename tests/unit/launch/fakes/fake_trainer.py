"""Stands in the trainer's place to end a run in every way a run can end.

``FAKE_TRAINER`` says how: ``ok``, ``fail``, ``silent``, ``killed``, ``hang``, ``stubborn``; or
``ENGINE=HOW`` pairs with commas between, ``ok`` for the engines it does not name.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    run_json = Path(sys.argv[1])
    run = json.loads(run_json.read_text())
    how = os.environ.get("FAKE_TRAINER", "ok")
    if "=" in how:
        how = dict(pair.split("=") for pair in how.split(",")).get(run["point"]["engine"], "ok")
    rank = os.environ["RANK"]
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} how {how}")
    print(f"omp {os.environ['OMP_NUM_THREADS']} cwd {Path.cwd().name}", file=sys.stderr)
    _end(how, run_json.parent, run, rank)


def _end(how: str, folder: Path, run: dict, rank: str) -> None:
    if how == "fail":
        raise ValueError("the trainer's own words")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how in ("hang", "stubborn"):
        if how == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
        )
        (folder / f"pids-{rank}").write_text(f"{os.getpid()} {child.pid}")
        time.sleep(600)
    if how == "ok" and rank == "0":
        lines = [{"event": "iteration", "iteration": i, "loss": 9.0 - i} for i in (1, 2)]
        lines.append({"event": "end", "iterations": 2})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / run["metrics"]).write_text(text)


if __name__ == "__main__":
    main()
