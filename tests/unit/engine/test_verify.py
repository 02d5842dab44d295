"""A sample of an update, repeated: no alarm without a fault, one for every kind of fault."""

import pytest
import torch

from deep_optimizer_states.core.executor import Work
from deep_optimizer_states.core.kernels.adam import AdamTensors, BetaPowers, adam_scalars
from deep_optimizer_states.core.kernels.host import HostAdam
from deep_optimizer_states.core.verify import PART_NUMEL, Sample, is_due
from deep_optimizer_states.errors import UpdateError

ADAM = HostAdam(1)
GROUP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SCALARS = adam_scalars(
    {**GROUP, "bias_correction": True}, BetaPowers(GROUP["betas"]).at(1, GROUP["betas"]), 0.5, True
)
NUMELS = [1, 700, 2 * PART_NUMEL, 2 * PART_NUMEL + 1, 10 * PART_NUMEL + 7]


def make_work(numel):
    generator = torch.Generator().manual_seed(numel)
    master, exp_avg, exp_avg_sq, grad = (torch.randn(numel, generator=generator) for _ in "1234")
    weights = torch.zeros(numel, dtype=torch.bfloat16)
    tensors = AdamTensors(master, exp_avg, exp_avg_sq.abs(), grad.bfloat16(), weights)
    return Work(f"tile of {numel}", tensors, SCALARS, numel - numel % 16)


def update(work):
    for tile in work:
        ADAM.step(tile.tensors, tile.scalars, tile.tail_start, 1)


@pytest.fixture
def work():
    return [make_work(numel) for numel in NUMELS]


def test_a_right_update_passes(work):
    sample = Sample(work)
    update(work)
    sample.compare(ADAM, 1)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -0.0])
def test_gradients_that_are_not_finite_raise_no_alarm(work, bad):
    for tile in work:
        tile.tensors.grad.fill_(bad)
    sample = Sample(work)
    update(work)
    sample.compare(ADAM, 1)


@pytest.mark.parametrize("name", ["master", "exp_avg", "exp_avg_sq", "weights"])
@pytest.mark.parametrize("numel", NUMELS)
@pytest.mark.parametrize("end", [0, -1])
def test_one_wrong_number_at_either_end_is_found(work, name, numel, end):
    sample = Sample(work)
    update(work)
    tile = work[NUMELS.index(numel)]
    getattr(tile.tensors, name)[end] *= 1.01
    element = end % numel
    said = (
        f"update 7 since the start, tile of {numel}, went wrong: {name} of its element {element} is"
    )
    with pytest.raises(UpdateError, match=said):
        sample.compare(ADAM, 7)


def test_state_that_was_not_updated_is_found(work):
    sample = Sample(work)
    update(work[:-1])
    with pytest.raises(UpdateError, match=r"until this is understood, .* \"all-host\""):
        sample.compare(ADAM, 1)


def test_a_gradient_that_came_too_late_is_found(work):
    late = work[-1].tensors.grad
    arrived = late.clone()
    late.zero_()
    sample = Sample(work)
    update(work)
    late.copy_(arrived)
    with pytest.raises(UpdateError, match=f"{work[-1].name}, went wrong: master"):
        sample.compare(ADAM, 1)


def test_a_tail_within_a_part_is_a_tail_there(work):
    tile = work[-1]
    early = Work(tile.name, tile.tensors, SCALARS, tile.tensors.numel - PART_NUMEL // 2)
    sample = Sample([early])
    update([early])
    sample.compare(ADAM, 1)
    sample = Sample([early])
    update([tile])
    with pytest.raises(UpdateError, match=r"element (19[4-9]|20\d)\d\d is"):
        sample.compare(ADAM, 1)


@pytest.mark.parametrize(("every", "due"), [(0, []), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [1, 2, 3, 6])])
def test_the_first_two_and_one_in_so_many_are_due(every, due):
    assert [number for number in range(1, 8) if is_due(number, every)] == due
