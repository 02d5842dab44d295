"""What steps tiles: the CPU's Adam, and the device's on its lanes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from deep_optimizer_states.device.base import Device
from deep_optimizer_states.device.emulated import EmulatedDevice, Faults
from deep_optimizer_states.device.self_check import check_device_adam
from deep_optimizer_states.errors import ConfigError
from deep_optimizer_states.kernels.calibrate_tail import find_tail
from deep_optimizer_states.kernels.host import HostAdam, Tail
from deep_optimizer_states.kernels.torch_adam import TorchAdam, make_host_adam
from deep_optimizer_states.timeline import Recorder

faults_for_tests: Faults | None = None
"""What the emulated device breaks on purpose; set by tests alone."""


@dataclass(frozen=True)
class Steppers:
    """Both Adams, which round alike.

    Attributes:
        tail: How DeepSpeed's own kernel rounds the last elements of a subgroup.
        host_adam: The CPU's kernel.
        lanes: The device.
        recorder: Where spans of their work go; None for none.
    """

    tail: Tail
    host_adam: HostAdam | TorchAdam
    lanes: Device
    recorder: Recorder | None

    @classmethod
    def open(cls, cpu_adam: Any, is_recording: bool) -> Steppers:
        """Start the lanes of the device that DeepSpeed's accelerator names.

        Args:
            cpu_adam: The ``DeepSpeedCPUAdam`` whose bits are to be repeated.
            is_recording: Whether spans are kept.

        Raises:
            ConfigError: The accelerator is neither CUDA nor the CPU.
        """
        tail, recorder = find_tail(cpu_adam), Recorder() if is_recording else None
        host_adam = make_host_adam(tail.mode)
        name = get_accelerator().device_name()
        if name == "cuda":
            from deep_optimizer_states.device.cuda import CudaDevice

            return cls(tail, host_adam, CudaDevice(tail.mode, recorder), recorder)
        if name == "cpu":
            lanes = EmulatedDevice(make_host_adam(tail.mode), faults_for_tests, recorder)
            return cls(tail, host_adam, lanes, recorder)
        raise ConfigError(f"accelerator '{name}': deep_optimizer_states runs on cuda and cpu")

    def check(self, decoupled: bool, grad_dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
        """Refuse a device with other bits, see :func:`check_device_adam`; leaves no spans."""
        dtypes = (grad_dtype, weights_dtype)
        check_device_adam(self.lanes, self.host_adam, self.tail, decoupled, dtypes)
        if self.recorder is not None:
            self.recorder.take()
