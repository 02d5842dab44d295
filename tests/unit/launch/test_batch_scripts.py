import os
import subprocess
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from configs.errors import ConfigError
from launch.submit import BatchJob, bash_quote, build_parser, render

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "cluster"
SCHEDULERS = ("slurm", "pbs", "lsf")
ODD = 'it\'s "two"\nlines; $HOME `id` \\ %'
ASK = [
    *("--sweep", "stride", "--account", "a-1", "--queue", "big", "--time", "01:30:30"),
    *("--gpus-per-node", "4", "--cpus-per-node", "32", "--max-parallel", "2"),
]
SETUP = ("module load cuda", "export NCCL_DEBUG=INFO")
ARRAY = BatchJob(
    name="stride-1-node",
    folder=Path("/results/stride/submissions/001"),
    cwd=Path("/home/me"),
    root=Path("/harness"),
    command=("/venv/bin/python", "-P", "-m", "launch.sweep", "--sweep", "my sweep.toml"),
    indices=(1, 2, 5),
)
JOBS = {
    "array": ARRAY,
    "nodes": replace(ARRAY, name="stride-2-nodes", nodes=2, ranks_per_node=4, indices=(3,)),
    "report": replace(ARRAY, name="stride-report", indices=()),
}
DIRECTIVE = {"slurm": "#SBATCH ", "pbs": "#PBS ", "lsf": "#BSUB "}


def script(scheduler, job, **changes):
    given = vars(build_parser().read(["--scheduler", scheduler, *ASK]))
    return render(Namespace(**{**given, "setup": SETUP, **changes}), job)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", JOBS)
def test_golden_scripts(scheduler, name):
    path = GOLDEN / f"{scheduler}-{name}.sh"
    text = script(scheduler, JOBS[name])
    if os.environ.get("GOLDEN_REWRITE"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", JOBS)
def test_bash_and_shellcheck_take_every_script(tmp_path, scheduler, name):
    odd = replace(JOBS[name], cwd=Path("/" + ODD), folder=Path("/r/" + ODD), root=Path("/o " + ODD))
    path = tmp_path / "script.sh"
    path.write_text(script(scheduler, replace(odd, command=(*odd.command, ODD))))
    for command in (["bash", "-n"], ["shellcheck", "--severity=warning"]):
        done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def lines_between(text, scheduler):
    return [line for line in text.splitlines() if line.startswith(DIRECTIVE[scheduler])]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_no_path_can_be_a_directive(scheduler):
    evil = f"x\n{DIRECTIVE[scheduler]}-A another\n"
    plain = lines_between(script(scheduler, ARRAY), scheduler)
    job = replace(ARRAY, cwd=Path("/" + evil), command=(evil, evil), root=Path("/" + evil))
    assert lines_between(script(scheduler, job), scheduler) == plain


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)))))
def test_every_argument_arrives_as_it_was(words):
    job = replace(ARRAY, command=("/usr/bin/printf", "%s\\0", "first", *words), indices=())
    job = replace(job, cwd=Path("/"))
    done = subprocess.run(
        ["bash"], input=script("slurm", job, setup=()).encode(), capture_output=True, check=True
    )
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
    ("changes", "words"),
    [
        ({"account": "a; reboot"}, "--account 'a; reboot'"),
        ({"queue": "a\n#SBATCH -x"}, "--queue"),
        ({"queue": "-x"}, "--queue"),
        ({"time": "2 hours"}, "--time '2 hours': write HH:MM:SS"),
        ({"time": "01:75:00"}, "--time"),
        ({"extra": ("--exclusive",)}, "--extra '--exclusive'"),
        ({"extra": ("#SBATCH -x\nrm -rf",)}, "--extra"),
        ({"extra": ("#PBS -x",)}, "#SBATCH"),
    ],
)
def test_values_that_are_more_than_a_value_are_refused(changes, words):
    with pytest.raises(ConfigError) as caught:
        script("slurm", ARRAY, **changes)
    assert words in str(caught.value)


@pytest.mark.parametrize("line", ["a\nb", "#SBATCH --qos=x", " #PBS -A x"])
def test_a_setup_line_is_one_line_of_shell(line):
    with pytest.raises(ConfigError, match="--setup"):
        script("slurm", ARRAY, setup=(line,))


def test_directives_of_the_users_own_stand_with_the_others():
    text = script("slurm", ARRAY, extra=("#SBATCH --constraint='a100|h100'",))
    assert text.index("--constraint='a100|h100'") < text.index("set -eo pipefail")


def test_lsf_takes_hours_and_minutes():
    assert "#BSUB -W 1:31\n" in script("lsf", ARRAY)
    assert "#BSUB -W 2:00\n" in script("lsf", ARRAY, time="02:00:00")


def test_an_array_of_one_is_none_for_pbs():
    text = script("pbs", replace(ARRAY, indices=(7,)))
    assert "#PBS -J" not in text
    assert "${PBS_ARRAY_INDEX:-1}" in text


def test_nodes_are_the_jobs_own_unless_they_may_be_shared():
    for scheduler, word in (("slurm", "--exclusive"), ("pbs", ":excl"), ("lsf", "#BSUB -x\n")):
        assert word in script(scheduler, ARRAY)
        assert word not in script(scheduler, ARRAY, share_nodes=True)


def test_the_hosts_of_a_job_become_a_hostfile(tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("n2\nn2\nn1\nn1\n")
    folder = tmp_path / "it's here"
    folder.mkdir()
    job = replace(JOBS["nodes"], folder=folder, cwd=tmp_path, command=("echo",))
    environment = {**os.environ, "PBS_NODEFILE": str(nodes), "PBS_JOBID": "12[1].server"}
    done = subprocess.run(
        ["bash"],
        input=script("pbs", job, setup=()),
        env=environment,
        capture_output=True,
        text=True,
    )
    (made,) = folder.iterdir()
    assert made.read_text() == "n2 slots=4\nn1 slots=4\n"
    assert (
        done.stdout.rstrip("\n") == f"--launcher deepspeed --hostfile {made} --nnodes 2 --index 3"
    )
    assert done.stderr == ""
