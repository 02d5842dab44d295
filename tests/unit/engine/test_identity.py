"""Files of one save are told from those of another, see adapter/identity.py."""

from collections import OrderedDict

import pytest
import torch

from deep_optimizer_states.adapter.identity import (
    head_of_model,
    head_of_state,
    identity_of,
    read_file,
    refuse_mixture,
    stamped,
)
from deep_optimizer_states.core.checkpoint import write_skeleton
from deep_optimizer_states.errors import CheckpointError

IDENTITY = {"id": "7f", "tag": "run/t", "step": 3}


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("ds_config", [{"train_batch_size": 2}, "ds.json"])
@pytest.mark.parametrize("is_mapped", [True, False])
def test_a_file_keeps_it_beside_its_keys(tmp_path, ds_config, weights_only, is_mapped):
    content = {"module": {}, "ds_config": ds_config, "global_steps": 3}
    write_skeleton(stamped(content, IDENTITY), tmp_path / "file")
    found = torch.load(tmp_path / "file", weights_only=weights_only, mmap=is_mapped)
    assert found == content
    assert list(found) == list(content)
    assert identity_of(found) == IDENTITY
    assert identity_of(content) is None


def test_what_torch_keeps_there_stays():
    content = OrderedDict(weight=torch.ones(1))
    content._metadata = {"": {"version": 2}}
    made = stamped(content, IDENTITY)
    assert made._metadata == {"": {"version": 2}}
    assert identity_of(made) == IDENTITY
    assert identity_of(content) is None


def model(name, identity=None, **changes):
    content = {"global_steps": 3, "skipped_steps": 1, "lr_scheduler": {"last_epoch": 2}, **changes}
    return head_of_model(name, stamped(content, identity) if identity else content)


def state(name, identity=None, step=2, has_moments=True):
    moments = dict.fromkeys(("exp_avg", "exp_avg_sq"), 0) if has_moments else {}
    content = stamped({}, identity) if identity else {}
    return head_of_state(name, content, [{"step": torch.tensor(step), **moments}])


@pytest.mark.parametrize(
    "heads",
    [
        [model("m0"), model("m1"), state("s0"), state("s1")],
        [model("m0", IDENTITY), state("s0", IDENTITY), state("s1", IDENTITY)],
        [model("m0"), state("s0", has_moments=False), state("s1", has_moments=False)],
        # What a rank alone knows, and a count that somebody has set, are no other save's.
        [model("m0", lr_scheduler={"best": 0.1}), model("m1", lr_scheduler={"best": 0.2})],
        [model("m0", global_steps=900), state("s0")],
        [model("m0", lr_scheduler=None), model("m1", lr_scheduler=None)],
        [],
    ],
)
def test_files_of_one_save_are_taken(heads):
    refuse_mixture(heads)


@pytest.mark.parametrize(
    ("heads", "says"),
    [
        (
            [model("m0"), model("m1"), model("m2", global_steps=5)],
            "m2 has global_steps = 5, and m0 has 3: ",
        ),
        ([model("m0", skipped_steps=0), model("m1"), model("m2")], "m0 has skipped_steps = 0, and"),
        ([model("m0"), model("m1", dp_world_size=2), model("m2", dp_world_size=4)], "m2 has dp_w"),
        (
            [model("m0"), model("m1"), model("m2", lr_scheduler={"last_epoch": 4})],
            "m2 has lr_scheduler.last_epoch = 4, and m0 has 2",
        ),
        ([state("s0", step=5), state("s1"), state("s2")], "s0 has updates of Adam = 5, and s1 has"),
        ([state("s0"), state("s1", has_moments=False)], "s1 has updates of Adam = none, for it ha"),
        (
            [state("s0", IDENTITY), state("s1", {**IDENTITY, "id": "80"})],
            "s1 is of save 80 (step 3, tag 'run/t'), and s0 of save 7f (step 3, tag 'run/t'): the",
        ),
        (
            [model("m0", IDENTITY), state("s0", IDENTITY), state("s1")],
            "s1 is of a save without an identity, and m0 of save 7f",
        ),
    ],
)
def test_a_file_of_another_save_is_refused_by_name(heads, says):
    with pytest.raises(CheckpointError) as error:
        refuse_mixture(heads)
    assert str(error.value).startswith(says)
    assert str(error.value).endswith("load another checkpoint")


class Gone:
    """What a file may hold of a program that is not there when it is read."""


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "is missing: the checkpoint is not whole; load another one"),
        (b"", "cannot be read, for it is cut off: the checkpoint is not whole; load another one"),
        (b"PK\3\4 and so on", "cannot be read, for it is cut off: the checkpoint is not whole; "),
        (b"something else", "): the checkpoint is not whole; load another one"),
        ([1, 2], "holds a list: the checkpoint is not whole; load another one"),
        ({"ours": Gone}, "needs what cannot be imported here"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch, content, says):
    path = tmp_path / "file"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    monkeypatch.delattr(f"{__name__}.Gone")
    with pytest.raises(CheckpointError) as error:
        read_file(str(path))
    assert str(error.value).startswith(f"{path} ")
    assert says in str(error.value)
    assert "\n" not in str(error.value)
