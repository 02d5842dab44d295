"""Statistics of what messages left out, against NumPy."""

import numpy as np
import pytest
import torch

from optimus_cc import Settings
from optimus_cc.backpropagation import BackwardCompressor
from optimus_cc.error_statistics import STATISTICS, ErrorStatistics


def random(seed, shape=(6, 2, 8)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.1


def expected(activations, gradients, errors):
    """Sums over micro-batches and their numbers; an error of None was not made."""
    found = {name: [] for name in STATISTICS}
    for index, error in enumerate(errors):
        if error is None:
            continue
        e, gradient = error.double().numpy(), gradients[index].double().numpy()
        found["relative_error"].append(np.linalg.norm(e) / np.linalg.norm(gradient))
        if index + 1 < len(activations):
            d = (activations[index] - activations[index + 1]).double().numpy()
            cosine = (e * d).sum() / np.linalg.norm(e) / np.linalg.norm(d)
            found["error_cosine"].append(cosine)
            found["error_mean"].append(e.mean() / np.sqrt((e**2).mean()))
            found["difference_mean"].append(d.mean() / np.sqrt((d**2).mean()))
    return {
        name: (pytest.approx(sum(values), abs=1e-5), len(values)) for name, values in found.items()
    }


def taken(statistics):
    sums, counts = statistics.take()
    return {name: (sums[index].item(), int(counts[index])) for index, name in enumerate(STATISTICS)}


def run(statistics, order, whole=()):
    """``order``: 'a' is the next activation that arrives, 'g' the next gradient that leaves."""
    count = order.count("a")
    activations, gradients, errors = ([random(k + i) for i in range(count)] for k in (0, 50, 90))
    arriving, leaving = iter(range(count)), iter(range(count))
    for what in order:
        if what == "a":
            statistics.arrived(0, activations[next(arriving)])
        elif (index := next(leaving)) in whole:
            statistics.sent_whole(0)
            errors[index] = None
        else:
            statistics.sent(0, gradients[index], errors[index])
    return expected(activations, gradients, errors)


@pytest.mark.parametrize("order", ["agagagag", "aaagaggg", "aaaagggg", "aagagagg"])
@pytest.mark.parametrize("whole", [(), (0, 1), (2,), (0, 1, 2)])
def test_each_error_is_compared_with_its_own_activations_whatever_the_schedule(order, whole):
    """Activations of an evaluation are left out, and each iteration starts anew."""
    statistics = ErrorStatistics()
    with torch.no_grad():
        statistics.arrived(0, random(7))
    for _ in range(2):
        wanted = run(statistics, order, whole)
        assert taken(statistics) == wanted
    assert not statistics.take().any()


def test_an_error_along_the_difference_has_cosine_one_and_a_zero_error_none():
    statistics = ErrorStatistics()
    x = [random(0), random(1), random(2)]
    for activation, error in zip(x, [3 * (x[0] - x[1]), torch.zeros_like(x[0]), x[2]], strict=True):
        statistics.arrived(0, activation)
        statistics.sent(0, random(5), error)
    assert taken(statistics)["error_cosine"] == (pytest.approx(1.0), 2)


def test_what_is_not_finite_is_not_finite_in_the_statistics():
    statistics = ErrorStatistics()
    statistics.arrived(0, random(0))
    statistics.sent(0, random(5), torch.full_like(random(0), float("nan")))
    statistics.arrived(0, random(1))
    sums, _ = statistics.take()
    assert sums[[0, 1, 3]].isnan().all()
    assert sums[2].isfinite()


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("method", ["low-rank", "hadamard-4bit", "fp8"])
def test_statistics_are_of_the_messages_and_change_nothing_of_them(method, feedback):
    common = {
        "inter_grad_comp": True,
        "inter_grad_comp_method": method,
        "inter_grad_comp_rank": 2,
        "use_error_feedback": feedback,
    }
    checked, plain = (
        BackwardCompressor(Settings(**common, check_orth_error=check)) for check in (True, False)
    )
    assert plain.statistics is None
    activations, gradients, errors = [], [], []
    carried = torch.zeros(6, 2, 8)
    for seed in range(3):
        activations.append(random(seed))
        gradients.append(random(seed + 20))
        checked.statistics.arrived(0, activations[-1])
        packed, others = (one.compress(gradients[-1], True) for one in (checked, plain))
        assert torch.equal(packed.view(torch.uint8), others.view(torch.uint8))
        arrived = checked.restore(packed, gradients[-1].shape, True)
        errors.append(gradients[-1] + carried - arrived)
        carried = errors[-1] if feedback else carried
    assert taken(checked.statistics) == expected(activations, gradients, errors)


def test_a_message_that_is_sent_whole_keeps_its_place():
    settings = Settings(
        inter_grad_comp=True,
        inter_grad_comp_rank=2,
        inter_grad_comp_epilogue_only=True,
        check_orth_error=True,
    )
    compressor = BackwardCompressor(settings)
    activations = [random(seed) for seed in range(3)]
    for activation in activations:
        compressor.statistics.arrived(0, activation)
    gradient = random(9)
    compressor.compress(random(8), in_epilogue=False)
    packed = compressor.compress(gradient, in_epilogue=True)
    error = gradient - compressor.restore(packed, gradient.shape, True)
    assert taken(compressor.statistics) == expected(activations[1:], [gradient], [error])
