"""Scripts for batch systems: what a task of their job arrays does."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import wait_for

from configs.files import ROOT
from configs.sweep import load_sweep

TEMPLATES = ROOT / "launch" / "templates"
FAKES = Path(__file__).resolve().parent / "fakes"
TASK = {"slurm": "SLURM_ARRAY_TASK_ID", "pbs": "PBS_ARRAY_INDEX", "lsf": "LSB_JOBINDEX"}
SWEEP = """
name = "two"
model = "tiny"
point = {{ device = "cpu", dtype = "fp32", data_prefix = "{}/data" }}
engines = [{{ engine = "stock" }}, {{ engine = "all-host" }}]
"""


@pytest.mark.parametrize("scheduler", TASK)
def test_the_array_has_a_task_for_each_point_of_the_sweep_that_it_names(scheduler):
    path = TEMPLATES / f"{scheduler}.sh"
    done = subprocess.run(["shellcheck", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert f"1-{len(load_sweep('stride').points(None, {}))}" in path.read_text()


@pytest.mark.parametrize("scheduler", TASK)
def test_a_task_takes_the_shells_place_and_is_told_its_point(tmp_path, scheduler):
    """So that a signal reaches it, as the next test shows for one of them."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$$" "$PWD" "$@"\n')
    python.chmod(0o755)
    script = tmp_path / "mine.sh"  # a file: of one with -c the last command takes bash's place
    text = (TEMPLATES / f"{scheduler}.sh").read_text()
    script.write_text(text.replace(".venv/bin/python", str(python)))
    process = subprocess.Popen(
        ["bash", script],
        cwd=tmp_path if scheduler == "pbs" else ROOT,  # which starts it in the user's home
        env={**os.environ, TASK[scheduler]: "2", "PBS_O_WORKDIR": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    said = process.communicate()[0].splitlines()
    words = [
        "-m",
        "launch.sweep",
        "--sweep",
        "stride",
        "--size",
        "full",
        "--index",
        "2",
        "--no-report",
    ]
    assert said == [str(process.pid), str(ROOT), *words]


def test_a_task_that_the_batch_system_ends_is_interrupted_and_goes_on_later(tmp_path):
    (tmp_path / "two.toml").write_text(SWEEP.format(tmp_path))
    for end in (".bin", ".idx"):
        (tmp_path / f"data{end}").touch()
    words = f"--sweep {tmp_path}/two.toml --results-dir {tmp_path}/r --trainer-module fake_trainer"
    text = (TEMPLATES / "slurm.sh").read_text().replace(".venv/bin/python", sys.executable)
    script = tmp_path / "mine.sh"
    script.write_text(re.sub(r"sweep=\(.*\)", f"sweep=({words})", text))
    environment = {**os.environ, TASK["slurm"]: "2", "PYTHONPATH": str(FAKES)}

    def statuses():
        files = sorted(tmp_path.glob("r/two/log-*/run-*/status.json"))
        return {file.parent.name: json.loads(file.read_text())["status"] for file in files}

    def start(how):
        how = {**environment, "FAKE_TRAINER": how}
        return subprocess.Popen(["bash", script], cwd=ROOT, env=how, stdout=subprocess.DEVNULL)

    process = start("hang")
    wait_for(lambda: list(tmp_path.glob("r/two/log-*/run-001/pids-0")))
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    assert statuses() == {"run-001": "interrupted"}
    assert start("ok").wait() == 0
    assert statuses() == {"run-001": "interrupted", "run-002": "ok"}
    index = json.loads((tmp_path / "r" / "two" / "sweep.json").read_text())
    assert [run["engine"] for run in index["runs"]] == ["all-host"]
