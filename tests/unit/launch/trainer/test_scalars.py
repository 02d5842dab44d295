import importlib.util
import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.study import make_point
from launch.trainer.scalars import Scalars, scalars_of, scalars_of_run

FIELDS = {
    "iteration": 3,
    "iteration_ms": 500.0,
    "forward_ms": 100.0,
    "backward_ms": 200.0,
    "update_ms": 150.0,
    "loss": 8.5,
    "grad_norm": None,
    "learning_rate": 1e-4,
    "tokens": 999,
    "host_memory_bytes": 2**30,
    "device_memory_bytes": None,
    "skipped": False,
}


class Board:
    def __init__(self, fails_at=None):
        self.seen, self.closed, self.fails_at = [], False, fails_at

    def write(self, iteration, scalars):
        if iteration == self.fails_at:
            raise OSError(28, "No space left on device")
        self.seen.append((iteration, scalars, threading.current_thread().name))

    def close(self):
        self.closed = True


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "stem" / "run-001"
    folder.mkdir(parents=True)
    point = make_point({"model": "tiny"})
    return SimpleNamespace(run_dir=folder, point=point)


def write(scalars, *iterations):
    for iteration in iterations:
        scalars.write({**FIELDS, "iteration": iteration}, 1000)


def test_names_and_numbers():
    assert scalars_of(FIELDS, 1000) == {
        "train/loss": 8.5,
        "train/learning_rate": 1e-4,
        "time/iteration_ms": 500.0,
        "time/forward_ms": 100.0,
        "time/backward_ms": 200.0,
        "time/update_ms": 150.0,
        "time/tokens_per_s": 2000.0,
        "memory/host_bytes": 2.0**30,
    }


def test_an_evaluation_stands_beside_its_iteration():
    board = Board()
    with Scalars([lambda: board]) as scalars:
        write(scalars, 3)
        scalars.write_evaluation({"iteration": 3, "loss": 8.25, "perplexity": None, "tokens": 9})
    assert [(at, numbers) for at, numbers, _ in board.seen] == [
        (3, scalars_of({**FIELDS}, 1000)),
        (3, {"validation/loss": 8.25}),
    ]


def test_every_iteration_arrives_in_order_and_from_another_thread():
    board = Board()
    with Scalars([lambda: board]) as scalars:
        write(scalars, 1, 2, 3)
    assert [iteration for iteration, _, _ in board.seen] == [1, 2, 3]
    assert {name for _, _, name in board.seen} == {"scalars"}
    assert board.closed


def test_a_dashboard_that_fails_is_left_out_and_the_other_goes_on(capsys):
    bad, good = Board(fails_at=2), Board()
    with Scalars([lambda: bad, lambda: good]) as scalars:
        write(scalars, 1, 2, 3)
    assert [iteration for iteration, *_ in bad.seen] == [1]
    assert [iteration for iteration, *_ in good.seen] == [1, 2, 3]
    assert capsys.readouterr().err.count("left out from now on: OSError") == 1


def test_a_dashboard_that_does_not_open_is_left_out(capsys):
    def refuse():
        raise RuntimeError("no such project")

    with Scalars([refuse]) as scalars:
        write(scalars, 1)
    assert "no such project" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("is_first", "environment"),
    [(True, {}), (False, {"DOS_TENSORBOARD": "1", "DOS_WANDB_PROJECT": "p"})],
)
def test_nothing_is_opened_unasked_or_off_rank_0(run, is_first, environment, capsys):
    with scalars_of_run(run, is_first, environment) as scalars:
        write(scalars, 1)
    assert list(run.run_dir.iterdir()) == []
    assert capsys.readouterr().err == ""  # nor tried: the package need not be there


def test_weights_and_biases_gets_the_run_and_no_key(run, tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text(
        "import json, pathlib\n"
        "class Run:\n"
        "    def __init__(self, given): self.given, self.rows = given, []\n"
        "    def log(self, row, step): self.rows.append([step, row])\n"
        "    def finish(self):\n"
        "        text = json.dumps([self.given, self.rows])\n"
        "        pathlib.Path(self.given['dir'], 'sent').write_text(text)\n"
        "def init(**given): return Run(given)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "secret-key")
    with scalars_of_run(run, True, {"DOS_WANDB_PROJECT": "offloading"}) as scalars:
        write(scalars, 1, 2)
    monkeypatch.delitem(sys.modules, "wandb")
    given, rows = json.loads((run.run_dir / "sent").read_text())
    assert (given["project"], given["name"]) == ("offloading", "stem/run-001")
    assert given["dir"] == str(run.run_dir)
    assert given["config"]["model"]["name"] == "tiny"
    assert [step for step, _ in rows] == [1, 2]
    assert rows[0][1]["train/loss"] == 8.5
    for path in run.run_dir.rglob("*"):
        assert "secret-key" not in path.read_text()


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="needs the package tensorboard"
)
def test_tensorboard_reads_what_was_written(run):
    with scalars_of_run(run, True, {"DOS_TENSORBOARD": "1"}) as scalars:
        write(scalars, 1, 2)
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (file,) = Path(run.run_dir / "tensorboard").iterdir()
    seen = {
        (event.step, value.tag)
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    }
    assert {(1, "train/loss"), (2, "train/loss"), (2, "time/tokens_per_s")} <= seen
