"""Everything of the engine that these tests break, look into or replace, imported in one place."""

# ruff: noqa: F401

from deep_optimizer_states import install, uninstall
from deep_optimizer_states.adapter import (
    flushes,
    homes,
    hooks,
    in_flight,
    launcher,
    own_stream,
    reshard,
    steppers,
)
from deep_optimizer_states.adapter.homes import StateHomes
from deep_optimizer_states.adapter.identity import stamped
from deep_optimizer_states.adapter.launcher import UpdateLauncher
from deep_optimizer_states.adapter.zero3 import gathers
from deep_optimizer_states.adapter.zero3.stock import SubgroupHomes
from deep_optimizer_states.adapter.zero12 import optimizer as zero12
from deep_optimizer_states.adapter.zero12.gradients import LateScaled
from deep_optimizer_states.adapter.zero12.stock import FlatHomes
from deep_optimizer_states.core import cache
from deep_optimizer_states.core.cache import Budget, Content, TileCache
from deep_optimizer_states.core.checkpoint import UNFINISHED, BackgroundSave
from deep_optimizer_states.core.device.base import Wait
from deep_optimizer_states.core.device.emulated import EmulatedDevice, Faults
from deep_optimizer_states.core.host import ANYWHERE, HEADROOM, HostRoom
from deep_optimizer_states.core.kernels.host import HostAdam
from deep_optimizer_states.core.plan import Kind
from deep_optimizer_states.core.update_worker import UpdateWorker
from deep_optimizer_states.core.verify import Sample
from deep_optimizer_states.errors import UnsupportedDeepSpeedError, UpdateError
from deep_optimizer_states.state_reader import read_state

check_device_adam = steppers.check_device_adam
"""As it is before a process puts one in its place that checks each type once."""


def inside(engine, name):
    """Return a private part of an engine's optimizer, such as its ``update`` or its ``lanes``."""
    return getattr(engine.optimizer, f"_{name}")
