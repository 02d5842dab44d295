import os
import socket
import subprocess
import sys
from pathlib import Path

import prepared
import pytest

from configs.cli import Parser
from configs.errors import ConfigError
from configs.files import ROOT
from deep_optimizer_states.core.host import usable_cores
from launch import cli, launchers
from launch.launchers import (
    Launcher,
    Program,
    free_port,
)
from launch.links import BRIDGE_ADDRESS

PROGRAM = Program("a.b", ("/r/run.json",))
SCRIPT = Program("/s.py", ("/megatron", "--lr", "1"), is_module=False)
TORCHRUN = ("-m", "torch.distributed.run")


def launcher(*words):
    parser = Parser("x", "y")
    cli.add_run_options(parser)
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


def test_torchrun_starts_the_ranks_of_one_machine_on_the_bridge_between_links():
    plain = words_of(launcher())
    assert plain[:2] == [*TORCHRUN]
    assert words_of(launcher(), link_mbit=0) == plain
    module = ("-m", "launch.links")
    assert words_of(launcher(), num_ranks=4, link_mbit=20) == [
        *(*module, "bridge", "20", sys.executable, *TORCHRUN, "--nproc-per-node=4"),
        *(f"--master-addr={BRIDGE_ADDRESS}", "--master-port=5000"),
        *(*module, "rank", "20", "-m", "a.b", "/r/run.json"),
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
        (6, (), "2 nodes of 3 ranks: hostfile '.*' has hosts of 2, 2 slots"),
        (3, (), "3 ranks cannot be shared out"),
        (3, ("--nnodes", "3"), "3 nodes of 1 ranks: "),
        (4, ("--nnodes", "1"), "1 nodes of 4 ranks: "),
    ],
)
def test_hosts_that_cannot_run_the_ranks_are_refused(over_hosts, num_ranks, words, message):
    with pytest.raises(ConfigError, match=message):
        words_of(launcher(*over_hosts, *words), num_ranks=num_ranks)


def test_a_word_that_a_remote_shell_would_read_is_refused(over_hosts):
    odd = Program("a.b", ("/my results/run.json",))
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


@pytest.mark.parametrize(("text", "message"), [("# a slots=2\n", "no line"), (None, "cannot be")])
def test_a_hostfile_without_hosts_is_refused_with_the_options(tmp_path, text, message):
    path = tmp_path / "hosts"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        launcher("--launcher", "deepspeed", "--hostfile", str(path))


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
    says = Program(str(program), (), is_module=False)
    fakes = Path(__file__).resolve().parent / "fakes"
    monkeypatch.setenv("PATH", os.pathsep.join([str(fakes), os.environ["PATH"]]))
    for name, value in prepared.variables(prepared.DEEPSPEED).items():
        monkeypatch.setenv(name, value)
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


def test_the_environment_is_the_users_with_what_ranks_need_before_it():
    given = {"PYTHONPATH": "/mine", "PATH": "/usr/bin"}
    made = launcher().environment(given, 2, 1)
    assert made["PYTHONPATH"].split(":") == [str(ROOT), str(ROOT / "src"), "/mine"]
    assert made["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"
    assert made["OMP_NUM_THREADS"] == str(max(1, usable_cores() // 2))
    assert made["TORCH_EXTENSIONS_DIR"] == str(Path(sys.prefix) / "torch_extensions")
    assert made["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID", "as the monitor numbers them"
    own = {
        "OMP_NUM_THREADS": "5",
        "TORCH_EXTENSIONS_DIR": "/x",
        "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
    }
    assert own.items() <= launcher().environment(own, 2, 1).items()


def test_a_free_port_can_be_bound_and_is_none_that_the_kernel_gives_to_others():
    ports = {free_port() for _ in range(20)}
    assert all(10_000 <= port < 32_768 for port in ports)
    with socket.socket() as server:
        server.bind(("127.0.0.1", ports.pop()))


def test_a_port_that_is_taken_is_not_given(monkeypatch):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        taken = server.getsockname()[1]
        monkeypatch.setattr("launch.launchers.SystemRandom.randrange", lambda *_: taken)
        assert free_port() != taken, "the kernel's, since all that were drawn are taken"


def test_a_port_is_given_once_though_nobody_listens_on_it_yet(monkeypatch):
    port = free_port()
    code = "import sys; from launch import launchers; launchers._keep(int(sys.argv[1]))"

    def take(number):
        words = [sys.executable, "-c", code, str(number)]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stderr

    assert "Address already in use" in take(port)
    monkeypatch.setattr(launchers.SystemRandom, "randrange", lambda *_: port)
    assert free_port() != port, "the kernel's, since all that were drawn are taken"
    for name in launchers._kept:
        name.close()
    launchers._kept.clear()
    assert take(port) == ""
