import json

import pytest

from configs.cli import Parser
from configs.errors import ConfigError
from configs.files import ROOT
from configs.study import make_point
from launch import cli
from launch.backends import OWN_TRAINER, TRAINERS, megatron_deepspeed, trainer_of
from launch.backends.own import PIPELINE_MODULE
from launch.feasibility import Host
from launch.launchers import TRAINER_MODULE
from launch.records import RunFolder

POINT = make_point({"model": "tiny", "iterations": 3, "global_batch_size": 4})
LINE = " iteration {n}/ 3 | consumed samples: {samples:12d} | consumed tokens: 5 | lm loss: 1.0 |\n"


def trainer(*words):
    parser = Parser("x", "y")
    cli.add_run_options(parser)
    return trainer_of(parser.read(words))


@pytest.fixture
def checkout(tmp_path):
    path = tmp_path / "a checkout"
    path.mkdir()
    (path / "pretrain_gpt.py").touch()
    return path


@pytest.fixture
def megatron(checkout):
    return trainer("--trainer", "megatron-deepspeed", "--megatron-dir", str(checkout))


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path, "log-x.log")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(megatron_deepspeed, "this_machine", lambda: Host(2**34))


def test_megatron_gets_the_checkout_and_flags(checkout, folder, monkeypatch):
    monkeypatch.chdir(checkout.parent)
    words = ["--megatron-dir", checkout.name, "--megatron-flag=--use-flash-attn-v2"]
    chosen = trainer("--trainer", "megatron-deepspeed", *words)
    program = chosen.program(POINT, folder.path, "/data")
    script = str(ROOT / "launch" / "backends" / "run_megatron.py")
    assert program.words[:2] == [script, str(checkout)]
    assert "--no-masked-softmax-fusion" in program.arguments
    assert program.arguments[program.arguments.index("--data-path") + 1] == "/data"
    assert program.arguments[-1] == "--use-flash-attn-v2"
    assert chosen.versions["megatron-flags"] == "--use-flash-attn-v2"
    assert chosen.environment(POINT) == {"DS_ACCELERATOR": "cpu"}


def test_runs_of_a_checkout_are_told_by_its_commit(megatron, monkeypatch):
    state = {"commit": "abc", "changes_sha256": "0" * 64}
    monkeypatch.setattr(megatron_deepspeed, "git_state", lambda _folder: state)
    assert megatron.versions == {"megatron-deepspeed": f"abc+{'0' * 16}"}
    del state["changes_sha256"]
    assert megatron.versions == {"megatron-deepspeed": "abc"}


@pytest.mark.parametrize(
    ("samples", "has_ended"), [([4, 8, 12], True), ([4, 8], False), ([], False)]
)
def test_megatron_has_ended_when_its_last_iteration_is_in_the_log(
    megatron, folder, samples, has_ended
):
    lines = [LINE.format(n=n, samples=s) for n, s in enumerate(samples, start=1)]
    folder.log.write_text("start\n" + "".join(lines) + "end\n")
    assert megatron.has_ended(folder, POINT) is has_ended
    # Ours has ended when its metrics say so.
    assert not trainer().has_ended(folder, POINT)
    folder.metrics.write_text('{"event": "end"}\n')
    assert trainer().has_ended(folder, POINT)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trainer", "megatron-deepspeed"], "needs --megatron-dir"),
        (["--trainer", "megatron-deepspeed", "--megatron-dir", "/nowhere"], "no pretrain_gpt.py"),
        (["--megatron-dir", "/x"], "--megatron-dir goes with --trainer"),
        (["--continue-from", "/nowhere"], "--continue-from '/nowhere': no checkpoint there"),
        (
            ["--trainer", "megatron-deepspeed", "--continue-from", "x"],
            "--continue-from goes with --trainer megatron-core",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        trainer(*words)


HYBRID = {"engine": "stride", "stride": 2}


@pytest.mark.parametrize(
    ("fields", "field", "remedy"),
    [
        ({"pp": 2}, "pp = 2: ", "give pp = 1"),
        ({"zero_stage": 0}, "zero_stage = 0: ", "give offload_optimizer = 'none'"),
        ({"zero_stage": 2, "offload_param": "cpu"}, "offload_param = 'cpu': ", "= 'none'"),
        ({"zero_stage": 1, "offload_ratio": 0.5}, "offload_ratio = 0.5: ", "offload_ratio = 1"),
        ({"offload_optimizer": "none", "offload_ratio": 0}, "offload_ratio = 0: ", "= 1"),
        (
            {"zero_stage": 0, "offload_optimizer": "none", "grad_accum_dtype": "fp32"},
            "grad_accum_dtype = 'fp32': ",
            "give grad_accum_dtype = 'bf16'",
        ),
        ({**HYBRID, "offload_optimizer": "none"}, "offload_optimizer = 'none': engine", "'cpu'"),
    ],
)
def test_what_neither_trainer_can_run_is_refused_with_a_remedy(megatron, fields, field, remedy):
    point = make_point({"model": "tiny", **fields})
    (reason,) = trainer().refuse(point)
    assert reason.startswith(field)
    assert remedy in reason
    assert reason in megatron.refuse(point) or "pp = 2" in reason
    assert any(text.startswith(field.split(":")[0]) for text in megatron.refuse(point))


def test_a_new_trainer_is_a_class_and_a_row(monkeypatch):
    members = {
        "name": "another",
        "options": {"--another-option": {"metavar": "X"}},
        "of": classmethod(lambda cls, given: cls(given.another_option)),
    }
    monkeypatch.setitem(TRAINERS, "another", type("Another", (type(OWN_TRAINER),), members))
    assert trainer("--trainer", "another", "--another-option", "5").module == "5"
    with pytest.raises(ConfigError, match="--another-option goes with --trainer another"):
        trainer("--another-option", "5")


def test_a_run_that_continues_another_is_told_from_whole_ones(tmp_path):
    path = tmp_path / "checkpoints" / "iteration-000002"
    path.mkdir(parents=True)
    table = {"schema_version": 1, "iteration": 2, "point": POINT.model_dump(mode="json")}
    (path / "checkpoint.json").write_text(json.dumps({**table, "data": None, "files": {}}))
    (path.parent / "latest").write_text(path.name)
    chosen = trainer("--continue-from", str(tmp_path))
    assert chosen.program(POINT, tmp_path, "/d").arguments[1:] == ("--continue-from", str(path))
    assert chosen.versions == {"continued-from": str(path)}
    assert chosen.refuse(POINT) == []
    (reason,) = chosen.refuse(POINT.model_copy(update={"seed": 9}))
    assert reason.startswith("seed = 9: the checkpoint")


def test_an_option_that_two_trainers_have_is_given_to_the_chosen_one(tmp_path):
    words = ["--trainer", "megatron-pipeline", "--trainer-module", "some.module"]
    assert trainer(*words).program(POINT, tmp_path, "/d").name == "some.module"
    assert trainer(*words[:2]).program(POINT, tmp_path, "/d").name == PIPELINE_MODULE
    assert trainer().program(POINT, tmp_path, "/d").name == TRAINER_MODULE
