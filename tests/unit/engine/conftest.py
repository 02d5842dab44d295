"""A device for every test that needs one."""

import pytest


@pytest.fixture
def device():
    """The emulated one; it is closed when the test ends."""
    from engine_updates import ADAM

    from deep_optimizer_states.core.device.emulated import EmulatedDevice

    device = EmulatedDevice(ADAM)
    yield device
    device.close()
