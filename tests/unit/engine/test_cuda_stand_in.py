"""The stand-in for CUDA is as strict as CUDA, and has the signatures of torch's own functions.

That it orders nothing that CUDA does not order is seen by the negative controls that run on it.
"""

import inspect
import re
from pathlib import Path

import pytest
import torch
from cuda_memory import _REPLACED, stand_in
from cuda_runtime import Event, Status, Stream

from deep_optimizer_states.core.device import cuda

GPU = torch.device("cuda", 0)
REAL = {name: getattr(torch.cuda, name) for name in _REPLACED}


@pytest.fixture
def runtime():
    with stand_in() as runtime:
        yield runtime


def parameters(function):
    found = inspect.signature(function).parameters.values()
    return [p.name for p in found if p.kind is not p.VAR_KEYWORD and p.name not in ("self", "cls")]


def test_functions_and_methods_are_torchs_own_and_all_that_the_device_uses_is_there(runtime):
    for name in _REPLACED:
        real = REAL[name]
        if inspect.isclass(real):
            real = real.__init__ if name == "device" else real.__new__
        assert parameters(getattr(runtime, name)) == parameters(real), name
    for ours, names in (
        (Stream, ("wait_event", "synchronize")),
        (Event, ("record", "wait", "query", "synchronize", "elapsed_time")),
    ):
        for name in names:
            real = getattr(REAL[ours.__name__], name)
            assert parameters(getattr(ours, name)) == parameters(real), name
    used = set(re.findall(r"torch\.cuda\.(\w+)", Path(cuda.__file__).read_text()))
    assert used
    assert used <= set(_REPLACED)


def test_host_tensors_are_refused(runtime):
    on_device = torch.ones(8, device=GPU)
    for operation in (
        lambda: on_device.add_(torch.ones(8)),
        lambda: torch.equal(on_device, torch.ones(8)),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            operation()


def test_the_book_has_cudas_own_errors(runtime):
    book, memory = torch.cuda.cudart(), torch.zeros(4096)
    address = memory.data_ptr()
    assert book.cudaHostRegister(address, 0, 0) == Status.INVALID_VALUE
    assert book.cudaHostRegister(address - address % 4096, 4096, 0) == 0
    assert book.cudaHostRegister(address, 8, 0) == Status.ALREADY_REGISTERED == 712
    with pytest.raises(torch.AcceleratorError, match="ALREADY_REGISTERED"):
        torch.ones(1, device=GPU)
    assert torch.ones(1, device=GPU).item() == 1.0, "an error is raised once"
    assert book.cudaHostUnregister(address - address % 4096) == 0
    assert book.cudaHostUnregister(address - address % 4096) == Status.NOT_REGISTERED == 713
    assert book.faults
