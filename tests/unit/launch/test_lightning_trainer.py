"""Lightning's program behind the harness: what it is given, and what it refuses."""

import re

import pytest

from configs.cli import Parser
from configs.study import default_study, load_study
from configs.sweep import load_sweep, sweep_names
from deep_optimizer_states.config import read_settings
from launch import cli
from launch.backends import trainer_of
from launch.backends.own import LIGHTNINGS_OWN, LightningTrainer
from launch.data import look_at
from launch.frameworks.imdb import reviews
from launch.sweep import main
from launch.task import RunOptions, Task

STUDY = load_study("imdb")
TRAINER = LightningTrainer()


def point(**fields):
    return STUDY.make_point({"model": "tiny", "device": "cpu", **fields})


def given(*words):
    parser = Parser("x", "y")
    cli.add_run_options(parser)
    return parser.read(words)


def test_a_study_whose_engines_need_one_trainer_gets_it_unasked():
    assert trainer_of(given(), STUDY).name == "lightning"
    assert trainer_of(given(), default_study()).name == "megatron-core"
    assert trainer_of(given()).name == "megatron-core"
    assert trainer_of(given("--trainer", "megatron-core"), STUDY).name == "megatron-core"


@pytest.mark.parametrize("name", sweep_names(STUDY))
@pytest.mark.parametrize("form", ["full", "tiny"])
def test_every_point_of_the_study_can_be_run(name, form):
    sweep = load_sweep(name, STUDY)
    for made in (sweep.small() if form == "tiny" else sweep).points(None):
        assert TRAINER.refuse(made) == []
        assert {made.row.trainer} == {"lightning"}


def test_each_strategy_is_deepspeeds_config_of_its_own():
    stages = {}
    for engine in STUDY.engines:
        config = TRAINER.ds_config(point(engine=engine))
        zero = config.get("zero_optimization", {})
        assert not config.keys() & set(LIGHTNINGS_OWN)
        devices = [
            zero.get(key, {}).get("device", "none")
            for key in ("offload_optimizer", "offload_param")
        ]
        stages[engine] = (zero.get("stage"), *devices)
    assert stages == {
        "no-deepspeed": (None, "none", "none"),
        "deepspeed-stage-1": (1, "none", "none"),
        "deepspeed-stage-2": (2, "none", "none"),
        "deepspeed-stage-3": (3, "none", "none"),
        "deepspeed-stage-1-offload": (1, "cpu", "none"),
        "deepspeed-stage-2-offload": (2, "cpu", "none"),
        "deepspeed-stage-3-offload": (3, "cpu", "cpu"),
        "deepspeed-stage-3-offload-optimizer": (3, "cpu", "none"),
        "deepspeed-dictionary": (2, "none", "none"),
        "deep-optimizer-states": (3, "cpu", "none"),
    }


def test_ours_differs_from_what_it_is_held_against_by_its_own_block_alone():
    twin = TRAINER.ds_config(point(engine="deepspeed-stage-3-offload-optimizer"))
    ours = TRAINER.ds_config(point(engine="deep-optimizer-states"))
    assert read_settings(ours).enabled
    ours.pop("deep_optimizer_states")
    assert ours == twin
    assert STUDY.engines["deep-optimizer-states"].equals == "deepspeed-stage-3-offload-optimizer"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data_prefix": "/mine"}, "data_prefix = '/mine': .* give 'synthetic-reviews' or 'imdb"),
        ({"tp": 2}, "tp = 2: .* give tp = 1"),
        ({"pp": 2}, "pp = 2: .* give pp = 1"),
    ],
)
def test_what_it_cannot_run_is_refused_with_the_remedy(fields, message):
    [reason, *_] = TRAINER.refuse(point(**fields))
    assert re.match(message, reason)


def test_another_studys_point_is_refused_for_its_fields():
    other = default_study().make_point({"model": "tiny", "data_prefix": "synthetic-reviews"})
    assert TRAINER.refuse(other) == [
        "the study has no field 'dropout', which --trainer lightning needs"
    ]


def test_a_task_carries_the_reviews_that_were_made_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(reviews, "CACHE", tmp_path)
    options = RunOptions(tmp_path / "results", "x", trainer=TRAINER)
    [task] = Task.each([point()], options)
    assert task.data_prefix.endswith("/synthetic-reviews")
    assert reviews.read(task.data_prefix).splits["train"]
    found = look_at(task.data_prefix)
    assert (found.name, found.vocab_size) == (
        "synthetic-reviews",
        reviews.read(task.data_prefix).vocab_size,
    )


@pytest.mark.parametrize("size", ["full", "tiny"])
def test_a_dry_run_of_a_sweep_needs_nothing_from_outside(size, tmp_path, monkeypatch, capsys):
    """Every point is told, as never run, whether or not its reviews can be had."""

    def fetch_nothing(*_):
        raise AssertionError("a dry run makes and fetches no data")

    monkeypatch.setattr(reviews, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(reviews, "SOURCES", dict.fromkeys(reviews.SOURCES, fetch_nothing))
    words = ["--study", "imdb", "--size", size, "--dry-run", "--results-dir", str(tmp_path)]
    assert main(words) == 0
    told = capsys.readouterr().out
    sweep = load_sweep(STUDY.default_sweep, STUDY)
    number = len((sweep if size == "full" else sweep.small()).points(None))
    assert told.count("runs     yes: never run before") == number
    assert list(tmp_path.iterdir()) == []
