"""The identity of a save in each of its files, see adapter/identity.py."""

from collections import OrderedDict

import pytest
import torch

from deep_optimizer_states.adapter.identity import identity_of, stamped
from deep_optimizer_states.core.checkpoint import write_skeleton

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
