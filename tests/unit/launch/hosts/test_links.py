import sys
from pathlib import Path

import pytest

from configs.study import load_study
from deep_optimizer_states.predict.memory.peaks import GIB
from launch import cli
from launch.fit.machine import Machine
from launch.hosts import links
from launch.hosts.launchers import Launcher
from launch.hosts.namespaces import BRIDGE_ADDRESS
from launch.hosts.ranks import Program
from launch.needs import lacks
from launch.task import RunOptions

STUDY = load_study("optimus-cc")
CPU, GPU = Machine(64 * GIB), Machine(64 * GIB, (80 * GIB,))
PROGRAM = Program("a.b", ("/r/run.json",), Path("/r/run.json"))


def launcher(*words):
    parser = cli.Parser("x", "y")
    cli.add_run_options(parser, echo=False)
    return Launcher.of(parser.read(words))


def point(**fields):
    return STUDY.make_point({"model": "tiny", "link_mbit": 20, **fields})


@pytest.fixture
def everything_there(monkeypatch):
    monkeypatch.setattr(links, "unavailable", lambda: "")


def test_ranks_behind_links_start_on_the_bridge_and_go_behind_them():
    (words,) = launcher().commands(PROGRAM, 4, 5000, link_mbit=20).nodes
    module = ["-m", "launch.hosts.namespaces"]
    assert list(words) == [
        *(sys.executable, *module, "start", "20", "4"),
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--node-rank=0"),
        *("--nproc-per-node=4", f"--master-addr={BRIDGE_ADDRESS}", "--master-port=5000"),
        *(*module, "rank", "-m", "a.b", "/r/run.json"),
    ]


def test_links_as_they_are_start_as_ever():
    plain = launcher().commands(PROGRAM, 4, 5000)
    assert launcher().commands(PROGRAM, 4, 5000, link_mbit=0) == plain
    assert "namespaces" not in " ".join(plain.nodes[0])


@pytest.mark.usefixtures("everything_there")
class TestRefusals:
    def test_there_is_none_where_links_can_be_made(self):
        assert links.lacks(point(), CPU, launcher(), None) == []

    @pytest.mark.parametrize(
        ("fields", "machine", "words", "wandb", "reason"),
        [
            ({"pp": 1, "dp": 1}, CPU, (), None, "one rank has no link to another"),
            ({}, CPU, ("--launcher", "deepspeed"), None, "leave out --launcher deepspeed"),
            ({}, GPU, (), None, "GPUs of one machine exchange through its memory"),
            ({"device": "cuda"}, CPU, (), None, "GPUs of one machine exchange through its memory"),
            ({}, CPU, (), "mine", "leave out --wandb"),
        ],
    )
    def test_one_reason_names_field_value_and_remedy(self, fields, machine, words, wandb, reason):
        (found,) = links.lacks(point(**fields), machine, launcher(*words), wandb)
        assert found.startswith("link_mbit = 20: ")
        assert reason in found
        assert "give link_mbit = 0" in found
        zero = point(**fields, link_mbit=0)
        assert links.lacks(zero, machine, launcher(*words), wandb) == []

    def test_several_nodes_are_refused(self, tmp_path):
        path = tmp_path / "hosts"
        path.write_text("a slots=2\nb slots=2\n")
        (found,) = links.lacks(point(), CPU, launcher("--hostfile", str(path)), None)
        assert "leave out --hostfile" in found

    def test_a_cpu_beside_gpus_may_have_links(self):
        assert links.lacks(point(device="cpu"), GPU, launcher(), None) == []


class TestWhatTheMachineLacks:
    @pytest.fixture(autouse=True)
    def asked_anew(self):
        links.unavailable.cache_clear()
        yield
        links.unavailable.cache_clear()

    def test_another_system(self, monkeypatch):
        monkeypatch.setattr(links.sys, "platform", "darwin")
        assert "this is darwin" in links.unavailable()

    def test_a_command_that_is_missing(self, monkeypatch):
        monkeypatch.setattr(links.shutil, "which", lambda name: None if name == "tc" else "/x")
        assert "'tc'" in links.unavailable()

    def test_another_user_than_root(self, monkeypatch):
        monkeypatch.setattr(links.shutil, "which", lambda _: "/x")
        monkeypatch.setattr(links.os, "geteuid", lambda: 1000)
        assert links.unavailable() == "only root may make network namespaces"

    def test_a_container_that_refuses(self, monkeypatch):
        monkeypatch.setattr(links.shutil, "which", lambda _: "/x")
        monkeypatch.setattr(links.os, "geteuid", lambda: 0)
        monkeypatch.setattr(links, "_PROBE", "echo not permitted >&2; exit 1")
        monkeypatch.setattr(links, "_UNSHARED", ("sh", "-c"))
        found = links.unavailable()
        assert found == "this kernel or container refuses network namespaces (not permitted)"

    def test_is_said_before_anything_starts(self, monkeypatch, tmp_path):
        monkeypatch.setattr(links, "unavailable", lambda: "only root may")
        options = RunOptions(tmp_path, "s")
        found = [text for text in lacks(point(), CPU, options) if "link_mbit" in text]
        assert found == [
            "link_mbit = 20: only root may; run it as root on a Linux with iproute2 and "
            "util-linux, or give link_mbit = 0 for links as they are"
        ]
