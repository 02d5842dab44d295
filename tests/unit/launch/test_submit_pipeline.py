"""Jobs of a study whose trainer has a pipeline: ranks of a point are tp x pp x dp."""

import json
import os
from pathlib import Path

import pytest

from configs.files import ROOT
from launch.submit import main

FAKES = Path(__file__).resolve().parent / "fakes"
STUDY = "optimus-cc"
SWEEP = """
name = "stages"
model = "tiny"
[point]
pp = 2
dp = 2
device = "cpu"
data_prefix = "{prefix}"
[[engines]]
engine = "uncompressed"
[[engines]]
engine = "cb+fe"
"""
DIRECTIVES = {
    "slurm": "#SBATCH --nodes=2\n",
    "pbs": "#PBS -l select=2:ncpus=8:mpiprocs=1\n",
    "lsf": '#BSUB -n 16\n#BSUB -R "span[ptile=8]"\n',
}
STARTS = {
    "slurm": "command+=(--launcher srun --nnodes 2)\n",
    "pbs": 'command+=(--launcher deepspeed --hostfile "$hostfile" --nnodes 2)\n',
    "lsf": 'command+=(--launcher deepspeed --hostfile "$hostfile" --nnodes 2)\n',
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    for end in (".bin", ".idx"):
        (tmp_path / f"data{end}").touch()
    (tmp_path / "stages.toml").write_text(SWEEP.format(prefix=tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.pathsep.join([str(FAKES), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKES), str(ROOT / "src")]))
    monkeypatch.setenv("BATCH_LOG", str(tmp_path / "calls"))
    return tmp_path


def submit(scheduler, *words):
    fixed = ["--scheduler", scheduler, "--study", STUDY, "--sweep", "stages.toml"]
    rest = ["--", "--trainer-module", "fake_trainer"]
    return main([*fixed, "--results-dir", "results", *words, *rest])


@pytest.mark.parametrize("scheduler", ["slurm", "pbs", "lsf"])
def test_four_ranks_of_two_stages_are_two_nodes_of_two_ranks(place, scheduler, capsys):
    words = ["--ranks-per-node", "2", "--cpus-per-node", "8", "--dry-run"]
    assert submit(scheduler, *words) == 0
    scripts = capsys.readouterr().out
    for text in (DIRECTIVES[scheduler], STARTS[scheduler], "indices=(1 2)"):
        assert scripts.count(text) == 1
    assert scripts.count(f"-m launch.sweep --study {STUDY} --sweep stages.toml") == 2


def test_its_tasks_train_every_point_with_all_ranks(place, monkeypatch):
    monkeypatch.setenv("BATCH_RUN", "arrays")
    monkeypatch.setenv("FAKE_TRAINER", "ok")
    assert submit("lsf") == 0
    folder = place / "results" / STUDY / "stages"
    runs = [path.parent for path in folder.glob("log-*/run-001/run.json")]
    outputs = "".join(path.read_text() for path in folder.glob("submissions/001/out-*"))
    points = [json.loads((run / "run.json").read_text())["point"] for run in runs]
    assert {point["engine"] for point in points} == {"uncompressed", "cb+fe"}, outputs
    for run in runs:
        assert json.loads((run / "status.json").read_text())["status"] == "ok"
        (log,) = run.glob("log-*.log")
        assert all(f"rank {rank} of 4 how ok" in log.read_text() for rank in range(4))
