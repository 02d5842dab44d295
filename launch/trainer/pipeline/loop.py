"""The training loop of a pipeline: set up, iterate, measure, report."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from deep_optimizer_states.state_reader import digest
from launch.trainer import log
from launch.trainer.checkpoint import (
    random_states,
    require_usable,
    save_whole,
    set_random_states,
)
from launch.trainer.data import MicroBatches, build_samples
from launch.trainer.link import LinkBytes
from launch.trainer.metrics import (
    MetricsFile,
    evaluation_fields,
    finite_or_none,
    iteration_fields,
)
from launch.trainer.pipeline.errors import MessageErrors
from launch.trainer.pipeline.measured import measure
from launch.trainer.pipeline.runtime import distributed, versions
from launch.trainer.pipeline.shards import description, file_name, read_shard
from launch.trainer.pipeline.stage import Rank, make_rank, settings_of
from launch.trainer.ranks import Ranks
from launch.trainer.runfile import RunFile
from launch.trainer.scalars import Scalars, scalars_of_run
from launch.trainer.schedule import evaluates_after, learning_rate, saves_after
from optimus_cc.memory import held_bytes


class Training:
    """What a rank does from its first iteration to its last."""

    def __init__(self, run: RunFile, ranks: Ranks, device: torch.device) -> None:
        """Make the model and read the data's order; every rank calls it.

        Raises:
            ConfigError: the user has to mend something.
        """
        self.run, self.ranks, self.point = run, ranks, run.point
        if ranks.is_first:
            log.write_line(log.world_line(run.point))
            log.write_line(log.vocabulary_line(run.point))
        self.rank: Rank = make_rank(run, device)
        groups = self.rank.groups
        if groups.dp.rank() == 0:
            numel = sum(p.numel() for p in self.rank.model.parameters())
            line = log.parameters_line(groups.tp.rank(), numel, self.rank.part.index)
            log.write_line(line)
        self.batches, self.validation = (
            MicroBatches(samples, run.point, groups.dp.rank(), device)
            for samples in build_samples(run)
        )
        self.sent_bytes: Counter[str] = Counter()
        self.device_peak_bytes = 0
        self.link = LinkBytes(run.point)
        self.errors = MessageErrors.of(self.rank)
        self.validation_loss: float | None = None

    def begin(self) -> int:
        """Take up the checkpoint, if there is one; the first iteration to do."""
        checkpoint = self.run.checkpoint
        if checkpoint is None:
            return 1
        require_usable(self.run, checkpoint)
        state = read_shard(checkpoint.path / file_name(self.ranks.rank), self.rank.device)
        self.rank.load_state_dict(state["rank"])
        set_random_states(_on_host(state["random"]), self.rank.device)
        return checkpoint.iteration + 1

    def iterate(self, first: int, metrics: MetricsFile, scalars: Scalars) -> None:
        """Train from an iteration to the last."""
        point = self.point
        dist.barrier()
        for iteration in range(first, point.iterations + 1):
            self.link.begin()
            begin = time.perf_counter()
            loss, norm = self._train_one(iteration)
            measured = measure(self.rank, time.perf_counter() - begin)
            self.link.end()
            self.sent_bytes.update(measured.sent_bytes)
            result = log.IterationResult(
                iteration=iteration,
                seconds=measured.seconds,
                loss=loss,
                learning_rate=learning_rate(point, iteration),
                skipped=not math.isfinite(norm),
            )
            if self.ranks.is_last:
                log.write_line(log.iteration_line(point, result))
            peak_bytes = self._peak_bytes()
            errors = self.errors.of_iteration() if self.errors else {}
            if self.ranks.is_first:
                phases = measured.phases_ms
                fields = iteration_fields(point, result, phases, norm, peak_bytes)
                fields |= {**measured.sent_bytes, "stages_ms": measured.stages_ms, **errors}
                metrics.write("iteration", fields)
                scalars.write(fields, point.global_batch_size * point.model.seq_length)
            if evaluates_after(point, iteration):
                self.evaluate(iteration, metrics, scalars)
            if saves_after(point, iteration):
                self._save(iteration)

    def _train_one(self, iteration: int) -> tuple[float, float]:
        rank = self.rank
        rank.model.zero_grad()
        rank.traffic.reset()
        with rank.clock.phase("schedule"):
            losses = rank.run(self.batches.of_iteration(iteration))
        with rank.clock.phase("update"):
            norm = rank.optimizer.step(iteration)
        # After the norm, for which all ranks wait anyway: before, waiting for the last stage's
        # loss would look like computing.
        return rank.mean(losses), norm

    def _peak_bytes(self) -> int | None:
        if self.rank.device.type != "cuda":
            return None
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.device_peak_bytes = max(self.device_peak_bytes, peak)
        return peak

    def evaluate(self, iteration: int, metrics: MetricsFile, scalars: Scalars) -> None:
        """Mean loss of the validation batches, the same ones every time."""
        self.rank.model.eval()
        with torch.no_grad():
            count = self.point.eval_iterations
            of_batches = map(self.validation.of_iteration, range(1, count + 1))
            losses = [self.rank.mean(self.rank.run(b, forward_only=True)) for b in of_batches]
        self.rank.model.train()
        loss = sum(losses) / count
        if self.ranks.is_last:
            log.write_line(log.evaluation_line(iteration, loss))
        fields = evaluation_fields(self.point, iteration, loss)
        metrics.write("evaluation", fields)
        scalars.write_evaluation(fields)
        self.validation_loss = loss

    def _save(self, iteration: int) -> None:
        state = {
            **description(self.rank.model, self.rank.groups),
            "rank": self.rank.state_dict(),
            "random": random_states(self.rank.device),
        }
        name = file_name(self.ranks.rank)

        def write(partial: Any) -> None:  # noqa: ANN401 - pathlib.Path
            partial.mkdir(parents=True, exist_ok=True)
            torch.save(state, partial / name)
            dist.barrier()

        path = save_whole(self.run, iteration, write)
        if self.ranks.is_first:
            log.write_line(log.checkpoint_line(iteration, path))

    def results(self) -> dict[str, float | None]:
        """Numbers of the whole run: the last evaluation, what all ranks sent, and memory.

        Every rank calls it.
        """
        loss = self.validation_loss
        count = {**self.sent_bytes, **self._memory_bytes()}
        mib = {f"{name.removesuffix('_bytes')}_mib": n / 2**20 for name, n in count.items()}
        mib["counted_sent_mib"] = sum(self.sent_bytes.values()) / 2**20
        mib |= self.link.results(self.rank.device)
        errors = self.errors.of_run() if self.errors else {}
        if loss is None:
            return {**mib, **errors}
        perplexity = finite_or_none(log.perplexity(loss))
        return {
            **mib,
            **errors,
            "validation_loss": finite_or_none(loss),
            "validation_perplexity": perplexity,
        }

    def _memory_bytes(self) -> dict[str, int]:
        """Of the rank with most: what compression keeps, and the device's peak if there is one."""
        state = self.rank.compression_state()
        sizes = {"compression_state_bytes": held_bytes(state)}
        if self.rank.device.type == "cuda":
            sizes["device_peak_bytes"] = self.device_peak_bytes
        most = torch.tensor(list(sizes.values()), device=self.rank.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return dict(zip(sizes, most.tolist(), strict=True))

    def digests(self) -> tuple[str, str]:
        """Fingerprints of the weights, and of master weights and moments, of all ranks."""
        weights = [p.detach() for p in self.rank.model.parameters()]
        mine = (digest(weights), digest(self.rank.optimizer.state))
        everyone = [mine] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        first, second = (
            hashlib.sha256("\n".join(texts).encode()).hexdigest()
            for texts in zip(*everyone, strict=True)
        )
        return first, second


def train(run: RunFile, ranks: Ranks) -> None:
    """Train a point from the first iteration, or from a checkpoint's, to the last.

    Raises:
        ConfigError: the user has to mend something.
    """
    started = time.perf_counter()
    log.write_only_whole_lines()
    settings_of(run)  # what is wrong with it is said before anything slow
    with (
        MetricsFile(run.metrics_path if ranks.is_first else None) as metrics,
        scalars_of_run(run, ranks.is_first, os.environ) as scalars,
        distributed(run.point, ranks) as device,
    ):
        training = Training(run, ranks, device)
        metrics.write("start", _start_fields(training, device))
        training.iterate(training.begin(), metrics, scalars)
        weights, optimizer_state = training.digests()
        metrics.write(
            "end",
            {
                "iterations": run.point.iterations,
                "seconds": time.perf_counter() - started,
                "weights_sha256": weights,
                "optimizer_sha256": optimizer_state,
                **training.results(),
            },
        )


def _start_fields(training: Training, device: torch.device) -> dict[str, Any]:
    point = training.point
    return {
        "engine": str(point.engine),
        "parameters": point.model.num_parameters(point.tp),
        "vocab_size": point.model.vocab_size,
        "padded_vocab_size": point.model.padded_vocab_size(point.tp),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "versions": versions(),
        "num_ranks": point.num_ranks,
        "seed": point.seed,
        "continued_from": str(training.run.checkpoint.path) if training.run.checkpoint else None,
    }


def _on_host(states: dict[str, Any]) -> dict[str, Any]:
    """Generators' states are kept on the host, wherever the rest was loaded to."""
    return {
        name: _on_host(value) if isinstance(value, dict) else None if value is None else value.cpu()
        for name, value in states.items()
    }
