import base64
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError
from configs.schema import Model, Point
from configs.study import default_study
from launch.hosts.launchers import TRAINER_MODULE
from launch.pretrain_gpt import main
from launch.process.outcome import judge
from launch.process.supervise import Ending
from launch.trainer.runfile import ranks_from_environment, read_run_file, with_tuned_config
from launch.trainers.own import LIGHTNING_MODULE, PIPELINE_MODULE

POINT: dict[str, Any] = {
    "model": {"name": "m", "hidden": 64, "ffn": 96, "layers": 2, "heads": 4, "kv_heads": 2},
    "global_batch_size": 4,
    "micro_batch_size": 2,
}
DS_CONFIG: dict[str, Any] = {
    "train_batch_size": 4,
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3},
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "corpus.v1.bin").touch()
    (tmp_path / "corpus.v1.idx").write_bytes(b"MMIDIDX\x00\x00 and more")
    _write(tmp_path, {}, {})
    return tmp_path


def _write(run_dir: Path, run: dict[str, Any], ds_config: dict[str, Any]) -> Path:
    table = {"schema_version": 2, "point": POINT, "data_prefix": str(run_dir / "corpus.v1")}
    (run_dir / "ds_config.json").write_text(json.dumps({**DS_CONFIG, **ds_config}))
    path = run_dir / "run.json"
    path.write_text(json.dumps({**table, **run}))
    return path


def test_a_run_folder_is_read(run_dir: Path) -> None:
    run = read_run_file(run_dir / "run.json")
    assert run.point.accumulation == 2
    assert run.metrics_path == run_dir / "metrics.jsonl"
    assert run.index_cache_dir.parent == run_dir
    assert run.data_prefix == run_dir / "corpus.v1"


def test_data_that_were_moved_are_the_same_data(run_dir: Path) -> None:
    files = {end: {"bytes": 1, "sha256": end} for end in (".bin", ".idx")}

    def facts(source: str) -> Any:
        data = {**files, "name": source, "source": source, "tokens": 3}
        return read_run_file(_write(run_dir, {"provenance": {"data": data}}, {})).data_facts

    assert facts("/here/own") == facts("/there/own") == files


def test_a_point_is_rebuilt_through_the_study_that_came_with_it(run_dir: Path) -> None:
    assert read_run_file(run_dir / "run.json").point.study is default_study()
    row = {"title": "mine", "tag": "M"}
    study = {
        **{"name": "own", "title": "own", "reference": "mine", "engines": {"mine": row}},
        "fields": {"bucket_numel": {"title": "bucket"}},
    }
    fields = {"engine": "mine", "bucket_numel": 7}
    path = _write(run_dir, {"study": study, "point": {**POINT, **fields}}, {})
    point = read_run_file(path).point
    assert (point.engine, point.value("bucket_numel"), point.row.title) == ("mine", 7, "mine")
    path = _write(run_dir, {"point": {**POINT, **fields}}, {})
    with pytest.raises(ConfigError, match="bucket_numel"):
        read_run_file(path)
    path = _write(run_dir, {"study": {"name": "own"}}, {})
    with pytest.raises(ConfigError, match=r"run\.json: .*not a study"):
        read_run_file(path)


@pytest.mark.parametrize(
    ("block", "expected"), [(None, False), ({"enabled": False}, False), ({"enabled": True}, True)]
)
def test_the_plugin_is_used_when_its_block_is_enabled(
    run_dir: Path, block: dict[str, bool] | None, expected: bool
) -> None:
    path = _write(run_dir, {}, {} if block is None else {"deep_optimizer_states": block})
    assert read_run_file(path).uses_plugin is expected


@pytest.mark.parametrize(
    ("run", "ds_config", "named"),
    [
        ({"schema_version": 3}, {}, "schema_version = 3"),
        ({"data_prefix": ""}, {}, "'data_prefix' is missing"),
        ({"point": {}}, {}, "'point' is missing"),
        ({"point": "tiny"}, {}, "'point' is not a table"),
        ({"point": {**POINT, "iteration": 3}}, {}, "did you mean 'iterations'"),
        ({"point": {**POINT, "global_batch_size": 3}}, {}, "global_batch_size 3"),
        ({}, {"train_batch_size": 8}, "train_batch_size = 8: run.json's point says 4"),
        ({}, {"train_micro_batch_size_per_gpu": 1}, "train_micro_batch_size_per_gpu = 1"),
        (
            {},
            {"zero_optimization": {"stage": 2}},
            "zero_optimization.stage = 2: run.json's point says 3",
        ),
        ({"data_prefix": "/nowhere/corpus"}, {}, "/nowhere/corpus.bin is missing"),
    ],
)
def test_what_is_wrong_is_named(
    run_dir: Path, run: dict[str, Any], ds_config: dict[str, Any], named: str
) -> None:
    path = _write(run_dir, run, ds_config)
    with pytest.raises(ConfigError) as raised:
        read_run_file(path)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


def test_files_that_are_missing_or_broken_are_named(run_dir: Path) -> None:
    (run_dir / "ds_config.json").unlink()
    with pytest.raises(ConfigError, match=r"ds_config\.json: cannot be read: No such file"):
        read_run_file(run_dir / "run.json")
    (run_dir / "ds_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"ds_config\.json: not valid JSON"):
        read_run_file(run_dir / "run.json")
    (run_dir / "ds_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        read_run_file(run_dir / "run.json")


def test_data_of_another_format_is_named(run_dir: Path) -> None:
    (run_dir / "corpus.v1.idx").write_bytes(b"MMIDIDX")
    with pytest.raises(ConfigError, match=r"corpus\.v1\.idx is not an index of Megatron's"):
        read_run_file(run_dir / "run.json")


def test_an_earlier_runs_metrics_are_kept(run_dir: Path) -> None:
    metrics = run_dir / "metrics.jsonl"
    metrics.write_text("earlier\n")
    with pytest.raises(ConfigError, match="never overwritten"):
        read_run_file(run_dir / "run.json")
    assert metrics.read_text() == "earlier\n"


def test_the_user_gets_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert main([str(tmp_path / "run.json")]) == 2
    assert capsys.readouterr().err.startswith("pretrain_gpt: error: ")
    monkeypatch.setenv("RANK", "1")
    assert main([str(tmp_path / "run.json"), "--local_rank=1"]) == 2
    assert capsys.readouterr().err == ""


def test_a_config_of_the_autotuner_brings_its_batches_and_stage(run_dir: Path) -> None:
    run = read_run_file(run_dir / "run.json")
    table = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 3,
        "zero_optimization": {"stage": 1},
        "autotuning": {"enabled": True, "metric_path": str(run_dir / "tried/metrics.json")},
    }
    text = base64.urlsafe_b64encode(json.dumps(table).encode()).decode()
    tried = with_tuned_config(run, text)
    assert (tried.point.micro_batch_size, tried.point.global_batch_size) == (4, 12)
    assert (tried.point.zero_stage, tried.point.offload_optimizer) == (1, "none")
    assert tried.ds_config == table
    assert tried.metrics_path == run_dir / "tried" / "metrics.jsonl", "not the run's own"
    assert tried.metrics_path.parent.is_dir()
    del table["autotuning"]
    (run_dir / "best.json").write_text(json.dumps(table))
    best = with_tuned_config(run, str(run_dir / "best.json"))
    assert (best.metrics_path, best.point.accumulation) == (run.metrics_path, 3)


@pytest.mark.parametrize("config", ["nothing", "e30=", "missing.json"])
def test_a_config_of_the_autotuner_that_is_none_is_named(run_dir: Path, config: str) -> None:
    run = read_run_file(run_dir / "run.json")
    with pytest.raises(ConfigError, match=r"--deepspeed_config|missing\.json: cannot be read"):
        with_tuned_config(run, config)


@pytest.mark.parametrize("module", [TRAINER_MODULE, PIPELINE_MODULE, LIGHTNING_MODULE])
def test_what_the_user_has_to_mend_is_a_line_that_the_launcher_finds(module, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert importlib.import_module(module).main(["/nowhere/run.json"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pretrain_gpt: error: /nowhere/run.json: cannot be read:")
    assert judge(Ending(2, 1.0), [line], has_ended=False).cause == line


MODEL = Model(name="m", hidden=64, ffn=96, layers=2, heads=4, kv_heads=2)
TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_a_plain_process_is_the_only_rank() -> None:
    ranks = ranks_from_environment({})
    assert (ranks.rank, ranks.local_rank, ranks.num_ranks) == (0, 0, 1)
    assert ranks.is_first
    assert ranks.is_last
    environment: dict[str, str] = {}
    ranks.export(environment)
    assert set(environment) == set(TORCHRUN)


def test_a_launchers_environment_stays_and_the_command_lines_local_rank_wins() -> None:
    for given in (None, 0):
        ranks = ranks_from_environment(TORCHRUN, local_rank=given)
        assert (ranks.local_rank, ranks.is_first, ranks.is_last) == (
            1 if given is None else 0,
            False,
            True,
        )
        environment = dict(TORCHRUN)
        ranks.export(environment)
        assert environment == {**TORCHRUN, "LOCAL_RANK": str(ranks.local_rank)}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE = 'two'"),
        ({"RANK": "2"}, "RANK = 2"),
        ({"RANK": "-1"}, "RANK = -1"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not set"),
        ({"RANK": None}, "RANK is not set"),
    ],
)
def test_a_broken_environment_is_named(changes: dict[str, str | None], named: str) -> None:
    merged = {**TORCHRUN, **changes}
    environment = {name: value for name, value in merged.items() if value is not None}
    with pytest.raises(ConfigError, match=named):
        ranks_from_environment(environment)


def test_the_number_of_ranks_must_be_the_points() -> None:
    ranks = ranks_from_environment(TORCHRUN)
    ranks.require(Point(model=MODEL, tp=2))
    ranks.require(Point(model=MODEL, dp=2, global_batch_size=2))
    with pytest.raises(ConfigError, match=r"WORLD_SIZE = 2.*tp 2 x pp 1 x dp 2 = 4.*torchrun"):
        ranks.require(Point(model=MODEL, tp=2, dp=2, global_batch_size=2))
