"""Where optimizer state lives, and who waits before looking at it. See ``zero3`` for the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor

from deep_optimizer_states.config import Settings
from deep_optimizer_states.cores import LaneCores, choose_cores, find_place
from deep_optimizer_states.device.base import Device
from deep_optimizer_states.executor import Executor
from deep_optimizer_states.memory import (
    check_host_memory,
    free_host_bytes,
    local_ranks,
)
from deep_optimizer_states.zero3_gate import GatedGathers

_MOMENTS = ("exp_avg", "exp_avg_sq")


class StateHomes(GatedGathers):
    """ZeRO-3 whose optimizer state lives in memory of the lanes' device.

    Whatever of DeepSpeed reads, writes or saves state waits for an update in flight (see ``gate``).

    Args:
        lanes: Whose memory it is.
        args, kwargs: As DeepSpeed passes them to its own class.
    """

    _settings: Settings
    _cores: LaneCores
    _executor: Executor

    def __init__(self, lanes: Device, *args: Any, **kwargs: Any) -> None:
        self._masters: list[Tensor] = []
        self._homes: list[dict[str, Tensor]] = []
        super().__init__(lanes, *args, **kwargs)

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """Master weights by subgroup. Whoever looks at them sees the finished update."""
        self._finish_update()
        return self._masters

    @fp32_partitioned_groups_flat.setter
    def fp32_partitioned_groups_flat(self, masters: list[Tensor]) -> None:
        self._masters = masters

    @property
    def state(self) -> Any:
        """Moments by master weight. Whoever looks at them sees the finished update."""
        self._finish_update()
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def _create_fp32_partitions(self) -> None:
        resident = self._schedule.resident_subgroups
        host_numel = sum(n for i, n in enumerate(self._subgroup_numels) if i not in resident)
        staging_bytes = 2 * self._schedule.staging_numel * self.dtype.itemsize
        # Gradients of resident subgroups too: one buffer holds them all.
        grad_bytes = sum(self._subgroup_numels) * self.gradient_accumulation_dtype.itemsize
        grad_bytes *= 1 + self._holds_partial_grads
        free_bytes = self._settings.host_memory_bytes or free_host_bytes()
        # Or a rank that comes late counts what another has taken already.
        dist.barrier(group=self.dp_process_group)
        check_host_memory(host_numel, staging_bytes + grad_bytes, free_bytes, local_ranks())
        self._cores = self._choose_cores()
        self._lanes.near = self._cores  # all memory is taken below
        super()._create_fp32_partitions()
        for idx, master in enumerate(self.fp32_partitioned_groups_flat):
            # The tensor object is the key of the optimizer's state, so only its storage moves.
            master.data = self._home_of(idx, master.data)

    def initialize_optimizer_states(self) -> None:
        """Create the moments where they live; no fp32 gradients."""
        for idx, master in enumerate(self.fp32_partitioned_groups_flat):
            zeros = [self._home_of(idx, torch.zeros_like(master.data)) for _ in _MOMENTS]
            self._homes.append(dict(zip(_MOMENTS, zeros, strict=True)))
            self.optimizer.state[master] = {"step": 0, **self._homes[idx]}
            if idx in self._schedule.resident_subgroups:
                grads = self._lanes.empty_device(master.numel(), self.gradient_accumulation_dtype)
                self._device_grads[idx] = grads.zero_()

    def _home_of(self, subgroup: int, source: Tensor) -> Tensor:
        if subgroup in self._schedule.resident_subgroups:
            return self._lanes.empty_device(source.numel(), source.dtype).copy_(source)
        return self._lanes.host_home(source)

    def _rigid_load_state_dict(
        self, state_dict: dict[str, Any], load_optimizer_states: bool = True
    ) -> None:
        with self._loading(is_whole=load_optimizer_states):
            super()._rigid_load_state_dict(state_dict, load_optimizer_states)

    def load_hp_checkpoint_state_from_checkpoint_dir_stage3(self, checkpoint_dir: str) -> None:
        """Load a universal checkpoint; what it replaced goes back to where it lives."""
        with self._loading(is_whole=True):
            super().load_hp_checkpoint_state_from_checkpoint_dir_stage3(checkpoint_dir)

    @contextlib.contextmanager
    def _loading(self, is_whole: bool) -> Iterator[None]:
        """Replace the state, after an update that failed too.

        Args:
            is_whole: Whether moments are loaded as well, so that nothing is left of the failure.
        """
        with self.overlooking_failure():
            if self._background.has_failed:
                self._forget_update()
            what = "loading a checkpoint"
            with self._background.under_way(what), self._background.changing(what):
                yield
                self._return_home()
            if is_whole:
                self._background.forget_failure()

    def _forget_update(self) -> None:
        """Make lanes and buffers ready again after an update that failed."""
        self._lanes.forget_failure()
        self._executor.reset()
        self._grad_events.clear()
        self._pending.clear()

    def _return_home(self) -> None:
        """Copy loaded moments into the tensors that held them before loading.

        torch's ``load_state_dict`` puts its own tensors in place of ours; a checkpoint from before
        the first step has none.
        """
        for master, home in zip(self.fp32_partitioned_groups_flat, self._homes, strict=True):
            loaded = self.optimizer.state.setdefault(master, {})
            for key in _MOMENTS:
                if key not in loaded:
                    home[key].zero_()
                elif loaded[key] is not home[key]:
                    home[key].copy_(loaded[key])
                loaded[key] = home[key]
            loaded["step"] = int(loaded.get("step", 0))

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Stock moves buffers that may still be in use."""
        self._finish_update()
        self._drain_grads()
        super().offload_states(*args, **kwargs)

    def checkpoint_event_prologue(self) -> None:
        """Before a checkpoint is written or loaded: everything in flight arrives."""
        if not self._overlooks_failure:
            self._background.refuse_to_save()
        self._finish_update()
        super().checkpoint_event_prologue()

    def state_dict(self) -> dict[str, Any]:
        """Stock's, of finished state."""
        self._background.refuse_to_save()
        self._finish_update()
        return dict(super().state_dict())

    def refresh_fp32_params(self) -> None:
        """Stock's: master weights from the 16-bit ones."""
        self._finish_update()
        super().refresh_fp32_params()

    def _get_fp32_opt_state_partition(
        self, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> Any:
        self._finish_update()
        return super()._get_fp32_opt_state_partition(param, release_swap_buffers, optim_state_key)

    def _choose_cores(self) -> LaneCores:
        """This rank's cores; every rank must ask."""
        mine = find_place(dist.get_rank(), self._lanes.pci_address)
        everyone = [mine]
        for group in (self.dp_process_group, self.model_parallel_group):
            if group is not None:
                found: list[Any] = [None] * dist.get_world_size(group=group)
                # torch's: at DeepSpeed's, which it does not know, its comms_logger calls exit(0).
                torch.distributed.all_gather_object(found, everyone, group=group)
                everyone = list({place.rank: place for part in found for place in part}.values())
        chosen = self._settings
        return choose_cores(mine, everyone, chosen.host_threads, chosen.bind_cores)
