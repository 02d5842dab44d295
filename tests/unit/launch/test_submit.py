import json
import os
import re
import signal
import subprocess
from argparse import Namespace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from processes import wait_for

from configs.errors import ConfigError
from configs.files import ROOT
from launch import submit as module
from launch.submit import DIRECTIVES, bash_quote, build_parser, main, render

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "cluster"
FAKES = Path(__file__).resolve().parent / "fakes"
SCHEDULERS = ("slurm", "pbs", "lsf")
ODD = 'it\'s "two"\nlines; $HOME `id` \\ %'
ASK = [
    *("--sweep", "stride", "--account", "a-1", "--queue", "big", "--time", "01:30:30"),
    *("--gpus-per-node", "4", "--cpus-per-node", "32"),
]
SETUP = ("module load cuda", "export NCCL_DEBUG=INFO")
COMMAND = ("/venv/bin/python", "-P", "-m", "launch.sweep", "--sweep", "my sweep.toml")
NAMES = ("tiny vanilla", "it's hybrid", "7B")
JOBS = {
    "array": {"name": "stride-points", "command": COMMAND, "points": NAMES},
    "nodes": {"name": "stride-points", "command": COMMAND, "points": NAMES[:1], "slots": 4},
    "report": {"name": "stride-report", "command": COMMAND},
}


@pytest.fixture
def at(monkeypatch):
    """Says where the scripts are made and where the checkout lies."""

    def put(cwd, root="/harness"):
        monkeypatch.setattr(module, "ROOT", Path(root))
        monkeypatch.setattr(module.Path, "cwd", lambda: Path(cwd))

    put("/home/me")
    return put


def script(scheduler, job="array", changes=None, **asked):
    given = vars(build_parser().read(["--scheduler", scheduler, *ASK]))
    nodes = 2 if job == "nodes" else 1
    ask = Namespace(**{**given, "setup": SETUP, "nodes": nodes, **asked})
    return render(ask, **{**JOBS[job], **(changes or {})})


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("job", JOBS)
def test_golden_scripts(at, scheduler, job):
    path = GOLDEN / f"{scheduler}-{job}.sh"
    text = script(scheduler, job)
    if os.environ.get("GOLDEN_REWRITE"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("job", JOBS)
def test_bash_and_shellcheck_take_every_script_and_no_word_is_a_directive(
    at, tmp_path, scheduler, job
):
    def directives(text):
        return [line for line in text.splitlines() if line.startswith(DIRECTIVES[scheduler])]

    plain = script(scheduler, job)
    odd = f"{ODD}\n{DIRECTIVES[scheduler]}-A another\n"
    at(f"/{odd}", f"/{odd}")
    points = (odd,) if JOBS[job].get("points") else ()
    text = script(scheduler, job, {"command": (*COMMAND, odd), "points": points})
    assert {*directives(text)} <= {*directives(plain), *directives(plain.replace("1-3", "1-1"))}
    (tmp_path / "script.sh").write_text(text)
    for command in (["bash", "-n"], ["shellcheck", "--severity=warning"]):
        done = subprocess.run([*command, tmp_path / "script.sh"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)))))
def test_every_argument_arrives_as_it_was(words):
    changes = {"command": ("/usr/bin/printf", "%s\\0", "first", *words)}
    text = script("slurm", "report", changes, setup=())
    done = subprocess.run(["bash"], input=text.encode(), capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == ["first", *words]
    assert done.stderr == b""


@given(st.text())
def test_a_quoted_word_is_on_one_line(text):
    if "\0" in text:
        with pytest.raises(ConfigError, match="NUL"):
            bash_quote(text)
        return
    assert not set(bash_quote(text)) & set("\n\r\x1b")


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"account": "a; reboot"}, "--account 'a; reboot'"),
        ({"queue": "a\n#SBATCH -x"}, "--queue"),
        ({"queue": "-x"}, "--queue"),
        ({"time": "2 hours"}, "--time '2 hours': write HH:MM:SS"),
        ({"time": "01:75:00"}, "--time"),
        ({"extra": ("--exclusive",)}, "--extra '--exclusive'"),
        ({"extra": ("#SBATCH -x\nrm -rf",)}, "--extra"),
        ({"extra": ("#PBS -x",)}, "#SBATCH"),
        ({"setup": ("a\nb",)}, "--setup"),
        ({"setup": (" #PBS -A x",)}, "--setup"),
    ],
)
def test_values_that_are_more_than_a_value_are_refused(asked, words):
    with pytest.raises(ConfigError) as caught:
        script("slurm", **asked)
    assert words in str(caught.value)


def test_what_batch_systems_want_differently():
    text = script("slurm", extra=("#SBATCH --constraint='a100|h100'",))
    assert text.index("--constraint='a100|h100'") < text.index("set -eo pipefail")
    assert "#BSUB -W 1:31\n" in script("lsf")
    assert "#BSUB -W 2:00\n" in script("lsf", time="02:00:00")
    one = script("pbs", changes={"points": NAMES[:1]})  # an array of one is refused
    assert "#PBS -J" not in one
    assert "${PBS_ARRAY_INDEX:-1}" in one


def test_the_hosts_of_a_job_become_a_hostfile(at, tmp_path):
    (tmp_path / "nodes").write_text("n2\nn2\nn1\nn1\n")
    folder = tmp_path / "it's here"
    folder.mkdir()
    at(tmp_path)
    nodes = {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_JOBID": "12[1].server"}
    text = script("pbs", "nodes", {"command": ("echo",), "folder": folder}, setup=())
    environment = {**os.environ, **nodes}
    done = subprocess.run(["bash"], input=text, env=environment, capture_output=True, text=True)
    (made,) = folder.iterdir()
    assert made.read_text() == "n2 slots=4\nn1 slots=4\n"
    hosts = f"--launcher deepspeed --hostfile {made} --nnodes 2"
    assert done.stdout.rstrip("\n") == f"{hosts} --only tiny vanilla"
    assert done.stderr == ""


SWEEP = """
name = "two"
model = "tiny"
[point]
dp = {dp}
device = "cpu"
global_batch_size = 16
data_prefix = "{prefix}"
[[engines]]
engine = "vanilla"
[[engines]]
engine = "async-gradients"
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a sweep in it."""
    folder = tmp_path / 'it\'s "here"\nnow'
    folder.mkdir()
    for end in (".bin", ".idx"):
        (tmp_path / f"data{end}").touch()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKES), str(ROOT / "src")]))
    write_sweep(folder, 1)
    return folder


def write_sweep(folder, dp):
    text = SWEEP.format(dp=dp, prefix=folder.parent / "data")
    (folder / "my sweep.toml").write_text(text)


def submit(*words, scheduler="slurm", rest=()):
    fixed = ["--scheduler", scheduler, "--sweep", "my sweep.toml", "--results-dir", "res ults"]
    return main([*fixed, *words, "--", "--trainer-module", "fake_trainer", *rest])


def submission(place, number="001"):
    return place / "res ults" / "two" / "submissions" / number


@pytest.mark.parametrize(
    ("scheduler", "ending"),
    [
        (
            "slurm",
            "id=$(sbatch --parsable points.sh) && sbatch --dependency=afterany:$id report.sh\n",
        ),
        ("pbs", "id=$(qsub points.sh) && qsub -W depend=afterany:$id report.sh\n"),
        ("lsf", "bsub < points.sh && bsub -w 'ended(two-points)' < report.sh\n"),
    ],
)
def test_two_scripts_and_the_line_that_submits_them(place, scheduler, ending, capsys):
    assert submit(scheduler=scheduler, rest=["--keep"]) == submit(scheduler=scheduler) == 0
    assert capsys.readouterr().out.count(f" && {ending}") == 2
    texts = [(submission(place) / name).read_text() for name in ("points.sh", "report.sh")]
    assert "points=('tiny vanilla' 'tiny async-gradients')" in texts[0]
    assert "two-points" in texts[0]
    assert ("--keep" in texts[0], "--keep" in texts[1]) == (True, False)
    assert ("--report-only" in texts[0], "--report-only" in texts[1]) == (False, True)
    assert (submission(place, "002") / "points.sh").is_file()  # nothing is overwritten


def test_a_dry_run_shows_scripts_and_leaves_nothing(place, capsys):
    assert submit("--dry-run", "--account", "me") == 0
    assert capsys.readouterr().out.count("#SBATCH --account=me") == 2
    assert not (place / "res ults").exists()


def test_points_of_several_nodes_are_started_by_srun(place):
    write_sweep(place, 8)
    assert submit("--nodes", "2") == 0
    text = (submission(place) / "points.sh").read_text()
    assert "#SBATCH --nodes=2\n" in text
    assert "--no-memory-check" in text
    assert "command+=(--launcher srun --nnodes 2)" in text
    assert "#SBATCH --nodes=1\n" in (submission(place) / "report.sh").read_text()


@pytest.mark.parametrize(
    ("words", "rest", "message"),
    [
        ([], ["--report-only"], "--report-only cannot stand after"),
        ([], ["--hostfile", "x"], "--hostfile cannot"),
        ([], ["--again"], "--again cannot"),
        ([], ["--nonsense"], "unknown option '--nonsense'"),
        ([], ["--only", "nothing"], "unknown point 'nothing'"),
        (["--account", "$(id)"], [], "--account"),
        (["--nodes", "3"], [], "cannot be shared out"),
        (["--nodes", "2"], ["--launcher", "deepspeed"], "choose who starts several nodes"),
    ],
)
def test_wrong_options_write_nothing(place, words, rest, message):
    write_sweep(place, 8)
    with pytest.raises(ConfigError, match=message):
        submit(*words, rest=rest)
    assert not (place / "res ults").exists()


def test_a_sweep_that_leaves_its_model_open_needs_one(place, capsys):
    with pytest.raises(ConfigError, match="leaves its model to the machine"):
        main(["--scheduler", "slurm", "--sweep", "basic", "--dry-run"])
    words = ["--scheduler", "slurm", "--sweep", "basic", "--dry-run", "--", "--model", "7B"]
    assert main(words) == 0
    assert "--size" not in capsys.readouterr().out


def statuses(place):
    files = sorted((place / "res ults" / "two").glob("log-*/run-*/status.json"))
    return {file.parent.name: json.loads(file.read_text())["status"] for file in files}


def test_a_task_that_the_batch_system_ends_is_interrupted_and_goes_on_later(place):
    assert submit() == 0
    command = ["bash", str(submission(place) / "points.sh")]
    environment = {**os.environ, "SLURM_ARRAY_TASK_ID": "2", "FAKE_TRAINER": "hang"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    wait_for(lambda: list(place.glob("res ults/two/log-*/run-001/pids-0")))
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    assert statuses(place) == {"run-001": "interrupted"}
    environment["FAKE_TRAINER"] = "ok"
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert statuses(place) == {"run-001": "interrupted", "run-002": "ok"}
    index = json.loads((place / "res ults" / "two" / "sweep.json").read_text())
    assert [(run["engine"], run["status"]) for run in index["runs"]] == [("async-gradients", "ok")]


def test_ranks_of_a_pipeline_are_all_that_its_stages_have(tmp_path, monkeypatch, capsys):
    text = re.sub(r"dp = .*", "dp = 2\npp = 2", SWEEP).replace("vanilla", "uncompressed")
    text = text.replace("async-gradients", "cb+fe").format(prefix=tmp_path / "data")
    (tmp_path / "stages.toml").write_text(text)
    for end in (".bin", ".idx"):
        (tmp_path / f"data{end}").touch()
    monkeypatch.chdir(tmp_path)
    words = ["--study", "optimus-cc", "--sweep", "stages.toml", "--nodes", "2", "--dry-run"]
    for scheduler, line in (
        ("slurm", "#SBATCH --nodes=2\n"),
        ("pbs", "#PBS -l select=2:ncpus=8:mpiprocs=1\n"),
        ("lsf", '#BSUB -n 16\n#BSUB -R "span[ptile=8]"\n'),
    ):
        assert main(["--scheduler", scheduler, *words, "--cpus-per-node", "8"]) == 0
        scripts = capsys.readouterr().out
        assert scripts.count(line) == 1
        assert scripts.count("launch.sweep --study optimus-cc --sweep stages.toml") == 2
        assert scheduler == "slurm" or scripts.count('" slots=2"') == 1
