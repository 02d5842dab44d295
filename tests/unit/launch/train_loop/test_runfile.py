import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError
from configs.files import ROOT
from configs.schema import Model
from configs.study import default_study
from launch.backends.own import LIGHTNING_MODULE, PIPELINE_MODULE
from launch.launchers import TRAINER_MODULE
from launch.pretrain_gpt import train
from launch.process.outcome import judge
from launch.process.supervise import Ending
from launch.train_loop.runfile import ranks_from_environment, read_run_file, run_program

Point = default_study().point_type

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
    assert run.data_prefix == run_dir / "corpus.v1"


def test_data_that_were_moved_are_the_same_data(run_dir: Path) -> None:
    files = {end: {"bytes": 1, "sha256": end} for end in (".bin", ".idx")}

    def facts(source: str) -> Any:
        data = {**files, "name": source, "source": source, "tokens": 3}
        return read_run_file(_write(run_dir, {"provenance": {"data": data}}, {})).data_facts

    assert facts("/here/own") == facts("/there/own") == files


def test_a_point_is_rebuilt_through_the_study_that_came_with_it(run_dir: Path) -> None:
    assert read_run_file(run_dir / "run.json").point.study is default_study()
    row = {"title": "mine"}
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
    ("run", "named"),
    [
        ({"schema_version": 3}, "schema_version = 3"),
        ({"data_prefix": ""}, "'data_prefix' is missing"),
        ({"point": {}}, "'point' is missing"),
        ({"point": "tiny"}, "'point' is not a table"),
        ({"point": {**POINT, "iteration": 3}}, "did you mean 'iterations'"),
        ({"point": {**POINT, "global_batch_size": 3}}, "global_batch_size 3"),
        ({"data_prefix": "/nowhere/corpus"}, "/nowhere/corpus.bin is missing"),
    ],
)
def test_what_is_wrong_is_named(run_dir: Path, run: dict[str, Any], named: str) -> None:
    path = _write(run_dir, run, {})
    with pytest.raises(ConfigError) as raised:
        read_run_file(path)
    assert named in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_earlier_runs_metrics_are_kept(run_dir: Path) -> None:
    metrics = run_dir / "metrics.jsonl"
    metrics.write_text("earlier\n")
    with pytest.raises(ConfigError, match="never overwritten"):
        read_run_file(run_dir / "run.json")
    assert metrics.read_text() == "earlier\n"


def test_the_user_gets_one_line_of_rank_0_that_the_launcher_finds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert run_program(train, "", ["/nowhere/run.json"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pretrain_gpt: error: /nowhere/run.json: cannot be read:")
    assert judge(Ending(2, 1.0), [line], has_ended=False).cause == line
    monkeypatch.setenv("RANK", "1")
    assert run_program(train, "", ["/nowhere/run.json"]) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("module", [TRAINER_MODULE, PIPELINE_MODULE, LIGHTNING_MODULE])
def test_every_trainers_program_reads_its_command_line_before_it_loads_anything(module):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", module, "/nowhere/run.json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "pretrain_gpt: error: /nowhere/run.json: cannot be read:" in done.stderr
    assert not re.search(r"\| +(torch|deepspeed|lightning|megatron)$", done.stderr, re.MULTILINE)


MODEL = Model(name="m", hidden=64, ffn=96, layers=2, heads=4, kv_heads=2)
TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_a_plain_process_is_the_only_rank() -> None:
    environment: dict[str, str] = {}
    ranks = ranks_from_environment(environment)
    ranks.export(environment)
    assert set(environment) == set(TORCHRUN)
    assert (ranks.rank, ranks.num_ranks, ranks.is_first, ranks.is_last) == (0, 1, True, True)
    ranks, environment = ranks_from_environment(TORCHRUN), dict(TORCHRUN)
    ranks.export(environment)
    assert environment == TORCHRUN
    assert (ranks.local_rank, ranks.is_first, ranks.is_last) == (1, False, True)


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
