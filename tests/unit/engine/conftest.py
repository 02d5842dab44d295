"""A device for every test that needs one: the emulated one, or CUDA's on a stand-in for CUDA."""

import pytest


@pytest.fixture
def device():
    """The emulated one; it is closed when the test ends."""
    from engine_updates import ADAM

    from deep_optimizer_states.core.device.emulated import EmulatedDevice

    device = EmulatedDevice(ADAM)
    yield device
    device.close()


@pytest.fixture
def runtime():
    """The stand-in for CUDA; no page is locked or unlocked wrongly."""
    from cuda_memory import stand_in

    with stand_in() as runtime:
        yield runtime
        assert runtime.page_locks.faults == []


@pytest.fixture
def cuda_device(runtime):
    """It may be closed by the test as well; the memory is unlocked once it is."""
    from engine_updates import TAIL

    from deep_optimizer_states.core.device.cuda import CudaDevice

    device = CudaDevice(TAIL.mode)
    yield device
    device.close()
    assert runtime.page_locks.ranges == {}
