"""megatron-core's GPT under DeepSpeed, as the training loop takes it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import Point
from launch.loggers import monitor_blocks
from launch.train_loop import loop
from launch.train_loop.checkpoint import random_states, set_random_states
from launch.train_loop.data import MicroBatch, MicroBatches, build_samples
from launch.train_loop.loop import Digests, PeakMemory, PhaseClock, learning_rate, state_digests
from launch.train_loop.model import causal_mask, make_gpt, rotary_frequencies
from launch.train_loop.recorder import Iteration, Recorder
from launch.train_loop.runfile import Ranks, RunFile
from launch.train_loop.runtime import plugin_installed, spare_garbage_collector

if TYPE_CHECKING:
    from torch.optim import Optimizer

_RANDOM_STATES = "random_states"
"""Under this name DeepSpeed's file holds the generators' states of every rank."""


def train(run: RunFile, ranks: Ranks) -> None:
    """Train a point under DeepSpeed; see :func:`loop.train`."""
    loop.train(run, ranks, DeepSpeedAdapter)


class DeepSpeedAdapter(loop.Adapter):
    """A rank's engine, samples and measurements."""

    with_deepspeed = True
    packages = ("torch", "deepspeed", "megatron-core", "numpy")

    def __init__(self, run: RunFile, device: torch.device, recorder: Recorder) -> None:
        self.point, self._recorder = run.point, recorder
        begin = time.perf_counter()
        mpu = parallel_state()
        dp_rank = mpu.get_data_parallel_rank()
        with plugin_installed(run):
            model = build_model(run, mpu, device)
            if dp_rank == 0:
                count = num_local_parameters(model)
                recorder.parameters(count, mpu.get_model_parallel_rank())
            self.engine = initialize_engine(run, model, mpu)
        recorder.timer("model-and-optimizer-setup", time.perf_counter() - begin)
        begin = time.perf_counter()
        self._batches, self._validation = (
            MicroBatches(samples, run.point, dp_rank, device) for samples in build_samples(run)
        )
        recorder.timer("train/valid/test-data-iterators-setup", time.perf_counter() - begin)
        self.mask = causal_mask(run.point, device)
        self._data_parallel_group = mpu.get_data_parallel_group()
        self._clock, self._peak = PhaseClock(device), PeakMemory(device)
        if device.type == "cuda":
            note_before_resets(self._peak)
        self._last_end = 0.0
        self._copied_bytes = 0  # of the saves before the last one
        self._num_policies = 0  # written down so far
        spare_garbage_collector()

    def begin_timing(self) -> None:
        """Begin an iteration's time and peak of memory, which else begin where the last one ended.

        So evaluations and checkpoints count to no iteration, and writing an iteration down does.
        """
        self._peak.take()
        self._last_end = time.perf_counter()

    def train(self, iteration: int) -> Iteration:
        engine, clock = self.engine, self._clock
        rate, skipped_before = float(engine.lr_scheduler.current), engine.skipped_steps
        losses: list[Tensor] = []
        for batch in self._batches.of_iteration(iteration):
            clock.begin()
            loss = self.forward(batch)
            clock.end("forward")
            engine.backward(loss)
            clock.end("backward")
            # Updates after the last micro-batch alone; DeepSpeed counts them.
            engine.step()
            clock.end("update")
            losses.append(loss.detach())
        mean = self._mean(losses)
        seconds = time.perf_counter() - self._last_end
        self._last_end += seconds
        self._recorder.timer("interval-time", seconds)
        self._note_policies(iteration)
        norm = engine.get_global_grad_norm()
        if engine.monitor.enabled:  # which DeepSpeed gives rates and times, and no loss
            logged = {"train_loss": mean, "grad_norm": norm}
            events = [(f"Train/Samples/{name}", v, engine.global_samples)
                      for name, v in logged.items() if v is not None]  # fmt: skip
            engine.monitor.write_events(events)
        return Iteration(
            number=iteration,
            seconds=seconds,
            loss=mean,
            learning_rate=rate,
            skipped=engine.skipped_steps > skipped_before,
            grad_norm=None if norm is None else float(norm),
            phases_ms=clock.take(),
            device_bytes=self._peak.take(),
            loss_scale=float(getattr(engine.optimizer, "loss_scale", 1.0)),
        )

    def _note_policies(self, iteration: int) -> None:
        """Write down which policies of the plugin were chosen since it was last asked."""
        chosen = getattr(self.engine.optimizer, "chosen_policies", ())
        for update, policy, why in chosen[self._num_policies :]:
            fields = {"iteration": iteration, "update": update, "policy": policy, "why": why}
            self._recorder.event("policy", fields)
        self._num_policies = len(chosen)

    def evaluate(self) -> float:
        engine = self.engine
        # DeepSpeed's forward timers and memory lines are left to training.
        timers, engine.engine_timers.forward_timers = engine.engine_timers.forward_timers, []
        breakdown, engine._config.memory_breakdown = engine._config.memory_breakdown, False
        engine.eval()
        with torch.no_grad():
            losses = [
                self.forward(batch)
                for iteration in range(1, self.point.eval_iterations + 1)
                for batch in self._validation.of_iteration(iteration)
            ]
        engine.train()
        engine.engine_timers.forward_timers = timers
        engine._config.memory_breakdown = breakdown
        return self._mean(losses)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Return the loss of a micro-batch, its mean over the tokens."""
        token_losses: Tensor = self.engine(
            input_ids=batch.tokens,
            position_ids=batch.position_ids,
            attention_mask=self.mask,
            labels=batch.labels,
        )
        return token_losses.mean()

    def _mean(self, losses: list[Tensor]) -> float:
        total = torch.stack(losses).double().mean()
        dist.all_reduce(total, group=self._data_parallel_group)
        return total.item() / self.point.dp

    def save(self, folder: Path, when_whole: Callable[[], None]) -> bool:
        in_background = self._background_saves()
        if in_background is not None:
            self._copied_bytes += getattr(in_background.last, "copied_bytes", 0)
            in_background.when_whole = when_whole
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, random_states(self.engine.device))
        self.engine.save_checkpoint(
            str(folder.parent),
            folder.name,
            client_state={_RANDOM_STATES: states},
            save_latest=False,
        )
        return in_background is None

    def end_save(self) -> None:
        if (in_background := self._background_saves()) is not None:
            in_background.wait()
            in_background.check()

    def _background_saves(self) -> Any:
        """Return what the plugin saves with while training goes on; None where it does not."""
        return getattr(self.engine.optimizer, "checkpoints", None)

    def load(self, checkpoint: Path) -> None:
        _, state = self.engine.load_checkpoint(str(checkpoint.parent), checkpoint.name)
        set_random_states(state[_RANDOM_STATES][dist.get_rank()], self.engine.device)

    def digests(self) -> Digests:
        return state_digests(self.engine)

    def results(self) -> dict[str, Any]:
        return {"reserved_peak_gib": reserved_peak_gib(), **self._copied()}

    def _copied(self) -> dict[str, float]:
        """Return what all ranks copied for checkpoints because an update came first, in MiB."""
        in_background = self._background_saves()
        if in_background is None or in_background.last is None:
            return {}
        total = self._copied_bytes + in_background.last.copied_bytes
        copied_bytes = torch.tensor(total, device=self.engine.device)
        dist.all_reduce(copied_bytes)
        return {"checkpoint_copied_mib": copied_bytes.item() / 2**20}


def parallel_state() -> SimpleNamespace:
    """Return megatron-core's process groups under the names that DeepSpeed calls them by."""
    from megatron.core import parallel_state as groups

    names = {"data_parallel": "data_parallel"}
    # DeepSpeed's engine asks for the first name, its checkpoints for the second.
    names |= dict.fromkeys(("model_parallel", "tensor_model_parallel"), "tensor_model_parallel")
    return SimpleNamespace(
        **{
            f"get_{theirs}_{what}": getattr(groups, f"get_{ours}_{what}")
            for theirs, ours in names.items()
            for what in ("group", "rank", "world_size")
        }
    )


def build_model(run: RunFile, mpu: SimpleNamespace, device: torch.device) -> Any:
    """Make the model, under ZeRO-3 with its parameters partitioned from the start.

    There no rank ever holds more than one whole layer, so a model need not fit into one device.
    An engine whose row says ``zero_init = false`` gets the whole model, which DeepSpeed then cuts.
    """
    import deepspeed

    point = run.point
    partitioned: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if point.zero_stage == 3 and point.row.zero_init:
        partitioned = deepspeed.zero.Init(
            data_parallel_group=mpu.get_data_parallel_group(),
            # The type comes out of it: DeepSpeed up to 0.19.8 takes bf16 for any ``dtype`` that is
            # given here, fp32 too, where the device has no fp16.
            config_dict_or_path=run.ds_config,
            mpu=mpu,
        )
    with partitioned:
        model = make_gpt(point, on_cpu=device.type == "cpu")
    if point.model.architecture == "llama":
        # zero.Init gives every new float tensor the model's type; rotary frequencies need fp32.
        model.rotary_pos_emb.inv_freq = rotary_frequencies(point.model, device)
    return model


def initialize_engine(run: RunFile, model: Any, mpu: SimpleNamespace) -> Any:
    """Return DeepSpeed's engine of the model; the optimizer comes from ``ds_config.json``."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameters, optimizer = list(model.parameters()), None
    if run.point.offload_optimizer == "none" and get_accelerator().device_name() == "cpu":
        # DeepSpeed would compile a FusedAdam for CPUs, for a minute; this is its arithmetic.
        optimizer = DeepSpeedCPUAdam(parameters, **run.ds_config["optimizer"]["params"])
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=parameters,
        optimizer=optimizer,
        config={**run.ds_config, **monitor_blocks(run.log_to, run.run_dir, os.environ)},
        lr_scheduler=lambda optimizer: CosineSchedule(optimizer, run.point),
        mpu=mpu,
        dist_init_required=False,
    )
    if run.ds_config.get("compile", {}).get("deepcompile"):
        engine.compile()  # until then DeepSpeed ignores the setting
    engine.train()
    return engine


def num_local_parameters(model: torch.nn.Module) -> int:
    """Count the parameters of this tensor-parallel rank, over its data-parallel ranks."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())


class CosineSchedule:
    """Sets the optimizer's rate before the first iteration and after every update.

    It is a scheduler as DeepSpeed takes it, which calls ``step`` after an update that it did not
    skip, so a skipped iteration is repeated at the same rate. ``current`` is the coming update's.
    """

    def __init__(self, optimizer: Optimizer, point: Point) -> None:
        self._optimizer = optimizer
        self._point = point
        self._iteration = 1
        self._apply()

    @property
    def current(self) -> float:
        return learning_rate(self._point, self._iteration)

    def step(self) -> None:
        self._iteration += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self._iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._iteration = int(state["iteration"])
        self._apply()

    def _apply(self) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.current


def note_before_resets(peak: PeakMemory) -> None:
    """Read the peak before DeepSpeed's ``memory_breakdown`` resets the allocator's."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    reset = accelerator.reset_peak_memory_stats

    def note_and_reset(device_index: int | None = None) -> None:
        peak.note()
        reset(device_index)

    accelerator.reset_peak_memory_stats = note_and_reset


def reserved_peak_gib() -> float | None:
    """Return the most address space that this process has reserved; None if Linux does not say.

    A buffer counts in full as soon as it is allocated, while resident memory counts the pages that
    were written: on a CPU only this shows buckets that a small model does not fill. None with CUDA
    too, which reserves hundreds of gigabytes of addresses.
    """
    if torch.cuda.is_available():
        return None
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return None
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmPeak:")]
    return int(found[0]) / 2**20 if found else None
