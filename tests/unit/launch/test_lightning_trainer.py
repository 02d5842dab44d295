"""Lightning's program behind the harness: what it is given, and what it refuses."""

import re

import pytest
import torch
from kept_memory import saved_bytes

from configs.cli import Parser
from configs.errors import ConfigError
from configs.files import write_json
from configs.schema import Model
from configs.study import default_study, load_study
from configs.sweep import load_sweep, sweep_names
from deep_optimizer_states.config import read_settings
from deep_optimizer_states.predict.workload import WorkloadError
from launch import cli
from launch.data import look_at
from launch.execute import describe
from launch.fit import Machine
from launch.frameworks.imdb import files
from launch.frameworks.imdb.encoder import SentimentEncoder, Shape
from launch.frameworks.imdb.program import require_reviews
from launch.records.run_folder import RunFolder
from launch.sweep import main
from launch.task import RunOptions, Task
from launch.trainer.runfile import read_run_file
from launch.trainers import trainer_of
from launch.trainers.own import LIGHTNINGS_OWN, LightningTrainer, encoder_of

STUDY = load_study("imdb")
TRAINER = LightningTrainer()


def point(**fields):
    return STUDY.make_point({"model": "tiny", "device": "cpu", **fields})


def given(*words):
    parser = Parser("x", "y")
    cli.add_run_options(parser, echo=False)
    return parser.read(words)


def test_a_study_whose_engines_need_one_trainer_gets_it_unasked():
    assert trainer_of(given(), STUDY).name == "lightning"
    assert trainer_of(given(), default_study()).name == "megatron-core"
    assert trainer_of(given()).name == "megatron-core"
    assert trainer_of(given("--trainer", "megatron-core"), STUDY).name == "megatron-core"


def test_an_option_of_another_trainer_is_refused_beside_the_studys_own():
    with pytest.raises(ConfigError, match="--continue-from goes with --trainer megatron-core"):
        trainer_of(given("--continue-from", "x"), STUDY)


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


def test_lightnings_own_keys_are_left_to_it():
    for engine in STUDY.engines:
        config = TRAINER.ds_config(point(engine=engine, clip_grad=1.0))
        assert not config.keys() & set(LIGHTNINGS_OWN)


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


def test_a_stage_beside_a_strategy_that_has_its_own_is_refused():
    with pytest.raises(ConfigError, match="zero_stage = 2: engine 'no-deepspeed' has zero_stage"):
        point(zero_stage=2)
    assert point(engine="deepspeed-dictionary").zero_stage == 2


def test_another_studys_point_is_refused_for_its_fields():
    other = default_study().make_point({"model": "tiny", "data_prefix": "synthetic-reviews"})
    assert TRAINER.refuse(other) == [
        "the study has no field 'dropout', which --trainer lightning needs"
    ]


def test_a_task_carries_the_reviews_that_were_made_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CACHE", tmp_path)
    options = RunOptions(tmp_path / "results", "x", trainer=TRAINER)
    [task] = Task.each([point()], options)
    assert task.data_prefix.endswith("/synthetic-reviews")
    assert files.read(task.data_prefix)["train"]
    found = look_at(task.data_prefix)
    assert (found.name, found.vocab_size) == (
        "synthetic-reviews",
        files.read(task.data_prefix).vocab_size,
    )


def test_the_trainer_knows_all_reviews_that_can_be_made():
    assert set(TRAINER.own_data) == set(files._SOURCES)


def test_a_dry_run_makes_and_fetches_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CACHE", tmp_path / "cache")
    options = RunOptions(tmp_path / "results", "x", trainer=TRAINER)
    for name in TRAINER.own_data:
        text = describe(point(data_prefix=name), Machine(2**34), options)
        assert f"{name}, made or fetched when they are first needed" in text
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("size", ["full", "tiny"])
def test_a_dry_run_of_a_sweep_needs_nothing_from_outside(size, tmp_path, monkeypatch, capsys):
    """Every point is told, as never run, whether or not its reviews can be had."""

    def fetch_nothing(*_):
        raise AssertionError("a dry run makes and fetches no data")

    monkeypatch.setattr(files, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(files, "_SOURCES", dict.fromkeys(files._SOURCES, fetch_nothing))
    words = ["--study", "imdb", "--size", size, "--dry-run", "--results-dir", str(tmp_path)]
    assert main(words) == 0
    told = capsys.readouterr().out
    sweep = load_sweep(STUDY.default_sweep, STUDY)
    number = len((sweep if size == "full" else sweep.small()).points(None))
    assert told.count("runs     yes: never run before") == number
    assert list(tmp_path.iterdir()) == []


def test_a_vocabulary_that_is_too_small_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CACHE", tmp_path)
    small = point()
    small = small.model_copy(update={"model": small.model.model_copy(update={"vocab_size": 300})})
    with pytest.raises(ConfigError, match=r"needs a vocabulary of .* model\.vocab_size = 300"):
        Task.each([small], RunOptions(tmp_path / "results", "x", trainer=TRAINER))


def test_it_has_ended_when_its_metrics_say_so(tmp_path):
    folder = RunFolder(tmp_path, "log-x.log")
    assert not TRAINER.has_ended(folder, point())
    folder.metrics.write_text('{"event": "end"}\n')
    assert TRAINER.has_ended(folder, point())


def test_a_run_is_read_back_as_the_launcher_wrote_it(tmp_path):
    made = point(engine="no-deepspeed", seed=5)
    prefix = tmp_path / "reviews"
    table = {
        "schema_version": 2,
        "point": made.model_dump(mode="json"),
        "study": STUDY.as_table(),
        "data_prefix": str(prefix),
    }
    write_json(tmp_path / "run.json", table)
    write_json(tmp_path / "ds_config.json", TRAINER.ds_config(made))
    with pytest.raises(ConfigError, match=r"reviews\.manifest\.json is missing"):
        read_run_file(tmp_path / "run.json", None, require_reviews)
    write_json(tmp_path / "reviews.manifest.json", {})
    run = read_run_file(tmp_path / "run.json", None, require_reviews)
    assert (run.point, run.ds_config, run.data_prefix) == (made, {}, prefix)
    assert run.run_dir == tmp_path.resolve()


@pytest.mark.parametrize("dropout", [0.2, 0.0])
def test_the_encoder_keeps_what_is_predicted(dropout):
    """Without dropout a CPU's attention writes no scores either, as a GPU's does with it."""
    on_gpu = not dropout
    sizes = {"hidden": 96, "ffn": 200, "layers": 3, "heads": 6}
    model = Model(name="x", **sizes, kv_heads=6, seq_length=64, vocab_size=300)
    real = SentimentEncoder(300, 1, Shape(**sizes, max_length=64, dropout=dropout)).train()
    found = encoder_of(model, on_gpu)
    assert found.tensors() == [parameter.numel() for parameter in real.parameters()]
    tokens = torch.randint(2, 300, (2, 64))
    saved = saved_bytes(real, lambda: real(tokens, torch.ones_like(tokens, dtype=torch.bool)))
    sample = found.kept_of()(4, 64, on_gpu)
    assert sample.logits == 0
    kept = 2 * model.layers * sample.layer
    if on_gpu:
        # No masks of a byte, and what would be dropped from is not copied.
        kept -= model.layers * tokens.numel() * (2 * model.hidden + model.ffn + 4 * model.ffn)
    else:
        kept += 2 * sample.head
    assert kept == pytest.approx(saved, rel=0.035)


def test_a_study_without_dropout_gets_no_prediction_and_is_told():
    with pytest.raises(WorkloadError, match="dropout: the study has no such field"):
        TRAINER.settings(default_study().make_point({"model": "tiny"}), True)
