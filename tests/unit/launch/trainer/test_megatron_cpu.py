import importlib.metadata
import warnings
from collections.abc import Iterator

import pytest
import torch

from launch.trainer import megatron_cpu
from launch.trainer.megatron_cpu import CpuRngStatesTracker, verify


@pytest.fixture(autouse=True)
def _quiet_import() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core misses apex and Transformer Engine
        yield


def test_the_installed_megatron_core_is_the_one_the_shims_were_written_for() -> None:
    verify()
    assert importlib.metadata.version("megatron-core").startswith("0.16.")


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.17.0")
    with pytest.raises(RuntimeError, match=r"megatron-core 0\.17\.0: .*0\.16\.x"):
        verify()


def test_a_patched_name_that_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = (*megatron_cpu.PATCHED, ("megatron.core.tensor_parallel.random", "no_such_name"))
    monkeypatch.setattr(megatron_cpu, "PATCHED", gone)
    with pytest.raises(RuntimeError, match="no_such_name is gone"):
        verify()


def test_the_shims_have_the_signatures_they_replace() -> None:
    import inspect

    from megatron.core.tensor_parallel import random

    pairs = (
        (random._get_cuda_rng_state, megatron_cpu._get_rng_state),
        (random._set_cuda_rng_state, megatron_cpu._set_rng_state),
        (random.CudaRNGStatesTracker.__init__, CpuRngStatesTracker.__init__),
        (random.CudaRNGStatesTracker.add, CpuRngStatesTracker.add),
        (random.CudaRNGStatesTracker.fork, CpuRngStatesTracker.fork),
        (random.CudaRNGStatesTracker.set_states, CpuRngStatesTracker.set_states),
    )
    for theirs, ours in pairs:
        assert list(inspect.signature(theirs).parameters) == list(
            inspect.signature(ours).parameters
        )
    public = {name for name in vars(random.CudaRNGStatesTracker) if not name.startswith("_")}
    assert public <= set(dir(CpuRngStatesTracker))


def test_a_named_state_goes_on_by_itself() -> None:
    tracker = CpuRngStatesTracker()
    assert not tracker.is_initialized()
    tracker.add("model-parallel-rng", 7)
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


def test_saved_states_can_be_set_again() -> None:
    tracker = CpuRngStatesTracker()
    tracker.add("model-parallel-rng", 7)
    saved = tracker.get_states()
    with tracker.fork():
        first = torch.rand(3)
    tracker.set_states(saved)
    with tracker.fork():
        assert torch.equal(torch.rand(3), first)
