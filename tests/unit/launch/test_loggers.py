"""Loggers of the field: what ``--log-to`` takes, and what each trainer is told."""

import argparse
import importlib.util
from pathlib import Path

import pytest

from configs.cli import Parser
from configs.errors import ConfigError
from configs.study import load_study, make_point
from launch import cli, loggers
from launch.backends import trainer_of
from launch.backends.own import LightningTrainer, OwnTrainer, PipelineTrainer


def trainer(*words, study=None):
    parser = Parser("x", "y")
    cli.add_run_options(parser)
    return trainer_of(parser.read(words), study)


@pytest.fixture
def all_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


@pytest.mark.usefixtures("all_installed")
def test_names_are_taken_in_any_spelling_of_a_list():
    assert loggers.log_to("wandb, csv,,wandb") == "wandb,csv"
    assert loggers.log_to("") == ""


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_an_absent_package_is_one_line_with_the_command_that_installs_it(monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert loggers.log_to("csv") == "csv"
    with pytest.raises(ConfigError) as error:
        trainer("--log-to", f"csv,{name}")
    assert f"needs a package that is not installed: pip install {name}" in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_logger_is_told_with_the_nearest():
    with pytest.raises(argparse.ArgumentTypeError, match="did you mean 'tensorboard'"):
        loggers.log_to("tensorbord")


def test_both_trainers_are_told_and_others_have_no_such_option(tmp_path):
    own, study = trainer("--log-to", "csv"), load_study("imdb")
    assert own == OwnTrainer(log_to="csv")
    assert trainer("--log-to", "csv", study=study) == LightningTrainer("csv")
    for one in (own, LightningTrainer("csv")):
        assert one.program(make_point({"model": "tiny"}), tmp_path, "d").arguments[1:] == (
            "--log-to",
            "csv",
        )
    assert OwnTrainer().program(make_point({"model": "tiny"}), tmp_path, "d").arguments[1:] == ()
    with pytest.raises(ConfigError, match="--log-to goes with --trainer megatron-core"):
        trainer("--trainer", "megatron-deepspeed", "--megatron-dir", "x", "--log-to", "csv")
    pipelines = load_study("optimus-cc")
    point = pipelines.make_point({"model": "tiny"})
    without, reasons = (PipelineTrainer(log_to=name).refuse(point) for name in ("", "csv"))
    assert [reason for reason in reasons if reason not in without] == [
        "--log-to csv: --trainer megatron-pipeline runs without DeepSpeed, whose monitor would "
        "write it; leave it out"
    ]


def test_deepspeed_takes_the_blocks_of_its_monitor():
    from deepspeed.monitor.config import get_monitor_config

    folder = Path("/results/sweep/run")
    environment = {"WANDB_PROJECT": "mine"}
    blocks = loggers.monitor_blocks(("csv", "wandb", "tensorboard"), folder, environment)
    found = get_monitor_config(blocks)
    assert found.enabled
    assert (found.csv_monitor.output_path, found.csv_monitor.job_name) == (
        "/results/sweep/run/loggers",
        "csv",
    )
    assert found.tensorboard.job_name == "tensorboard"
    assert (found.wandb.project, found.wandb.group) == ("mine", "sweep")
    assert all(getattr(found, name).enabled for name in ("csv_monitor", "wandb", "tensorboard"))
    assert loggers.monitor_blocks((), folder, environment) == {}


def test_wandb_writes_into_the_runs_folder_and_asks_for_no_account(tmp_path):
    environment = {}
    loggers.set_wandb(("csv",), tmp_path, environment)
    assert environment == {}
    loggers.set_wandb(("wandb",), tmp_path, environment)
    assert environment == {"WANDB_DIR": f"{tmp_path}/loggers", "WANDB_MODE": "offline"}
    assert (tmp_path / "loggers").is_dir()
    chosen = {"WANDB_MODE": "online", "WANDB_DIR": "/w"}
    loggers.set_wandb(("wandb",), tmp_path, chosen)
    assert chosen == {"WANDB_MODE": "online", "WANDB_DIR": "/w"}
