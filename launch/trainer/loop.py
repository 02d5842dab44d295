"""The training loop: set up, iterate, measure, report."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import Point
from launch.trainer import log
from launch.trainer.checkpoint import load_checkpoint, save_checkpoint
from launch.trainer.clock import PeakMemory, PhaseClock, reserved_peak_gib
from launch.trainer.data import MicroBatch, MicroBatches, build_samples
from launch.trainer.digest import state_digests
from launch.trainer.metrics import MetricsFile, evaluation_fields, iteration_fields
from launch.trainer.model import (
    ParallelState,
    build_model,
    causal_mask,
    initialize_engine,
    num_local_parameters,
)
from launch.trainer.ranks import Ranks
from launch.trainer.runfile import RunFile
from launch.trainer.runtime import (
    distributed,
    plugin_installed,
    spare_garbage_collector,
    versions,
)
from launch.trainer.scalars import Scalars, scalars_of_run
from launch.trainer.schedule import evaluates_after, saves_after


@dataclass(frozen=True)
class Trainer:
    """Everything an iteration touches on this rank."""

    run: RunFile
    ranks: Ranks
    device: torch.device
    mpu: ParallelState
    engine: Any
    batches: MicroBatches
    validation: MicroBatches
    mask: Tensor | None

    @property
    def point(self) -> Point:
        """What is trained."""
        return self.run.point


def train(run: RunFile, ranks: Ranks) -> None:
    """Train a point from the first iteration, or from a checkpoint's, to the last.

    A loss or gradient that is not finite is reported and does not stop the run.

    Raises:
        ConfigError: the user has to mend something.
    """
    started = time.perf_counter()
    log.write_only_whole_lines()
    with (
        MetricsFile(run.metrics_path if ranks.is_first else None) as metrics,
        scalars_of_run(run, ranks.is_first, os.environ) as scalars,
        distributed(run.point, ranks) as device,
    ):
        trainer = _set_up(run, ranks, device)
        metrics.write("start", _start_fields(trainer))
        _iterate(trainer, _begin(trainer), metrics, scalars)
        weights, optimizer_state = state_digests(trainer.engine)
        metrics.write(
            "end",
            {
                "iterations": run.point.iterations,
                "seconds": time.perf_counter() - started,
                "weights_sha256": weights,
                "optimizer_sha256": optimizer_state,
                "reserved_peak_gib": reserved_peak_gib(),
            },
        )


def _set_up(run: RunFile, ranks: Ranks, device: torch.device) -> Trainer:
    point = run.point
    if ranks.is_first:
        log.write_line(log.world_line(point))
        log.write_line(log.vocabulary_line(point))
    mpu = ParallelState()
    begin = time.perf_counter()
    with plugin_installed(run):
        model = build_model(run, mpu, device)
        if mpu.get_data_parallel_rank() == 0:
            line = log.parameters_line(mpu.get_model_parallel_rank(), num_local_parameters(model))
            log.write_line(line)
        engine = initialize_engine(run, model, mpu)
    log.write_line(log.timer_line("model-and-optimizer-setup", time.perf_counter() - begin))
    begin = time.perf_counter()
    dp_rank = mpu.get_data_parallel_rank()
    batches, validation = (
        MicroBatches(samples, point, dp_rank, device) for samples in build_samples(run)
    )
    seconds = time.perf_counter() - begin
    log.write_line(log.timer_line("train/valid/test-data-iterators-setup", seconds))
    mask = causal_mask(point, device)
    return Trainer(run, ranks, device, mpu, engine, batches, validation, mask)


def _start_fields(trainer: Trainer) -> dict[str, Any]:
    point, device = trainer.point, trainer.device
    on_cuda = device.type == "cuda"
    return {
        "engine": str(point.engine),
        "parameters": point.model.num_parameters(point.tp),
        "vocab_size": point.model.vocab_size,
        "padded_vocab_size": point.model.padded_vocab_size(point.tp),
        "device": torch.cuda.get_device_name(device) if on_cuda else "cpu",
        "versions": versions(),
        "num_ranks": point.num_ranks,
        "seed": point.seed,
        "continued_from": str(trainer.run.checkpoint.path) if trainer.run.checkpoint else None,
    }


def _begin(trainer: Trainer) -> int:
    """Take up the checkpoint, if there is one; the first iteration to do."""
    checkpoint = trainer.run.checkpoint
    if checkpoint is None:
        return 1
    load_checkpoint(trainer.run, trainer.engine, checkpoint)
    return checkpoint.iteration + 1


def _iterate(trainer: Trainer, first: int, metrics: MetricsFile, scalars: Scalars) -> None:
    point, engine = trainer.point, trainer.engine
    clock = PhaseClock(trainer.device)
    peak = PeakMemory(trainer.device)
    spare_garbage_collector()
    dist.barrier()
    last_end = time.perf_counter()
    for iteration in range(first, point.iterations + 1):
        rate = float(engine.lr_scheduler.current)
        skipped_before = engine.skipped_steps
        loss = _train_one(trainer, iteration, clock)
        result = log.IterationResult(
            iteration=iteration,
            seconds=time.perf_counter() - last_end,
            loss=loss,
            learning_rate=rate,
            skipped=engine.skipped_steps > skipped_before,
            loss_scale=float(getattr(engine.optimizer, "loss_scale", 1.0)),
        )
        last_end += result.seconds
        log.write_line(log.timer_line("interval-time", result.seconds))
        if trainer.ranks.is_last:
            log.write_line(log.iteration_line(point, result))
        if trainer.ranks.is_first:
            norm = engine.get_global_grad_norm()
            norm = None if norm is None else float(norm)
            fields = iteration_fields(point, result, clock.take(), norm, peak.take())
            metrics.write("iteration", fields)
            scalars.write(fields, point.global_batch_size * point.model.seq_length)
        else:
            clock.take()
        if evaluates_after(point, iteration) or saves_after(point, iteration):
            _evaluate_and_save(trainer, iteration, metrics, scalars)
            peak.take()
            last_end = time.perf_counter()  # none of it counts to the next iteration


def _evaluate_and_save(
    trainer: Trainer, iteration: int, metrics: MetricsFile, scalars: Scalars
) -> None:
    """What an iteration is followed by, where the point asks for it."""
    point = trainer.point
    if evaluates_after(point, iteration):
        loss = _evaluate(trainer)
        if trainer.ranks.is_last:
            log.write_line(log.evaluation_line(iteration, loss))
        fields = evaluation_fields(point, iteration, loss)
        metrics.write("evaluation", fields)
        scalars.write_evaluation(fields)
    if saves_after(point, iteration):
        path = save_checkpoint(trainer.run, trainer.engine, iteration)
        if trainer.ranks.is_first:
            log.write_line(log.checkpoint_line(iteration, path))


def _evaluate(trainer: Trainer) -> float:
    """Mean loss of the validation batches, the same ones every time and on every rank."""
    engine = trainer.engine
    # DeepSpeed's forward timers and memory lines are left to training.
    timers, engine.engine_timers.forward_timers = engine.engine_timers.forward_timers, []
    breakdown, engine._config.memory_breakdown = engine._config.memory_breakdown, False
    engine.eval()
    with torch.no_grad():
        losses = [
            _forward(trainer, batch)
            for iteration in range(1, trainer.point.eval_iterations + 1)
            for batch in trainer.validation.of_iteration(iteration)
        ]
    engine.train()
    engine.engine_timers.forward_timers = timers
    engine._config.memory_breakdown = breakdown
    return _mean(trainer, losses)


def _train_one(trainer: Trainer, iteration: int, clock: PhaseClock) -> float:
    """Run every micro-batch and the update.

    Returns:
        Loss, mean over the global batch; the same on every rank.
    """
    engine = trainer.engine
    losses: list[Tensor] = []
    for batch in trainer.batches.of_iteration(iteration):
        with clock.phase("forward"):
            loss = _forward(trainer, batch)
        with clock.phase("backward"):
            engine.backward(loss)
        with clock.phase("update"):
            # Updates after the last micro-batch alone; DeepSpeed counts them.
            engine.step()
        losses.append(loss.detach())
    return _mean(trainer, losses)


def _forward(trainer: Trainer, batch: MicroBatch) -> Tensor:
    """Loss of a micro-batch, its mean over the tokens."""
    token_losses: Tensor = trainer.engine(
        input_ids=batch.tokens,
        position_ids=batch.position_ids,
        attention_mask=trainer.mask,
        labels=batch.labels,
    )
    return token_losses.mean()


def _mean(trainer: Trainer, losses: list[Tensor]) -> float:
    """Mean over the micro-batches of every data-parallel rank."""
    total = torch.stack(losses).double().mean()
    dist.all_reduce(total, group=trainer.mpu.get_data_parallel_group())
    return total.item() / trainer.point.dp
