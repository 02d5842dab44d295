import json
import multiprocessing

import pytest

from configs.errors import ConfigError
from configs.files import json_lines, last_lines, write_json
from configs.study import make_point
from launch.ds_json import deepspeed_config
from launch.records.run_folder import Status, create_run_folder, sweep_dir

TINY = make_point({"model": "tiny"})


def test_runs_count_up_and_leave_what_is_there(odd_dir):
    first = create_run_folder(odd_dir, "basic", TINY)
    (first.path / "mine").write_text("kept")
    second = create_run_folder(odd_dir, "basic", TINY)
    assert (first.path.name, second.path.name) == ("run-001", "run-002")
    assert first.path.parent == odd_dir / "basic" / TINY.log_name.removesuffix(".log")
    assert (first.path / "mine").read_text() == "kept"


def test_a_gap_is_not_filled_and_a_file_is_not_replaced(tmp_path):
    stem = create_run_folder(tmp_path, "basic", TINY).path.parent
    (stem / "run-0041").write_text("a file")
    assert create_run_folder(tmp_path, "basic", TINY).path.name == "run-042"


def _make_many(results_dir, barrier, queue):
    barrier.wait()
    queue.put([create_run_folder(results_dir, "s", TINY).path.name for _ in range(30)])


def test_racing_launchers_never_share_a_folder(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(2), context.Queue()
    racers = [context.Process(target=_make_many, args=(tmp_path, barrier, queue)) for _ in range(2)]
    for racer in racers:
        racer.start()
    names = queue.get() + queue.get()
    for racer in racers:
        racer.join()
    assert sorted(names) == [f"run-{n:03d}" for n in range(1, 61)]


@pytest.mark.parametrize("name", ["", "..", "a/b", "a b", ".hidden", "a\n"])
def test_a_sweep_is_the_name_of_one_folder(tmp_path, name):
    with pytest.raises(ConfigError, match="sweep"):
        sweep_dir(tmp_path, name)


def test_a_results_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be made.*--results-dir"):
        create_run_folder(tmp_path / "file", "basic", TINY)


def test_inputs_and_status_follow_the_contract(odd_dir):
    folder = create_run_folder(odd_dir, "basic", TINY)
    keys = {"point_key": "p", "setup_key": "s", "repeat": 2}
    facts = {"data_prefix": "/data/x", "command": ["python"], "provenance": {"git": None}}
    folder.write_inputs(TINY, keys | facts, deepspeed_config(TINY))
    run = json.loads(folder.run_json.read_text())
    assert set(run) == {
        "schema_version",
        "run_id",
        "point",
        "study",
        "point_key",
        "setup_key",
        "repeat",
        "started",
        "log",
        "metrics",
        "data_prefix",
        "command",
        "provenance",
    }
    assert make_point(run["point"]) == TINY
    assert (run["point_key"], run["setup_key"], run["repeat"]) == ("p", "s", 2)
    assert run["log"] == TINY.log_name
    folder.log.write_text("".join(f"line {i}\n\n" for i in range(100)))
    folder.write_status(Status("failed", 3, 1.5, "why"))
    status = json.loads((folder.path / "status.json").read_text())
    assert (status["status"], status["exit_code"], status["cause"]) == ("failed", 3, "why")
    assert status["last_lines"] == [f"line {i}" for i in range(80, 100)]
    assert sorted(path.name for path in folder.path.iterdir()) == sorted(
        ["run.json", "ds_config.json", "status.json", folder.log_name]
    )


def test_losses_and_end_are_read_from_metrics(tmp_path):
    folder = create_run_folder(tmp_path, "basic", TINY)
    assert folder.last_loss() is None
    assert not folder.has_ended()
    folder.metrics.write_text(
        '{"event": "iteration", "loss": 3.0}\n{"event": "iteration", "loss": 2.0}\n'
        '[1]\n\x00\n{"event": "end"}\n{"event": "iter'
    )
    assert folder.last_loss() == 2.0
    assert folder.has_ended()


def test_a_failed_write_leaves_the_old_json(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"old": 1})
    with pytest.raises(ValueError, match="Out of range"):
        write_json(path, {"new": float("nan")})
    assert json.loads(path.read_text()) == {"old": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_nothing_beside(tmp_path):
    (tmp_path / "a.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_json(tmp_path / "a.json", {})
    assert list(tmp_path.iterdir()) == [tmp_path / "a.json"]


def test_the_end_of_a_large_binary_log_is_read(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"\xff\x00" * 100_000 + b"\nlast\n")
    assert last_lines(log)[-1] == "last"
    assert last_lines(tmp_path / "none") == []
    assert json_lines(tmp_path / "none") == []
