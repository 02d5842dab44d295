import subprocess
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.schema import make_point
from launch import cli
from launch.fit.machine import Machine
from launch.records.files import ROOT
from launch.records.run_folder import RunFolder
from launch.trainers import megatron_deepspeed, trainer_of

POINT = make_point({"model": "tiny", "iterations": 3, "global_batch_size": 4})
LINE = " iteration {n}/ 3 | consumed samples: {samples:12d} | consumed tokens: 5 | lm loss: 1.0 |\n"


def trainer(*words):
    parser = cli.Parser("x", "y")
    cli.add_run_options(parser, echo=False)
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
    monkeypatch.setattr(megatron_deepspeed, "_machine", lambda: Machine(2**34))


def test_the_harnesss_own_trainer_reads_the_run(tmp_path):
    program = trainer().program(POINT, tmp_path, "/data")
    assert program.words == ["-m", "launch.pretrain_gpt", str(tmp_path / "run.json")]
    assert trainer().versions == {}
    assert trainer().environment(POINT) == {}
    assert trainer().ds_config(POINT)["optimizer"]


def test_megatron_gets_the_checkout_and_flags(megatron, checkout, folder):
    program = megatron.program(POINT, folder.path, "/data")
    assert program.words[:2] == [
        str(ROOT / "launch" / "trainers" / "run_megatron.py"),
        str(checkout),
    ]
    assert "--no-masked-softmax-fusion" in program.arguments
    assert program.arguments[program.arguments.index("--data-path") + 1] == "/data"
    assert megatron.environment(POINT) == {"DS_ACCELERATOR": "cpu"}
    assert "optimizer" not in megatron.ds_config(POINT)


def test_more_flags_come_last(checkout, folder):
    words = ["--megatron-dir", str(checkout), "--megatron-flag=--use-flash-attn-v2"]
    chosen = trainer("--trainer", "megatron-deepspeed", *words)
    assert chosen.program(POINT, folder.path, "/data").arguments[-1] == "--use-flash-attn-v2"
    assert chosen.versions["megatron-flags"] == "--use-flash-attn-v2"


def test_runs_of_a_checkout_are_told_by_its_commit(checkout):
    def git(*words):
        identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
        command = ["git", "-C", str(checkout), *identity, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "-m", "x")
    commit = git("rev-parse", "HEAD")
    chosen = trainer("--trainer", "megatron-deepspeed", "--megatron-dir", str(checkout))
    assert chosen.versions == {"megatron-deepspeed": commit}
    (checkout / "pretrain_gpt.py").write_text("changed")
    assert chosen.versions["megatron-deepspeed"].startswith(f"{commit}+")


@pytest.mark.parametrize(
    ("samples", "has_ended"), [([4, 8, 12], True), ([4, 8], False), ([], False)]
)
def test_megatron_has_ended_when_its_last_iteration_is_in_the_log(
    megatron, folder, samples, has_ended
):
    lines = [LINE.format(n=n, samples=s) for n, s in enumerate(samples, start=1)]
    folder.log.write_text("start\n" + "".join(lines) + "end\n")
    assert megatron.has_ended(folder, POINT) is has_ended
    assert not megatron.writes_metrics
    assert megatron.end_mark == "last iteration in the log"


def test_ours_has_ended_when_its_metrics_say_so(folder):
    folder.log.write_text(LINE.format(n=3, samples=12))
    assert not trainer().has_ended(folder, POINT)
    folder.metrics.write_text('{"event": "end"}\n')
    assert trainer().has_ended(folder, POINT)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trainer", "megatron-deepspeed"], "needs --megatron-dir"),
        (["--trainer", "megatron-deepspeed", "--megatron-dir", "/nowhere"], "no pretrain_gpt.py"),
        (["--megatron-dir", "/x"], "--megatron-dir goes with --trainer"),
        (["--paper-keys"], "--paper-keys goes with"),
        (["--megatron-flag", "x"], "--megatron-flag goes with"),
    ],
)
def test_options_that_contradict_each_other_are_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        trainer(*words)


def test_a_relative_checkout_is_found_from_anywhere(checkout, monkeypatch):
    monkeypatch.chdir(checkout.parent)
    words = ["--trainer", "megatron-deepspeed", "--megatron-dir", checkout.name]
    assert trainer(*words).megatron_dir == Path(checkout)
