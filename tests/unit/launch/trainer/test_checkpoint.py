import json
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from full_disk import files_of_at_most

from configs.study import make_point
from launch.trainer import checkpoint
from launch.trainer.checkpoint_files import find_checkpoint

POINT = make_point({"model": "tiny"})


class FakeEngine:
    """Saves one file, as DeepSpeed's engine does it."""

    device = torch.device("cpu")

    def __init__(self, error=None):
        self.error = error

    def save_checkpoint(self, folder, tag, client_state, save_latest):
        assert not save_latest
        path = checkpoint.Path(folder) / tag
        path.mkdir(parents=True)
        torch.save({"weights": torch.arange(100_000), **client_state}, path / "states.pt")
        if self.error:
            raise self.error


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(checkpoint, "random_states", lambda _device: None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def run(tmp_path):
    return SimpleNamespace(run_dir=tmp_path, point=POINT, data_facts={".bin": 1})


def test_latest_names_the_last_checkpoint(run):
    for iteration in (3, 6):
        path = checkpoint.save_checkpoint(run, FakeEngine(), iteration)
        found = find_checkpoint(run.run_dir)
        assert (found.path, found.iteration, found.data) == (path, iteration, {".bin": 1})
        assert found.damage() == ""
    assert json.loads((path / "checkpoint.json").read_text())["files"].keys() == {"states.pt"}


def test_a_full_disk_leaves_the_checkpoint_before(run):
    first = checkpoint.save_checkpoint(run, FakeEngine(), 3)
    with files_of_at_most(50_000), pytest.raises(OSError, match="iteration 6 not saved") as caught:
        checkpoint.save_checkpoint(run, FakeEngine(), 6)
    assert "earlier ones are still there" in str(caught.value)
    found = find_checkpoint(run.run_dir)
    assert (found.path, found.damage()) == (first, "")
    assert {path.name for path in first.parent.iterdir()} == {first.name, "latest"}


def test_a_save_that_is_cut_short_has_no_checkpoints_name(run):
    first = checkpoint.save_checkpoint(run, FakeEngine(), 3)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save_checkpoint(run, FakeEngine(KeyboardInterrupt()), 6)
    assert find_checkpoint(run.run_dir).path == first
    assert not (first.parent / "iteration-000006").exists()
