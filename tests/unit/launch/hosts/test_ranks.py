import socket
import subprocess
import sys
from pathlib import Path

from configs.files import ROOT
from deep_optimizer_states.core.host import usable_cores
from launch.hosts import ranks
from launch.hosts.ranks import (
    Program,
    free_port,
    node_environment,
    ranks_command,
    ranks_environment,
)


def program_of(run_json):
    return Program("a.b", (str(run_json),), run_json)


def test_one_rank_is_plain_python_with_its_ranks_set(odd_dir):
    command = ranks_command(program_of(odd_dir / "run.json"), 1, 29500)
    assert command == [sys.executable, "-m", "a.b", str(odd_dir / "run.json")]
    environment = ranks_environment({}, 1, 29500)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert [environment[n] for n in names] == ["0", "1", "0", "127.0.0.1", "29500"]


def test_more_ranks_run_under_torchrun_which_numbers_them(tmp_path):
    command = ranks_command(program_of(tmp_path / "run.json"), 2, 29500)
    assert command[1:5] == [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-port=29500",
    ]
    assert command[5:] == ["-m", "a.b", str(tmp_path / "run.json")]
    assert "RANK" not in ranks_environment({}, 2, 29500)


def test_threads_and_ops_are_set_unless_the_user_did():
    made = ranks_environment({}, 2, 1)
    assert made["OMP_NUM_THREADS"] == str(max(1, usable_cores() // 2))
    assert made["TORCH_EXTENSIONS_DIR"] == str(Path(sys.prefix) / "torch_extensions")
    given = {"OMP_NUM_THREADS": "5", "TORCH_EXTENSIONS_DIR": "/x"}
    kept = ranks_environment(given, 2, 1)
    assert {name: kept[name] for name in given} == given


def test_the_checkout_comes_before_the_users_path():
    paths = ranks_environment({"PYTHONPATH": "/mine"}, 1, 1)["PYTHONPATH"].split(":")
    assert paths == [str(ROOT), str(ROOT / "src"), "/mine"]


def test_tools_of_the_environment_come_first():
    path = ranks_environment({"PATH": "/usr/bin"}, 1, 1)["PATH"]
    assert path == f"{Path(sys.executable).parent}:/usr/bin"


def test_a_free_port_can_be_bound():
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))


def test_a_free_port_is_none_that_the_kernel_gives_to_others_meanwhile(monkeypatch, tmp_path):
    kernels = tmp_path / "ip_local_port_range"
    kernels.write_text("20000\t60999\n")
    monkeypatch.setattr(ranks, "_KERNELS_PORTS", kernels)
    assert {10_000 <= free_port() < 20_000 for _ in range(50)} == {True}
    for text in ("1024 65535", "", "no numbers"):  # nothing lies below, or nothing is known
        kernels.write_text(text)
        with socket.socket() as server:
            server.bind(("127.0.0.1", free_port()))


def test_a_port_is_given_once_though_nobody_listens_on_it_yet(monkeypatch):
    port = free_port()
    code = "import sys; from launch.hosts import ranks; ranks._keep(int(sys.argv[1]))"

    def take(number):
        words = [sys.executable, "-c", code, str(number)]
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stderr

    assert "Address already in use" in take(port)
    monkeypatch.setattr(ranks.SystemRandom, "randrange", lambda *_: port)
    assert free_port() != port, "the kernel's, since all that were drawn are taken"
    for name in ranks._kept:
        name.close()
    ranks._kept.clear()
    assert take(port) == ""


def test_gpus_are_numbered_as_the_monitor_numbers_them_unless_the_user_says_otherwise():
    assert node_environment({}, 1)["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    given = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    assert node_environment(given, 1)["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
