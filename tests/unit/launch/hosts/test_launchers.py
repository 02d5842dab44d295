import json
import os
import sys
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.files import ROOT
from configs.study import load_study
from launch import cli
from launch.hosts.autotuning import tuned_config
from launch.hosts.launchers import Launcher
from launch.hosts.ranks import Program

PROGRAM = Program("a.b", ("/r/run.json",), Path("/r/run.json"))
SCRIPT = Program("/s.py", ("/megatron", "--lr", "1"), Path("/r/run.json"), is_module=False)


def launcher(*words):
    parser = cli.Parser("x", "y")
    cli.add_run_options(parser, echo=False)
    return Launcher.of(parser.read(words))


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "host's file"
    path.write_text("# nodes\nnode-1 slots=2\nme@node-2 slots=2\n", encoding="utf-8-sig")
    return path


@pytest.fixture(autouse=True)
def no_devices(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def nodes(commands):
    return [list(command[1:]) for command in commands.nodes]


def test_one_machine_needs_no_starter(tmp_path):
    commands = launcher().commands(PROGRAM, 2, 5000)
    assert commands.starts == ()
    assert commands.started_by(tmp_path) == list(commands.nodes[0])
    assert list(tmp_path.iterdir()) == []
    assert commands.nodes[0][1:3] == ("-m", "torch.distributed.run")


def test_deepspeeds_launcher_on_one_machine():
    (words,) = nodes(launcher("--launcher", "deepspeed").commands(PROGRAM, 2, 5000))
    assert words == [
        *("-m", "deepspeed.launcher.runner", "--hostfile", os.devnull, "--num_gpus", "2"),
        *("--master_addr", "127.0.0.1", "--master_port", "5000", "--no_local_rank"),
        *("--module", "a.b", "/r/run.json"),
    ]


def test_deepspeeds_launcher_keeps_to_the_devices_that_are_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3,5")
    (words,) = nodes(launcher("--launcher", "deepspeed").commands(PROGRAM, 2, 5000))
    assert words[4:6] == ["--include", "localhost:2,3"]


def test_a_script_is_started_as_one(hostfile):
    (words,) = nodes(launcher("--launcher", "deepspeed").commands(SCRIPT, 2, 5000))
    assert words[-4:] == ["/s.py", "/megatron", "--lr", "1"]
    assert "--module" not in words
    far = nodes(launcher("--hostfile", str(hostfile)).commands(SCRIPT, 4, 5000))
    assert all(words[-4:] == ["/s.py", "/megatron", "--lr", "1"] for words in far)
    assert all(words.count("-m") == 1 for words in far)


def test_torchrun_over_a_hostfile(hostfile):
    commands = launcher("--hostfile", str(hostfile)).commands(PROGRAM, 3, 5000)
    assert nodes(commands) == [
        [
            *("-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"),
            *(f"--nproc-per-node={ranks}", "--master-addr=node-1", "--master-port=5000"),
            *("-m", "a.b", "/r/run.json"),
        ]
        for node, ranks in enumerate((2, 1))
    ]
    shell = ("ssh", "-o", "BatchMode=yes")
    assert [start.prefix for start in commands.starts] == [
        (*shell, "node-1"),
        (*shell, "me@node-2"),
    ]


def test_deepspeeds_launcher_over_a_hostfile(hostfile, tmp_path):
    options = ["--launcher", "deepspeed", "--hostfile", str(hostfile), "--nnodes", "2"]
    commands = launcher(*options).commands(PROGRAM, 4, 5000)
    assert nodes(commands) == [
        [
            *("-m", "deepspeed.launcher.runner", "--hostfile", "/r/hostfile"),
            *("--num_nodes", "2", "--num_gpus", "2", "--no_ssh", "--node_rank", str(node)),
            *("--master_addr", "node-1", "--master_port", "5000", "--no_local_rank"),
            *("--module", "a.b", "/r/run.json"),
        ]
        for node in range(2)
    ]
    commands.started_by(tmp_path)
    # Not the user's own file, which may begin with a byte-order mark.
    assert (tmp_path / "hostfile").read_text() == "node-1 slots=2\nme@node-2 slots=2\n"


def test_several_nodes_are_started_by_one_command_whose_file_says_all(tmp_path, hostfile):
    chosen = launcher("--hostfile", str(hostfile), "--remote-shell", "ssh -p 2222 -i 'my key'")
    commands = chosen.commands(PROGRAM, 4, 5000)
    words = commands.started_by(tmp_path)
    assert words == [sys.executable, "-m", "launch.nodes", str(tmp_path / "nodes.json")]
    table = json.loads((tmp_path / "nodes.json").read_text())
    assert table["starts"][0]["prefix"] == ["ssh", "-p", "2222", "-i", "my key", "node-1"]
    assert table["nodes"] == [list(command) for command in commands.nodes]
    assert commands.describe().startswith("command  on node-1: ")


def test_srun_starts_one_torchrun_a_node(monkeypatch):
    with pytest.raises(ConfigError, match="not a Slurm job"):
        launcher("--srun").commands(PROGRAM, 4, 5000)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "16")
    commands = launcher("--srun", "--master-addr", "n1").commands(PROGRAM, 4, 5000)
    (start,) = commands.starts
    assert start.prefix == (
        *("srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"),
        *(f"--chdir={ROOT}", "--cpus-per-task=16"),
    )
    assert (start.node, start.is_shell) == (None, False)
    assert [words[3:5] for words in nodes(commands)] == [
        [f"--node-rank={node}", "--nproc-per-node=2"] for node in range(2)
    ]
    assert len(commands.describe().splitlines()) == 2


def test_of_nodes_that_are_started_by_hand_each_runs_its_part_and_the_first_is_met():
    words = ("--nnodes", "2", "--master-addr", "n1", "--master-port", "5000")
    found = [
        launcher(*words, "--node-rank", str(node)).commands(PROGRAM, 4, 5000) for node in (0, 1)
    ]
    parts = [
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={node}"),
            *("--nproc-per-node=2", "--master-addr=n1", "--master-port=5000", *PROGRAM.words),
        ]
        for node in (0, 1)
    ]
    meeting = ["-m", "launch.hosts.meeting", "5000", "2", "/r/run.json"]
    assert nodes(found[0]) == [[*meeting, *parts[0]]]
    assert nodes(found[1]) == [parts[1][1:]]
    assert all(commands.starts == () for commands in found)


def test_the_environment_of_far_ranks_is_made_there(hostfile):
    far = launcher("--hostfile", str(hostfile)).environment({"PATH": "/bin"}, 4, 5000)
    assert "OMP_NUM_THREADS" not in far
    assert "MASTER_ADDR" not in far
    assert far["TORCH_EXTENSIONS_DIR"]
    assert launcher().environment({}, 1, 5000)["RANK"] == "0"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes", "2"], "--nnodes 2: say where"),
        (["--hostfile", "h", "--srun"], "--hostfile and --srun exclude"),
        (["--node-rank", "1"], "needs --nnodes, --master-addr, --master-port"),
        (
            ["--node-rank", "2", "--nnodes", "2", "--master-addr", "a", "--master-port", "5000"],
            "between 0 and",
        ),
        (["--node-rank", "0", "--launcher", "deepspeed"], "--launcher torchrun"),
        (["--remote-shell", ""], "--remote-shell is empty"),
        (["--master-port", "80"], "port from 1024"),
        (["--launcher", "mpirun"], "invalid choice"),
    ],
)
def test_options_that_contradict_each_other_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        launcher(*words)


def test_runs_on_other_machines_are_other_runs(hostfile):
    assert launcher().versions(4) == {}
    assert launcher("--launcher", "deepspeed").versions(4) == {"launcher": "deepspeed"}
    assert launcher("--hostfile", str(hostfile)).versions(4) == {"nodes": "2"}
    assert launcher("--hostfile", str(hostfile)).versions(2) == {}


def test_this_machine_is_reached_without_a_remote_shell(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("localhost slots=1\nnode-2 slots=1\n")
    words = ["--hostfile", str(path), "--master-addr", "10.0.0.1"]
    here, there = launcher(*words).commands(PROGRAM, 2, 5000).starts
    assert (here.prefix, here.is_shell) == ((), False)
    assert (there.prefix[-1], there.is_shell) == ("node-2", True)


def test_a_hostfile_that_is_not_there_is_refused_with_the_options(tmp_path):
    with pytest.raises(ConfigError, match=r"hostfile .* cannot be read"):
        launcher("--hostfile", str(tmp_path / "none"))


def test_srun_outside_a_slurm_job_is_refused_with_the_options():
    with pytest.raises(ConfigError, match="--srun: this is not a Slurm job"):
        launcher("--srun")


def test_ranks_that_cannot_be_shared_out_name_what_sets_their_number():
    words = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "a", "--master-port", "5000"]
    with pytest.raises(ConfigError, match=r"--nnodes 2: 1 rank cannot .*--dp N"):
        launcher(*words).commands(PROGRAM, 1, 5000)


LADDER = load_study("zero-ladder")


def rung(engine="stage-1", **fields):
    return LADDER.make_point({"model": "tiny", "engine": engine, "global_batch_size": 8, **fields})


def test_ranks_that_were_asked_for_and_are_not_the_points_are_a_reason_not_to_start():
    assert launcher("--num-gpus", "2").lacks(rung(dp=2)) == []
    assert launcher().lacks(rung(dp=2)) == []
    [reason] = launcher("--num-gpus", "8").lacks(rung())
    assert reason == (
        "--num-gpus 8 on 1 machine is 8 ranks, and tp 1 x pp 1 x dp 1 is 1; give --dp 8"
    )
    [reason] = launcher("--num-gpus", "3").lacks(rung(tp=2))
    assert reason.endswith("change --tp or --pp")


def test_ranks_are_counted_on_every_host(hostfile):
    words = ("--hostfile", str(hostfile), "--nnodes", "2")
    assert launcher("--num-gpus", "2", *words).lacks(rung(dp=4)) == []
    [reason] = launcher("--num-gpus", "1", *words).lacks(rung(dp=4))
    assert reason.startswith("--num-gpus 1 on 2 machines is 2 ranks, and tp 1 x pp 1 x dp 4 is 4;")


@pytest.fixture
def autotuner(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)


@pytest.mark.usefixtures("autotuner")
def test_the_autotuner_gets_a_script_and_its_config():
    tuning = launcher("--launcher", "deepspeed", "--autotuning", "run")
    (words,) = nodes(tuning.commands(PROGRAM, 2, 5000))
    assert words == [
        *("-m", "deepspeed.launcher.runner", "--hostfile", os.devnull, "--autotuning", "run"),
        *("--num_gpus", "2", "--master_addr", "127.0.0.1", "--master_port", "5000"),
        *("--no_local_rank", str(ROOT / "a/b.py"), "/r/run.json"),
        *("--deepspeed_config", "/r/ds_config.json"),
    ]
    assert tuning.versions(2) == {"launcher": "deepspeed", "autotuning": "run"}


@pytest.mark.usefixtures("autotuner")
def test_the_autotuner_is_kept_from_what_it_would_drop():
    tuning = launcher("--launcher", "deepspeed", "--autotuning", "run")
    assert tuning.lacks(rung()) == []
    [reason] = tuning.lacks(rung("stage-2-offload"))
    assert "drops the offload section, and the run has offload_optimizer = 'cpu'" in reason


@pytest.mark.usefixtures("autotuner")
@pytest.mark.parametrize("words", [(), ("--launcher", "deepspeed", "--hostfile", "HOSTFILE")])
def test_the_autotuner_needs_deepspeeds_launcher_on_one_machine(words, hostfile):
    words = [str(hostfile) if word == "HOSTFILE" else word for word in words]
    with pytest.raises(ConfigError, match="--autotuning tune: DeepSpeed's launcher does that"):
        launcher("--autotuning", "tune", *words)


def test_the_autotuners_own_package_is_asked_for(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="needs the package tabulate"):
        launcher("--launcher", "deepspeed", "--autotuning", "run")


def test_what_the_autotuner_writes_lies_in_the_runs_folder(tmp_path):
    table = {"autotuning": {"fast": True}, "train_batch_size": 8}
    assert tuned_config(table, tmp_path) == {
        "train_batch_size": 8,
        "autotuning": {
            "enabled": True,
            "exps_dir": str(tmp_path / "autotuning-exps"),
            "results_dir": str(tmp_path / "autotuning-results"),
            "fast": True,
        },
    }
