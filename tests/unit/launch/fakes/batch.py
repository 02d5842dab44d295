"""Stands for Slurm, PBS and LSF: notes how it was called, gives ids, and runs tasks when asked.

``BATCH_LOG`` is a file that gets a JSON line a call. With ``BATCH_RUN=arrays`` every task of an
array runs at once, one after the other, output into the script's folder; with ``all`` the jobs that
are no arrays, too. Scripts that hold the text of ``BATCH_REFUSES`` are refused.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ARRAY = {
    "sbatch": r"^#SBATCH --array=1-(\d+)",
    "qsub": r"^#PBS -J 1-(\d+)",
    "bsub": r'^#BSUB -J "[^"\[]+\[1-(\d+)\]',
}
INDEX = {"sbatch": "SLURM_ARRAY_TASK_ID", "qsub": "PBS_ARRAY_INDEX", "bsub": "LSB_JOBINDEX"}
ANSWER = {
    "sbatch": "{id};cluster",
    "qsub": "{id}[].server",
    "bsub": "Job <{id}> is submitted to queue <normal>.",
}


def main(program: str, arguments: list[str]) -> int:
    given = sys.stdin.buffer.read()
    script = given if program == "bsub" else Path(arguments[-1]).read_bytes()
    log = Path(os.environ["BATCH_LOG"])
    number = 100 + len(log.read_text().splitlines() if log.exists() else [])
    with log.open("a") as file:
        file.write(json.dumps([program, *arguments]) + "\n")
    refused = os.environ.get("BATCH_REFUSES")
    if refused and refused in script.decode():
        print("job violates the rules of this queue", file=sys.stderr)
        return 1
    is_array = re.search(ARRAY[program], script.decode(), re.MULTILINE)
    if (is_array and os.environ.get("BATCH_RUN")) or os.environ.get("BATCH_RUN") == "all":
        run(program, script, number)
    print(ANSWER[program].format(id=number))
    return 0


def run(program: str, script: bytes, number: int) -> None:
    match = re.search(ARRAY[program], script.decode(), re.MULTILINE)
    for task in range(1, int(match[1]) + 1 if match else 2):
        environment = dict(os.environ)
        if match:
            environment[INDEX[program]] = str(task)
        path = Path(f"script-{number}")
        path.write_bytes(script)
        with Path(f"out-{number}-{task}").open("wb") as output:
            subprocess.run(
                ["bash", str(path)], env=environment, stdout=output, stderr=output, check=False
            )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
