"""Fingerprints of the trained state, with rows that do not hold all of it."""

from types import SimpleNamespace

import pytest
import torch

from launch.trainer import digest

WEIGHTS, MASTER, MOMENTS = torch.ones(4), torch.zeros(4), [torch.ones(4), torch.zeros(4)]


@pytest.fixture
def digests(monkeypatch):
    """Takes the fingerprints of subgroups' moments, as one rank of one."""

    def gather(everyone, mine):
        everyone[:] = [mine]

    monkeypatch.setattr(digest.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(digest.dist, "all_gather_object", gather)

    def take(*moments, weights=WEIGHTS):
        state = [
            SimpleNamespace(weights=[weights], masters=[MASTER], moments=found) for found in moments
        ]
        monkeypatch.setattr(digest, "read_state", lambda engine: state)
        return digest.state_digests(None)

    return take


def test_equal_state_has_equal_fingerprints_and_any_other_bit_has_another(digests):
    whole = digests(MOMENTS, MOMENTS)
    assert whole == digests(MOMENTS, MOMENTS)
    assert whole[1] != digests(MOMENTS, MOMENTS[::-1])[1]
    assert whole[0] != digests(MOMENTS, MOMENTS, weights=WEIGHTS + 1)[0]


def test_moments_that_another_process_holds_leave_no_fingerprint_to_compare(digests):
    weights, state = digests(MOMENTS, [])
    assert weights == digests(MOMENTS, MOMENTS)[0]
    assert state is None


def test_more_parameters_than_hashing_is_worth_have_none(digests, monkeypatch):
    monkeypatch.setattr(digest, "MAX_NUMEL_PER_CORE", 1)
    monkeypatch.setattr(digest, "usable_cores", lambda: 4)
    assert digests(MOMENTS) == (None, None)
    monkeypatch.setattr(digest, "usable_cores", lambda: 5)
    assert None not in digests(MOMENTS)
