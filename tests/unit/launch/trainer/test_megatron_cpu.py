import importlib
import importlib.metadata
import inspect
import operator
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from launch.trainer import megatron_cpu
from launch.trainer.megatron_cpu import verify


@pytest.fixture(autouse=True)
def _quiet_import() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core misses apex and Transformer Engine
        yield


def test_the_installed_megatron_core_is_the_one_the_shims_were_written_for() -> None:
    verify()
    version = importlib.metadata.version("megatron-core")
    assert version.rpartition(".")[0] in megatron_cpu.SUPPORTED_VERSIONS


@pytest.mark.parametrize("version", ["0.17.0", "0.1.9", "1.16.1", "0.160.1"])
def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    with pytest.raises(RuntimeError, match=rf"megatron-core {version}: .*megatron-core==0\.16\.\*"):
        verify()


def test_a_patched_name_that_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = (*megatron_cpu.PATCHED, ("megatron.core.tensor_parallel.random", "no_such_name", None))
    monkeypatch.setattr(megatron_cpu, "PATCHED", gone)
    with pytest.raises(RuntimeError, match="no_such_name is gone"):
        verify()


def test_a_name_that_only_pipelines_need_is_not_looked_for_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = ("megatron.core.pipeline_parallel.schedules", "no_such_name", None)
    monkeypatch.setattr(megatron_cpu, "FOR_PIPELINES", (gone,))
    verify()
    with pytest.raises(RuntimeError, match="no_such_name is gone"):
        verify(pipelines=True)


def test_the_shims_have_the_signatures_they_replace() -> None:
    for module, name, ours in megatron_cpu.PATCHED:
        theirs = operator.attrgetter(name)(importlib.import_module(module))
        names = [list(inspect.signature(function).parameters) for function in (theirs, ours)]
        assert names[0] == names[1], name


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """megatron-core's own, on the CPU; what is patched is put back afterwards."""
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    monkeypatch.setattr(torch.cuda, "current_device", torch.cuda.current_device)
    monkeypatch.setattr(random.CudaRNGStatesTracker, "add", random.CudaRNGStatesTracker.add)
    for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):
        monkeypatch.setattr(random, name, getattr(random, name))
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
