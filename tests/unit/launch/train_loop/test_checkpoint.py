import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from full_disk import files_of_at_most

from configs.errors import ConfigError
from configs.study import make_point
from deep_optimizer_states.core.checkpoint import write_skeleton
from launch.train_loop.checkpoint import find_checkpoint, require_usable, save_whole

POINT = make_point({"model": "tiny"})


def writer(error=None):
    """Write one file, as a rank does it, and break off where an error is given."""

    def write(folder, when_whole):
        folder.mkdir(parents=True)
        torch.save({"weights": torch.arange(100_000)}, folder / "states.pt")
        if error:
            raise error
        return True

    return write


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def run(tmp_path, one_rank):
    return SimpleNamespace(run_dir=tmp_path, point=POINT, data_facts={".bin": 1})


def save(run, iteration, write):
    """Save a checkpoint; return the folders of those that are whole."""
    whole = []
    save_whole(run, iteration, write, whole.append)
    return whole


def test_latest_names_the_last_checkpoint_that_is_whole(run):
    for iteration in (3, 6):
        (path,) = save(run, iteration, writer())
        found = find_checkpoint(run.run_dir)
        assert (found.path, found.iteration, found.data) == (path, iteration, {".bin": 1})
        assert found.damage() == ""
    assert found.files.keys() == {"states.pt"}
    with pytest.raises(KeyboardInterrupt):
        save(run, 9, writer(KeyboardInterrupt()))
    assert find_checkpoint(run.run_dir).path == path
    assert not (path.parent / "iteration-000009").exists()


def test_a_full_disk_leaves_the_checkpoint_before(run):
    (first,) = save(run, 3, writer())
    with files_of_at_most(50_000), pytest.raises(OSError, match="iteration 6 not saved") as caught:
        save(run, 6, writer())
    assert "earlier ones are still there" in str(caught.value)
    found = find_checkpoint(run.run_dir)
    assert (found.path, found.damage()) == (first, "")
    assert {path.name for path in first.parent.iterdir()} == {first.name, "latest"}


def test_files_that_are_filled_later_have_their_name_once_they_are_whole(run):
    later = []

    def begin(folder, when_whole):
        later.append(when_whole)
        folder.mkdir(parents=True)
        write_skeleton({"weights": torch.arange(100_000)}, folder / "states.pt")
        return False

    (first,) = save(run, 3, writer())
    whole = []
    save_whole(run, 6, begin, whole.append)
    assert find_checkpoint(run.run_dir).path == first
    assert whole == []
    later[0]()
    found = find_checkpoint(run.run_dir)
    assert (found.iteration, [found.path], found.has_checksums) == (6, whole, False)
    assert found.damage() == ""
    (found.path / "states.pt").write_bytes(b"cut")
    assert "has 3 bytes instead of" in found.damage()


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "run-001" / "checkpoints" / "iteration-000004"
    path.mkdir(parents=True)
    files = {}
    for name in ("a.pt", "b.pt"):
        torch.save({"x": torch.arange(100)}, path / name)
        files[name] = (path / name).stat().st_size
    description = {
        "schema_version": 1,
        "iteration": 4,
        "point": POINT.model_dump(mode="json"),
        "data": {".bin": 1},
        "files": files,
    }
    (path / "checkpoint.json").write_text(json.dumps(description))
    (path.parent / "latest").write_text(path.name)
    return path.parent.parent


def test_the_last_checkpoint_of_a_run_is_found_by_either_folder(run_dir):
    path = run_dir / "checkpoints" / "iteration-000004"
    found = find_checkpoint(run_dir)
    assert (found.path, found.iteration, found.data) == (path, 4, {".bin": 1})
    assert find_checkpoint(path) == found
    assert found.differences(POINT) == []
    assert found.damage() == ""


def test_a_folder_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no checkpoint there .*save_interval above 0"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ('{"schema_version": 2}', "schema_version is not 1"),
        ('{"schema_version": 1, "iteration": 4}', "not a checkpoint of this harness"),
    ],
)
def test_what_is_no_checkpoint_of_ours_is_named(run_dir, text, words):
    (run_dir / "checkpoints" / "iteration-000004" / "checkpoint.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"checkpoint\.json: {words}"):
        find_checkpoint(run_dir)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"seed": 7}, "seed = 7: .* was saved with 1234"),
        ({"iterations": 99}, "iterations = 99"),
        ({"subgroup_numel": 100}, "subgroup_numel = 100"),
        ({"dtype": "fp32"}, 'dtype = "fp32"'),
        ({"split": "1,1,1"}, "split = .1,1,1."),
    ],
)
def test_a_point_that_could_not_have_saved_it_is_refused(run_dir, fields, named):
    reasons = find_checkpoint(run_dir).differences(make_point({"model": "tiny", **fields}))
    assert len(reasons) == 1
    assert re.search(named, reasons[0])


@pytest.mark.parametrize(
    "fields",
    [{"engine": "stride", "stride": 2}, {"name": "x"}, {"save_interval": 3}, {"eval_interval": 3}],
)
def test_what_changes_no_bit_may_differ(run_dir, fields):
    assert find_checkpoint(run_dir).differences(make_point({"model": "tiny", **fields})) == []


def test_a_checkpoint_of_the_last_iteration_leaves_nothing_to_do(run_dir):
    found = replace(find_checkpoint(run_dir), iteration=POINT.iterations)
    (reason,) = found.differences(POINT)
    assert "nothing is left to do" in reason


def test_all_that_forbids_going_on_is_said_at_once(run_dir, one_rank):
    checkpoint = find_checkpoint(run_dir)
    run = SimpleNamespace(point=POINT, data_facts={".bin": 1}, data_prefix="/d")
    require_usable(run, checkpoint)
    (checkpoint.path / "a.pt").unlink()
    run.point, run.data_facts = make_point({"model": "tiny", "seed": 7}), {".bin": 2}
    with pytest.raises(ConfigError, match=r"seed = 7: .*data_prefix = /d: .*damaged: .*a\.pt"):
        require_usable(run, checkpoint)


def test_damage_is_found_by_whoever_looks_at_the_file(run_dir):
    checkpoint = find_checkpoint(run_dir)
    path = checkpoint.path / "b.pt"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert f"{path}: has {len(whole) - 1} bytes instead of {len(whole)}" in checkpoint.damage()
    middle = whole.index(torch.arange(100).numpy().tobytes()) + 80
    path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    assert "does not have its checksum" in checkpoint.damage()
    assert "does not have its checksum" in checkpoint.damage(1, 2)
    assert checkpoint.damage(0, 2) == ""
    path.unlink()
    assert "No such file" in checkpoint.damage()
