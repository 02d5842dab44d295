"""Nodes without a network: the remote shell is a shell of this machine."""

import json
import os
import signal
import subprocess
import sys

import pytest
from processes import is_alive, wait_for

from configs.files import ROOT
from launch import nodes
from launch.node_agent import node_of, read_order
from launch.nodes import agent_command, exported

SHELL = ["sh", "-c", 'exec sh -c "$1"']
SLEEP = """
import os, time, pathlib
pathlib.Path({file!r}).write_text(str(os.getpid()))
time.sleep(3600)
"""
FAIL = "import pathlib, sys, time\nwhile not pathlib.Path({file!r}).exists(): time.sleep(0.05)\n"


def start(tmp_path, programs, prefixes=None, **environment):
    """``launch.nodes`` with a Python program on each node."""
    prefixes = prefixes or [[*SHELL, f"node-{number}"] for number in range(len(programs))]
    table = {
        "starts": [
            {"host": prefix[-1], "prefix": prefix, "is_shell": True, "node": node}
            for node, prefix in enumerate(prefixes)
        ],
        "nodes": [[sys.executable, "-u", "-c", program] for program in programs],
        "local_ranks": [1] * len(programs),
    }
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps(table))
    return subprocess.Popen(
        [sys.executable, "-m", "launch.nodes", str(path)],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def sleeper(file):
    return SLEEP.format(file=str(file))


def test_orders_reach_every_node_whatever_they_hold(tmp_path):
    odd = 'it\'s "two"\nlines; $HOME `id`'
    program = f"import os; assert os.environ['NCCL_ODD'] == {odd!r}; print('node', {{}}, 'ran')"
    process = start(tmp_path, [program.format(0), program.format(1)], NCCL_ODD=odd)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    assert sorted(out.splitlines()) == ["node 0 ran", "node 1 ran"]


def test_lines_of_two_nodes_are_never_mixed(tmp_path):
    program = "import sys\nfor _ in range(300): print({letter!r} * 5000)"
    process = start(tmp_path, [program.format(letter=letter) for letter in "ab"])
    out, _ = process.communicate()
    assert sorted(set(out.splitlines())) == ["a" * 5000, "b" * 5000]
    assert len(out.splitlines()) == 600


def test_one_node_that_fails_ends_the_others(tmp_path):
    file = tmp_path / "pid"
    process = start(tmp_path, [sleeper(file), FAIL.format(file=str(file)) + "sys.exit(3)"])
    out, _ = process.communicate()
    assert process.returncode == 3
    assert "NodeError: host 'node-1' ended with exit code 3" in out
    wait_for(lambda: not is_alive(int(file.read_text())))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_node_outlives_the_one_that_started_them(tmp_path, number):
    files = [tmp_path / "0", tmp_path / "1"]
    process = start(tmp_path, [sleeper(file) for file in files])
    pids = [int(wait_for(lambda f=file: f.exists() and f.read_text())) for file in files]
    process.send_signal(number)
    out, _ = process.communicate()
    assert process.returncode == (-9 if number == signal.SIGKILL else 143), out
    wait_for(lambda: not any(map(is_alive, pids)))


def test_a_host_that_cannot_be_reached_is_named(tmp_path):
    process = start(tmp_path, ["pass"], [["sh", "-c", "exit 255", "far"]])
    out, _ = process.communicate()
    assert process.returncode == 255
    assert "NodeError: host 'far'" in out
    assert "is it reachable" in out


def test_only_what_ranks_need_leaves_this_machine():
    needed = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4", "GLOO_SOCKET_IFNAME": "eth0"}
    assert exported({**needed, "HOME": "/me", "AWS_SECRET": "x"}) == needed


def test_every_node_is_ordered_what_the_file_says(tmp_path, monkeypatch):
    starts = [{"host": name, "prefix": [], "is_shell": False, "node": None} for name in "ab"]
    table = {"starts": starts, "nodes": [["first"], ["second"]], "local_ranks": [2, 3]}
    path = tmp_path / "nodes.json"
    path.write_text(json.dumps(table))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setattr(nodes, "run_nodes", lambda *given: told.extend(given) or 7)
    told = []
    assert nodes.main(path) == 7
    assert told[0] == starts
    assert told[1]["environment"].pop("GLOO_SOCKET_IFNAME") == "eth0"
    assert told[1] == {
        "commands": table["nodes"],
        "local_ranks": [2, 3],
        "environment": told[1]["environment"],
    }


def test_the_remote_shell_gets_one_quoted_word():
    words = agent_command({"prefix": ["ssh", "n"], "is_shell": True})
    assert words[:2] == ["ssh", "n"]
    assert len(words) == 3
    assert words[2].endswith(f"{sys.executable} -m launch.node_agent")
    assert agent_command({"prefix": ["srun"], "is_shell": False})[0] == "srun"


def test_an_order_is_one_line(tmp_path):
    path = tmp_path / "order"
    path.write_text('{"node": null}\nrest')
    fd = os.open(path, os.O_RDONLY)
    try:
        assert read_order(fd) == {"node": None}
        assert os.read(fd, 100) == b"rest"
        with pytest.raises(EOFError, match="no order"):
            read_order(fd)
    finally:
        os.close(fd)
    assert node_of({"node": None}, {"SLURM_NODEID": "3"}) == 3
    assert node_of({"node": 1}, {}) == 1
