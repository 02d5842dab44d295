"""State cut by some ranks and put together by others is the state that it was."""

import pytest
import torch
from hypothesis import given, strategies as st

from deep_optimizer_states.adapter import reshard
from deep_optimizer_states.adapter.reshard import even_slices, group_slices, put_together

PADDING = -1.0
"""What lies in files where nothing belongs."""
NUM_RANKS = st.integers(1, 5)
SIZES = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=5), min_size=1, max_size=3)


def named(sizes):
    """Parameters of flat tensors, each with a name of its own."""
    return [
        {f"{flat}.{idx}": numel for idx, numel in enumerate(group)}
        for flat, group in enumerate(sizes)
    ]


def values(flats):
    """Name -> elements, each of which is there once."""
    sizes = {name: numel for group in flats for name, numel in group.items()}
    pieces = torch.arange(1.0, 1 + sum(sizes.values())).split(list(sizes.values()))
    return dict(zip(sizes, pieces, strict=True))


def write(slices, numels, whole):
    """The flat tensors of a rank."""
    flats = [torch.full((numel,), PADDING) for numel in numels]
    for one in slices:
        to = flats[one.flat].narrow(0, one.start, one.numel)
        to.copy_(whole[one.name][one.first : one.first + one.numel])
    return flats


def cut_evenly(flats, num_ranks):
    return [even_slices(flats, rank, num_ranks) for rank in range(num_ranks)]


def cut_groups(flats, num_ranks, paddings):
    totals = [
        sum(group.values()) + sum(behind) for group, behind in zip(flats, paddings, strict=True)
    ]
    # DeepSpeed aligns the parts of ranks to more elements than one.
    numels = [-(-total // num_ranks // 2) * 2 + 2 for total in totals]
    return [(group_slices(flats, rank, numels, paddings), numels) for rank in range(num_ranks)]


def differences(flats, saved, loaded):
    """Ranks of ``loaded`` that get something else than belongs there."""
    whole = values(flats)
    files = [write(*cut, whole) for cut in saved]
    wrong = []
    for rank, (wanted, numels) in enumerate(loaded):
        held = [slices for slices, _ in saved]
        found = put_together(wanted, numels, held, lambda file: {"kind": files[file]})["kind"]
        expected = [flat.where(flat != PADDING, 0) for flat in write(wanted, numels, whole)]
        if not all(map(torch.equal, found, expected)):
            wrong.append(rank)
    return wrong


@given(SIZES, SIZES, NUM_RANKS, NUM_RANKS)
def test_equal_parts_of_every_parameter_find_their_place(sizes, others, saved_by, loaded_by):
    flats = named(sizes)
    # The same parameters in other flat tensors, as another sub_group_size makes them.
    items = [item for group in flats for item in group.items()]
    step = len(others[0])
    other = [dict(items[first : first + step]) for first in range(0, len(items), step)]
    assert differences(flats, cut_evenly(flats, saved_by), cut_evenly(other, loaded_by)) == []


@given(SIZES, NUM_RANKS, NUM_RANKS, st.randoms(use_true_random=False))
def test_equal_parts_of_groups_find_their_place(sizes, saved_by, loaded_by, random):
    flats = named(sizes)
    orders = [[], []]
    for order in orders:  # as round_robin_gradients and an alignment of parameters leave them
        for group in flats:
            order.append(dict(random.sample(list(group.items()), len(group))))
    paddings = [[[random.randrange(3) for _ in group] for group in flats] for _ in orders]
    saved = cut_groups(orders[0], saved_by, paddings[0])
    assert differences(flats, saved, cut_groups(orders[1], loaded_by, paddings[1])) == []


FLATS = named([[7, 5, 1], [11]])


@pytest.mark.parametrize("what", ["offset", "padding"])
def test_a_mapping_that_is_wrong_is_seen(monkeypatch, what):
    """Negative controls: a slice read one element off, and padding taken for a parameter's."""
    saved, loaded = cut_evenly(FLATS, 3), cut_evenly(FLATS, 2)
    assert differences(FLATS, saved, loaded) == []
    true = reshard.overlaps
    if what == "offset":
        monkeypatch.setattr(
            reshard,
            "overlaps",
            lambda wanted, held: [
                (to, of._replace(start=max(0, of.start - 1))) for to, of in true(wanted, held)
            ],
        )
        assert differences(FLATS, saved, loaded) != []
    else:
        none = [[0] * len(group) for group in FLATS]
        paddings = [[2] * len(group) for group in FLATS]
        files, here = cut_groups(FLATS, 3, paddings), cut_groups(FLATS, 2, none)
        assert differences(FLATS, files, here) == []
        whole = [write(*cut, values(FLATS)) for cut in files]
        held = [group_slices(FLATS, rank, numels) for rank, (_, numels) in enumerate(files)]
        wanted, numels = here[0]
        found = put_together(wanted, numels, held, lambda file: {"": whole[file]})[""]
        assert not torch.equal(found[0], write(wanted, numels, values(FLATS))[0])
