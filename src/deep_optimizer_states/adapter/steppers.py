"""Both Adams that step tiles, the CPU's and the device's on its lanes, with the bits of stock's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from deep_optimizer_states.adapter.stock_adam import pow_on_repeat_of_op, tail_of_op
from deep_optimizer_states.core.device.base import Device
from deep_optimizer_states.core.device.emulated import EmulatedDevice
from deep_optimizer_states.core.kernels.host import HostAdam, Tail
from deep_optimizer_states.core.verify import check_device_adam
from deep_optimizer_states.errors import ConfigError, KernelError


@dataclass(frozen=True)
class Steppers:
    """Both Adams, which round alike.

    Attributes:
        tail: How DeepSpeed's own kernel rounds the last elements of a subgroup.
        host_adam: The CPU's kernel.
        lanes: The device.
        pow_on_repeat: How DeepSpeed's own kernel counts steps, see :class:`BetaPowers`.
        state_dtypes: Types of master weights, and of moments before any checkpoint is loaded.
    """

    tail: Tail
    host_adam: HostAdam
    lanes: Device
    pow_on_repeat: bool
    state_dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32)

    @classmethod
    def open(cls, cpu_adam: Any, master_dtype: torch.dtype = torch.float32) -> Steppers:
        """Start the lanes of the device that DeepSpeed's accelerator names.

        Args:
            cpu_adam: The ``DeepSpeedCPUAdam`` whose bits are to be repeated.
            master_dtype: Of master weights.

        Raises:
            ConfigError: The accelerator is neither CUDA nor the CPU.
            KernelError: Its bits cannot be repeated.
        """
        dtypes = (master_dtype, torch.float32 if cpu_adam.fp32_optimizer_states else master_dtype)
        op, decoupled = cpu_adam.ds_opt_adam, bool(cpu_adam.adam_w_mode)
        tail, pow_on_repeat = _find_tail(op, decoupled, dtypes), pow_on_repeat_of_op(op, decoupled)
        host_adam, lanes = HostAdam(tail.mode), cls._open_lanes(tail)
        return cls(tail, host_adam, lanes, pow_on_repeat, dtypes)

    @staticmethod
    def _open_lanes(tail: Tail) -> Device:
        name = get_accelerator().device_name()
        if name == "cuda":
            from deep_optimizer_states.core.device.cuda import CudaDevice

            return CudaDevice(tail.mode)
        if name == "cpu":
            return EmulatedDevice(HostAdam(tail.mode))
        raise ConfigError(f"accelerator '{name}': deep_optimizer_states runs on cuda and cpu")

    def check(self, decoupled: bool, grad_dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
        """Refuse a device with other bits, see :func:`check_device_adam`."""
        dtypes, master_dtype = (grad_dtype, weights_dtype), self.state_dtypes[0]
        # Loading a checkpoint leaves moments in the type of the master weights.
        for state in {self.state_dtypes, (master_dtype, master_dtype)}:
            check_device_adam(self.lanes, self.host_adam, self.tail, decoupled, dtypes, state)


def _find_tail(op: Any, decoupled: bool, dtypes: tuple[torch.dtype, torch.dtype]) -> Tail:
    """Find the tail for moments of both types that a run can have: fresh, and loaded ones."""
    tail, loaded = (tail_of_op(op, decoupled, pair) for pair in (dtypes, (dtypes[0],) * 2))
    if tail != loaded:
        raise KernelError(
            f"DeepSpeedCPUAdam rounds the last elements otherwise with moments in {dtypes[1]} than "
            f"in {dtypes[0]}, which loading a checkpoint turns them into; set "
            '"optimizer.params.fp32_optimizer_states" to false'
        )
    return tail
