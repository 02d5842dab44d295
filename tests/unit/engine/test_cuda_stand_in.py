"""The stand-in for CUDA keeps CUDA's rules, and has the signatures of torch's own functions."""

import inspect
import re
import threading
from pathlib import Path

import pytest
import torch
from cuda_memory import _REPLACED, stand_in
from cuda_runtime import Event, Status, Stream
from late import late
from signals import when_within

from deep_optimizer_states.core.device import cuda

GPU = torch.device("cuda", 0)
REAL = {name: getattr(torch.cuda, name) for name in _REPLACED}


@pytest.fixture
def runtime():
    with stand_in() as runtime:
        yield runtime


@pytest.fixture
def hold(runtime):
    """Holds the current stream up until it is set."""
    release = threading.Event()
    runtime.launch(lambda: release.wait(3600))
    yield release
    release.set()


def parameters(function):
    found = inspect.signature(function).parameters.values()
    return [p.name for p in found if p.kind is not p.VAR_KEYWORD and p.name not in ("self", "cls")]


def test_functions_and_methods_are_torchs_own_and_all_that_the_device_uses_is_there(runtime):
    for name in _REPLACED:
        real = REAL[name]
        if inspect.isclass(real):
            real = real.__init__ if name == "device" else real.__new__
        assert parameters(getattr(runtime, name)) == parameters(real), name
    for ours in (Stream, Event):
        names = {n for n in vars(ours) if not n.startswith("_")} - {"put", "mark", "wait_for"}
        assert len(names) >= 5
        for name in names:
            real = getattr(REAL[ours.__name__], name)
            assert parameters(getattr(ours, name)) == parameters(real), name
    used = set(re.findall(r"torch\.cuda\.(\w+)", Path(cuda.__file__).read_text()))
    assert used
    assert used <= set(_REPLACED)


def test_the_default_stream_does_not_block_its_caller(hold):
    values = torch.empty(4, device=GPU).fill_(1.0)
    assert values.raw.isnan().all()
    hold.set()
    assert values.sum().item() == 4.0


def test_work_runs_on_the_stream_that_was_current_when_it_was_issued(hold):
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() is side
        assert torch.ones(4, device=GPU).sum().item() == 4.0, "held up by the default stream"
    assert torch.cuda.current_stream() is not side
    assert not hold.is_set()


def test_a_wait_means_the_recording_at_the_time_of_the_call(hold):
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    assert event.query()
    side.wait_event(event)
    side.synchronize()
    event.record()
    assert not event.query()
    side.wait_event(event)
    done = side.record_event()
    event.record(torch.cuda.Stream())
    event.synchronize()
    assert not done.query()
    hold.set()
    done.synchronize()


def test_times_need_events_that_keep_them_and_are_reached(hold):
    plain = torch.cuda.Event()
    one, other = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    plain.record()
    with pytest.raises(ValueError, match="must be recorded"):
        one.elapsed_time(other)
    one.record()
    other.record()
    with pytest.raises(ValueError, match="enable_timing=True"):
        one.elapsed_time(plain)
    with pytest.raises(RuntimeError, match="must be completed"):
        one.elapsed_time(other)
    hold.set()
    other.synchronize()
    assert 0 <= one.elapsed_time(other) < 1e4


@pytest.mark.parametrize("to_device", [True, False])
@pytest.mark.parametrize("non_blocking", [True, False])
@pytest.mark.parametrize("locked", [True, False])
def test_copies_return_early_only_if_they_may_and_the_host_is_page_locked(
    runtime, to_device, non_blocking, locked
):
    host, device = torch.ones(8), torch.zeros(8, device=GPU)
    if locked:
        assert torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0) == 0
    release, returns_early = threading.Event(), non_blocking and locked
    runtime.launch(release.wait)
    target, source = (device, host) if to_device else (host, device)
    with when_within("block_host", release.set):
        target.copy_(source, non_blocking=non_blocking)
    assert release.is_set() == (not returns_early)
    release.set()
    torch.cuda.synchronize()
    assert torch.equal(device.cpu(), host)
    assert host.eq(1.0 if to_device else 0.0).all()


def test_host_tensors_are_refused(runtime):
    on_device = torch.ones(8, device=GPU)
    for operation in (
        lambda: on_device.add_(torch.ones(8)),
        lambda: torch.equal(on_device, torch.ones(8)),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            operation()


@pytest.mark.parametrize("is_recorded", [True, False])
def test_freed_memory_is_reused_in_the_order_of_the_streams_it_is_known_to_be_used_on(is_recorded):
    with late() as world, stand_in(world=world):
        side = torch.cuda.Stream()
        world.late.add(side)
        values = torch.ones(8, device=GPU)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            copy = values.clone()
        if is_recorded:
            values.record_stream(side)
        view = values.narrow(0, 0, 2)
        del values
        assert view.sum().item() == 2.0, "a view keeps its memory"
        del view
        side.synchronize()
        assert bool(copy.raw.isnan().all()) == (not is_recorded)


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


def test_a_kernel_that_fails_breaks_the_device(runtime):
    event = torch.cuda.Event()
    event.record()
    event.synchronize()

    def fail():
        raise RuntimeError("an illegal memory access was encountered")

    runtime.launch(fail)
    for call in (torch.cuda.synchronize, event.query, event.synchronize, event.record):
        with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
            call()
