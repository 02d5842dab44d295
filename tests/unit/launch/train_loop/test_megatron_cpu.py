import importlib
import importlib.metadata
import inspect
import operator
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from launch.train_loop import megatron_cpu


@pytest.fixture(autouse=True)
def _quiet_import() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core misses apex and Transformer Engine
        yield


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back afterwards what is replaced."""
    for module, name, _ in (*megatron_cpu.PATCHED, *megatron_cpu.FOR_PIPELINES):
        owner, _, attribute = name.rpartition(".")
        place = importlib.import_module(module)
        place = operator.attrgetter(owner)(place) if owner else place
        monkeypatch.setattr(place, attribute, getattr(place, attribute))


@pytest.mark.parametrize("version", ["0.17.0", "0.1.9", "1.16.1", "0.160.1"])
def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    with pytest.raises(RuntimeError, match=rf"megatron-core {version}: .*megatron-core==0\.16\.\*"):
        megatron_cpu.apply()


@pytest.mark.parametrize("names", ["PATCHED", "FOR_PIPELINES"])
def test_a_name_that_is_gone_is_refused_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch, names: str
) -> None:
    gone = ("megatron.core.pipeline_parallel.schedules", "no_such_name", None)
    monkeypatch.setattr(megatron_cpu, names, (*getattr(megatron_cpu, names), gone))
    if names == "FOR_PIPELINES":
        megatron_cpu.apply()
    with pytest.raises(RuntimeError, match="no_such_name is gone"):
        megatron_cpu.apply(pipelines=True)


def test_the_shims_have_the_signatures_they_replace() -> None:
    for module, name, ours in megatron_cpu.PATCHED:
        theirs = operator.attrgetter(name)(importlib.import_module(module))
        names = [list(inspect.signature(function).parameters) for function in (theirs, ours)]
        assert names[0] == names[1], name


@pytest.fixture
def tracker() -> Any:
    """megatron-core's own, on the CPU."""
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    megatron_cpu.apply()
    return random.CudaRNGStatesTracker()


def test_a_named_state_goes_on_by_itself(tracker: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert not tracker.is_initialized()
    tracker.add("model-parallel-rng", 7)
    assert tracker.is_initialized()
    torch.manual_seed(1)
    outside = torch.rand(3)
    torch.manual_seed(1)
    with tracker.fork():
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), outside)
    with tracker.fork():
        second = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(6), torch.cat([first, second]))
    assert caplog.text == ""


def test_saved_states_can_be_set_again(tracker: Any) -> None:
    tracker.add("model-parallel-rng", 7)
    saved = tracker.get_states()
    with tracker.fork():
        first = torch.rand(3)
    tracker.set_states(saved)
    with tracker.fork():
        assert torch.equal(torch.rand(3), first)
