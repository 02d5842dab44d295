"""Everything of the engine that these tests break, look into or replace, imported in one place."""

# ruff: noqa: F401

from deep_optimizer_states import gate, install
from deep_optimizer_states.cores import ANYWHERE
from deep_optimizer_states.device.base import Wait
from deep_optimizer_states.device.emulated import EmulatedDevice, Faults
from deep_optimizer_states.engine_calls import own_stream_alone
from deep_optimizer_states.errors import UnsupportedDeepSpeedError, UpdateError
from deep_optimizer_states.gate import Background
from deep_optimizer_states.kernels import host as host_kernel
from deep_optimizer_states.kernels.torch_adam import make_host_adam
from deep_optimizer_states.plan import Kind
from deep_optimizer_states.state_reader import read_state
from deep_optimizer_states.timeline import read_rows
from deep_optimizer_states.zero import homes, steppers
from deep_optimizer_states.zero.homes import StateHomes
from deep_optimizer_states.zero.update import UpdatePhase
from deep_optimizer_states.zero3 import ahead, gathers
from deep_optimizer_states.zero3.homes import SubgroupHomes
from deep_optimizer_states.zero12.gradients import LateScaled
from deep_optimizer_states.zero12.homes import FlatHomes

check_device_adam = steppers.check_device_adam
"""As it is before a process puts one in its place that checks each type once."""
