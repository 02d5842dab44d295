import sys
from importlib import metadata
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.study import default_study, load_study, study_from
from deep_optimizer_states.predict.memory import GIB
from launch.execute import start_of
from launch.fit import Machine, lacks, refuse_if_lacking
from launch.hosts import namespaces
from launch.hosts.launchers import Launcher
from launch.task import RunOptions, results_of
from launch.trainers.megatron_deepspeed import MegatronDeepSpeed
from launch.trainers.own import OwnTrainer

MEGATRON, OWN = MegatronDeepSpeed.name, OwnTrainer.name

CPU = Machine(20 * GIB)
GPU = Machine(160 * GIB, (80 * GIB,))
INSTALLED = metadata.version("deepspeed")


@pytest.fixture
def options(tmp_path):
    return RunOptions(tmp_path, "s")


def point(row, **fields):
    """A point of the default study, whose engine `mine` is the given row."""
    table = default_study().model_dump(mode="json", exclude_unset=True)
    table["engines"]["mine"] = {"title": "mine", "tag": "M", **row}
    study = study_from({**table, "name": "mine"}, "here")
    return study.make_point({"model": "tiny", "engine": "mine", **fields})


@pytest.fixture
def models(monkeypatch):
    """Studies that came with runs have no models of their own."""
    tiny, defaults = default_study().load_model("tiny")
    monkeypatch.setattr("configs.study.Study.load_model", lambda _self, _name: (tiny, defaults))


@pytest.mark.usefixtures("models")
class TestNeeds:
    @pytest.mark.parametrize(
        ("needs", "machine", "fields", "words"),
        [
            (["gpu"], CPU, {}, ["needs a GPU, and this run has none"]),
            (["gpu"], GPU, {"device": "cpu"}, ["needs a GPU, and this run has none"]),
            (["gpu"], GPU, {}, []),
            (["two-ranks"], CPU, {}, ["needs two ranks or more, and tp x pp x dp is one"]),
            (["two-ranks"], CPU, {"tp": 2}, []),
            (["deepspeed>=0.1"], CPU, {}, []),
            (
                ["deepspeed>=99"],
                CPU,
                {},
                [f"needs deepspeed>=99, and {INSTALLED} is installed"],
            ),
            (["no-such>=1"], CPU, {}, ["needs no-such>=1, and no-such is not installed"]),
        ],
    )
    def test_what_a_machine_lacks_is_named(self, options, needs, machine, fields, words):
        assert lacks(point({"needs": needs}, **fields), machine, options) == words

    def test_hosts_that_are_not_this_one_are_not_judged_by_it(self, options, monkeypatch):
        monkeypatch.setattr(Launcher, "is_far", True)
        assert lacks(point({"needs": ["gpu", "no-such>=1"]}), CPU, options) == []

    def test_fp16_is_refused_where_deepspeed_has_none(self, options, monkeypatch):
        slow = Machine(20 * GIB, half_types=lambda: frozenset({"bf16"}))
        half, others = point({}, dtype="fp16"), [point({}, dtype=t) for t in ("bf16", "fp32")]
        words = "dtype = 'fp16': DeepSpeed has no fp16 on this processor; give 'bf16' or 'fp32'"
        assert lacks(half, slow, options) == [words]
        assert [lacks(one, slow, options) for one in others] == [[], []]
        assert lacks(half, CPU, options) == lacks(half, GPU, options) == []
        monkeypatch.setattr(Launcher, "is_far", True)
        assert lacks(half, slow, options) == []

    def test_the_trainer_of_a_row_is_the_only_one_that_runs_it(self, options):
        assert lacks(point({"trainer": OWN}), CPU, options) == []
        with pytest.raises(ConfigError, match=rf"engine 'mine': needs --trainer {MEGATRON}"):
            refuse_if_lacking(point({"trainer": MEGATRON}), CPU, options)

    def test_variables_of_a_row_reach_the_ranks(self, options, tmp_path):
        row = {"environment": {"SAYS": "{subgroup_numel} on {num_ranks}"}}
        command, environment = start_of(point(row), options, tmp_path, "data")
        assert environment["SAYS"] == "500000 on 1"
        assert command[0] == sys.executable


def test_results_of_another_study_have_a_folder_of_its_own(tmp_path):
    table = default_study().model_dump(mode="json", exclude_unset=True)
    other = study_from({**table, "name": "other"}, "here")
    assert results_of(tmp_path, default_study()) == tmp_path
    assert results_of(tmp_path, other) == tmp_path / "other"


STAGED = load_study("optimus-cc")


def linked(**fields):
    return STAGED.make_point({"model": "tiny", "link_mbit": 20, **fields})


class TestLinks:
    @pytest.fixture(autouse=True)
    def possible(self, monkeypatch):
        monkeypatch.setattr(namespaces, "unavailable", lambda: "")

    @staticmethod
    def lack(one, machine=CPU, **options):
        found = lacks(one, machine, RunOptions(Path("r"), "s", **options))
        return [text for text in found if "link_mbit" in text]

    def test_there_is_no_reason_where_links_can_be_made_or_are_not_asked_for(self):
        assert self.lack(linked()) == []
        assert self.lack(linked(device="cpu"), GPU) == []
        assert self.lack(linked(link_mbit=0), GPU, wandb_project="mine") == []

    @pytest.mark.parametrize(
        ("fields", "machine", "options", "reason"),
        [
            ({"pp": 1, "dp": 1}, CPU, {}, "one rank has no link to another"),
            ({}, CPU, {"launcher": Launcher(nnodes=2)}, "leave out --hostfile"),
            ({}, CPU, {"launcher": Launcher("deepspeed")}, "leave out --launcher deepspeed"),
            ({}, GPU, {}, "GPUs of one machine exchange through its memory"),
            ({"device": "cuda"}, CPU, {}, "GPUs of one machine exchange through its memory"),
            ({}, CPU, {"wandb_project": "mine"}, "leave out --wandb"),
        ],
    )
    def test_one_reason_names_field_value_and_remedy(self, fields, machine, options, reason):
        (found,) = self.lack(linked(**fields), machine, **options)
        assert found.startswith("link_mbit = 20: ")
        assert reason in found
        assert "give link_mbit = 0" in found

    def test_what_the_machine_lacks_is_said_before_anything_starts(self, monkeypatch):
        monkeypatch.setattr(namespaces, "unavailable", lambda: "only root may")
        assert self.lack(linked()) == [
            "link_mbit = 20: only root may; run it as root on a Linux with iproute2 and "
            "util-linux, or give link_mbit = 0 for links as they are"
        ]
