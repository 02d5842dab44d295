import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.cli import Parser
from configs.errors import ConfigError
from configs.files import ROOT
from configs.study import load_study
from launch import cli
from launch.hosts.launchers import Launcher, read_hostfile, tuned_config
from launch.hosts.namespaces import BRIDGE_ADDRESS
from launch.hosts.ranks import Program

PROGRAM = Program("a.b", ("/r/run.json",), Path("/r/run.json"))
SCRIPT = Program("/s.py", ("/megatron", "--lr", "1"), Path("/r/run.json"), is_module=False)
TORCHRUN = ("-m", "torch.distributed.run")


def launcher(*words):
    parser = Parser("x", "y")
    cli.add_run_options(parser, echo=False)
    return Launcher.of(parser.read(words))


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "host's file"
    path.write_text("# nodes\nnode-1 slots=2\nme@node-2 slots=2\n")
    return path


@pytest.fixture
def over_hosts(hostfile):
    return ("--launcher", "deepspeed", "--hostfile", str(hostfile))


@pytest.fixture(autouse=True)
def no_devices(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def words_of(chosen, program=PROGRAM, num_ranks=2, **more):
    python, *words = chosen.command(program, num_ranks, 5000, **more)
    assert python == sys.executable
    return words


def test_torchrun_starts_the_ranks_of_one_machine_and_links_change_that():
    plain = words_of(launcher())
    assert plain[:2] == [*TORCHRUN]
    assert words_of(launcher(), link_mbit=0) == plain
    module = ["-m", "launch.hosts.namespaces"]
    assert words_of(launcher(), num_ranks=4, link_mbit=20) == [
        *(*module, "start", "20", "4"),
        *(sys.executable, *TORCHRUN, "--nnodes=1", "--node-rank=0"),
        *("--nproc-per-node=4", f"--master-addr={BRIDGE_ADDRESS}", "--master-port=5000"),
        *(*module, "rank", "-m", "a.b", "/r/run.json"),
    ]


def test_deepspeeds_launcher_on_one_machine(monkeypatch):
    chosen = launcher("--launcher", "deepspeed")
    assert words_of(chosen) == [
        *("-m", "deepspeed.launcher.runner", "--hostfile", os.devnull, "--num_gpus", "2"),
        *("--master_addr", "127.0.0.1", "--master_port", "5000", "--no_local_rank"),
        *("--module", "a.b", "/r/run.json"),
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3,5")
    assert words_of(chosen)[4:6] == ["--include", "localhost:2,3"]
    words = words_of(chosen, SCRIPT)
    assert words[-4:] == ["/s.py", "/megatron", "--lr", "1"]
    assert "--module" not in words


def test_deepspeeds_launcher_over_a_hostfile(over_hosts, hostfile):
    assert words_of(launcher(*over_hosts, "--nnodes", "2"), num_ranks=4) == [
        *("-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile)),
        *("--num_nodes", "2", "--num_gpus", "2"),
        *("--master_addr", "node-1", "--master_port", "5000", "--no_local_rank"),
        *("--module", "a.b", "/r/run.json"),
    ]
    # Without --nnodes as many hosts as the ranks need.
    assert "1" in words_of(launcher(*over_hosts), num_ranks=2)[4:6]
    given = words_of(launcher(*over_hosts, "--rdzv-endpoint", "n9:6000"), num_ranks=4)
    assert given[given.index("--master_addr") + 1] == "n9"


@pytest.mark.parametrize(
    ("num_ranks", "words", "message"),
    [
        (5, (), "the run has 5 ranks, the hosts have 4 slots"),
        (3, (), "3 ranks cannot be shared out"),
        (3, ("--nnodes", "3"), "--nnodes 3: there are 2 hosts"),
        (4, ("--nnodes", "1"), "'node-1' would run 4 ranks and has 2 slots"),
    ],
)
def test_hosts_that_cannot_run_the_ranks_are_refused(over_hosts, num_ranks, words, message):
    with pytest.raises(ConfigError, match=message):
        words_of(launcher(*over_hosts, *words), num_ranks=num_ranks)


def test_a_word_that_a_remote_shell_would_read_is_refused(over_hosts):
    odd = Program("a.b", ("/my results/run.json",), Path("/my results/run.json"))
    with pytest.raises(ConfigError, match=r"'/my results/run\.json': DeepSpeed"):
        words_of(launcher(*over_hosts), odd, num_ranks=4)


def test_what_other_hosts_need_of_the_environment_lies_in_the_runs_folder(over_hosts, tmp_path):
    given = {"NCCL_DEBUG": "INFO", "HOME": "/me", "OMP_PLACES": 'a"b', "PYTHONPATH": "/a b"}
    environment = dict(given)
    launcher(*over_hosts).export(environment, tmp_path)
    path = tmp_path / "deepspeed_env"
    assert path.read_text() == "NCCL_DEBUG=INFO\nPYTHONPATH=/a b\n"
    assert environment == {**given, "DS_ENV_FILE": str(path)}
    launcher().export(given, tmp_path)
    assert "DS_ENV_FILE" not in given


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=2\nb 2\n", r"hosts:2: 'b 2': write HOST slots=N"),
        ("a slots=0\n", "N at least 1"),
        ("a slots=2\na slots=2\n", "hosts:2: .*each host once"),
        ("# none\n", "names no host"),
        (None, "cannot be read"),
    ],
)
def test_a_hostfile_that_is_wrong_is_refused_with_the_options(tmp_path, text, message):
    path = tmp_path / "hosts"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        launcher("--launcher", "deepspeed", "--hostfile", str(path))


def test_a_hostfile_is_read_in_order(hostfile):
    assert list(read_hostfile(hostfile).items()) == [("node-1", 2), ("me@node-2", 2)]


def test_srun_starts_one_torchrun_a_node(monkeypatch):
    with pytest.raises(ConfigError, match="this is not a Slurm job"):
        launcher("--launcher", "srun")
    for name, value in (("JOB_ID", "7"), ("JOB_NUM_NODES", "2"), ("CPUS_PER_TASK", "16")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    chosen = launcher("--launcher", "srun", "--rdzv-endpoint", "n1:5000")
    assert chosen.command(PROGRAM, 4, chosen.port()) == [
        *("srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"),
        *(f"--chdir={ROOT}", "--cpus-per-task=16"),
        *(sys.executable, *TORCHRUN, "--nnodes=2", "--nproc-per-node=2"),
        *("--rdzv-backend=c10d", "--rdzv-id=5000", "--rdzv-endpoint=n1:5000"),
        *("-m", "a.b", "/r/run.json"),
    ]
    assert chosen.environment({"OMP_NUM_THREADS": "3"}, 4, 5000)["OMP_NUM_THREADS"] == "3"
    assert "MASTER_ADDR" not in chosen.environment({}, 4, 5000)


def test_torchrun_names_the_lines_for_the_other_machines():
    chosen = launcher("--nnodes", "2", "--rdzv-endpoint", "n1:5000")
    command = chosen.command(PROGRAM, 4, chosen.port())
    assert command == [
        *(sys.executable, *TORCHRUN, "--nnodes=2", "--node-rank=0", "--nproc-per-node=2"),
        *("--rdzv-backend=static", "--rdzv-endpoint=n1:5000", "-m", "a.b", "/r/run.json"),
    ]
    environment = {**os.environ, "SAYS": "two words", "PATH": "/x"}
    (line,) = chosen.elsewhere(command, environment)
    there = " ".join(command).replace("--node-rank=0", "--node-rank=1")
    assert line == f"cd {ROOT} && env 'SAYS=two words' {there}"
    assert launcher().elsewhere(command, environment) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes", "2"], "--nnodes 2: say where"),
        (["--nnodes", "2", "--launcher", "deepspeed"], "--nnodes 2: say where"),
        (["--hostfile", "h"], "--hostfile goes with --launcher deepspeed"),
        (["--rdzv-endpoint", "n1"], "write HOST:PORT"),
        (["--launcher", "mpirun"], "invalid choice"),
    ],
)
def test_options_that_contradict_each_other_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        launcher(*words)


def test_runs_on_other_machines_are_other_runs(over_hosts):
    assert launcher().versions(4) == {}
    assert launcher("--launcher", "deepspeed").versions(4) == {"launcher": "deepspeed"}
    assert launcher(*over_hosts).versions(4) == {"launcher": "deepspeed", "nodes": "2"}
    two = launcher("--nnodes", "2", "--rdzv-endpoint", "n1:5000")
    assert two.versions(4) == {"nodes": "2"}


def rung(engine="stage-1", **fields):
    table = {"model": "tiny", "engine": engine, "global_batch_size": 8, **fields}
    return load_study("zero-ladder").make_point(table)


def test_ranks_that_were_asked_for_and_are_not_the_points_are_a_reason_not_to_start(over_hosts):
    assert launcher("--num-gpus", "2").lacks(rung(dp=2)) == []
    assert launcher().lacks(rung(dp=2)) == []
    [reason] = launcher("--num-gpus", "8").lacks(rung())
    assert reason == (
        "--num-gpus 8 on 1 machine is 8 ranks, and tp 1 x pp 1 x dp 1 is 1; give --dp 8"
    )
    [reason] = launcher("--num-gpus", "3").lacks(rung(tp=2))
    assert reason.endswith("change --tp or --pp")
    [reason] = launcher("--num-gpus", "1", *over_hosts).lacks(rung(dp=4))
    assert reason.startswith("--num-gpus 1 on 2 machines is 2 ranks, and tp 1 x pp 1 x dp 4 is 4;")


@pytest.fixture
def autotuner(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)


@pytest.mark.usefixtures("autotuner")
def test_the_autotuner_gets_a_script_and_its_config_and_is_kept_from_what_it_would_drop():
    tuning = launcher("--launcher", "deepspeed", "--autotuning", "run")
    assert words_of(tuning) == [
        *("-m", "deepspeed.launcher.runner", "--hostfile", os.devnull, "--autotuning", "run"),
        *("--num_gpus", "2", "--master_addr", "127.0.0.1", "--master_port", "5000"),
        *("--no_local_rank", str(ROOT / "a/b.py"), "/r/run.json"),
        *("--deepspeed_config", "/r/ds_config.json"),
    ]
    assert tuning.versions(2) == {"launcher": "deepspeed", "autotuning": "run"}
    assert tuning.lacks(rung()) == []
    [reason] = tuning.lacks(rung("stage-2-offload"))
    assert "drops the offload section, and the run has offload_optimizer = 'cpu'" in reason


@pytest.mark.usefixtures("autotuner")
def test_the_autotuner_needs_deepspeeds_launcher_on_one_machine(over_hosts):
    for words in ((), over_hosts):
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


@pytest.mark.parametrize("way", ["srun", "torchrun"])
@pytest.mark.timeout(300)
def test_two_nodes_meet_by_what_is_said(tmp_path, monkeypatch, way):
    """Both nodes are this machine; the line for the other is run as it is printed."""
    program = tmp_path / "says.py"
    # One write for the whole line: what two ranks print word by word lies in one another.
    program.write_text(
        "import os\nline = f\"rank {os.environ['RANK']} {os.environ['WORLD_SIZE']}\\n\"\n"
        "os.write(1, line.encode())\n"
    )
    says = Program(str(program), (), tmp_path / "run.json", is_module=False)
    fakes = Path(__file__).resolve().parents[1] / "fakes"
    monkeypatch.setenv("PATH", os.pathsep.join([str(fakes), os.environ["PATH"]]))
    chosen = Launcher(way, nnodes=2)
    chosen = Launcher(way, nnodes=2, rdzv_endpoint=f"127.0.0.1:{chosen.port()}")
    command = chosen.command(says, 2, chosen.port())
    environment = chosen.environment(os.environ, 2, chosen.port())
    lines = chosen.elsewhere(command, environment)
    others = [subprocess.Popen(["bash", "-c", line], stdout=subprocess.PIPE) for line in lines]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    said = done.stdout + "".join(other.communicate()[0].decode() for other in others)
    assert done.returncode == 0, done.stderr
    assert {line for line in said.splitlines() if "rank" in line} == {"rank 0 2", "rank 1 2"}
