"""Trains one point with Lightning, whose own loop hands its iterations to the recorder."""

from __future__ import annotations

import logging
import os
import resource
import time
import warnings
from statistics import fmean, median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateMonitor
from torch import Tensor, nn

from configs.errors import ConfigError
from deep_optimizer_states.state_reader import digest
from deep_optimizer_states.units import GIB
from launch.frameworks.imdb import reviews
from launch.frameworks.imdb.module import (
    ReviewsData,
    SentimentEncoder,
    SentimentModule,
    Shape,
    strategy_of,
)
from launch.loggers import of_lightning
from launch.train_loop.loop import Digests, PhaseClock, device_name, end_fields, state_digests
from launch.train_loop.recorder import Iteration, Recorder, finite_or_none
from launch.train_loop.runfile import Ranks, RunFile
from launch.train_loop.runtime import choose_device, plugin_installed, remember_cpu_info

_WARMUP = 2
"""First iterations that the median of the seconds per batch leaves out."""


def train(run: RunFile, ranks: Ranks) -> None:
    """Train, evaluate and test one point, and write down what it came to.

    Raises:
        ConfigError: the user has to mend something.
    """
    started = time.perf_counter()
    with Recorder(run, ranks, counts_tokens=False) as recorder, plugin_installed(run):
        device = choose_device(run.point, ranks)
        os.environ["DS_ACCELERATOR"] = device.type
        # Advice on loader processes and on what Lightning's own dependencies will rename.
        warnings.filterwarnings("ignore", module=r"(lightning|torch|deepspeed)\.")
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        if run.ds_config:
            remember_cpu_info()
        pl.seed_everything(run.point.seed, workers=True, verbose=False)
        found = reviews.read(str(run.data_prefix))
        module, data = build(run, found)
        recording = Recording(recorder)
        trainer = make_trainer(run, ranks, device.type == "cuda", recording)
        parameters = sum(param.numel() for param in module.parameters())
        recorder.sizes()
        if ranks.is_first:
            recorder.parameters(parameters)
        recorder.start(
            {
                "parameters": parameters,
                "vocab_size": found.vocab_size,
                "device": device_name(device),
                "reviews": found.source,
                "pad_id": found.pad_id,
            }
        )
        trainer.fit(module, data)
        found_in = dict(trainer.callback_metrics)
        trainer.test(module, data, verbose=False)
        found_in |= trainer.callback_metrics
        results = {name: finite_or_none(float(value)) for name, value in found_in.items()}
        recorder.event(
            "end",
            {
                **end_fields(len(recording.iterations_s), started, recording.digests),
                "epoch_s": fmean(recording.epochs_s) if recording.epochs_s else None,
                "batch_s": median(recording.iterations_s[_WARMUP:] or recording.iterations_s),
                **_memory_gib(trainer.strategy.root_device),
                **results,
                "test_error": 1.0 - float(found_in["test_accuracy"]),
            },
        )


def build(run: RunFile, found: reviews.TokenizedReviews) -> tuple[SentimentModule, ReviewsData]:
    """Make module and data of a point.

    Raises:
        ConfigError: the model's vocabulary is smaller than the tokenizer's.
    """
    point, model = run.point, run.point.model
    if found.vocab_size > model.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {model.vocab_size}: the tokenizer knows {found.vocab_size} "
            f"tokens; give {found.vocab_size} or more"
        )
    shape = Shape(
        hidden=model.hidden,
        ffn=model.ffn,
        layers=model.layers,
        heads=model.heads,
        max_length=model.seq_length,
        dropout=point.value("dropout"),
    )
    encoder = SentimentEncoder(model.vocab_size, found.pad_id, shape)
    module = SentimentModule(encoder, point.lr, on_host=point.offload_optimizer != "none")
    data = ReviewsData(
        found,
        point.micro_batch_size,
        model.seq_length,
        workers=point.value("loader_workers"),
        seed=point.seed,
    )
    return module, data


def make_trainer(run: RunFile, ranks: Ranks, on_gpu: bool, callback: pl.Callback) -> Any:
    """Make Lightning's trainer of a point: so many iterations, an evaluation after every epoch."""
    point = run.point
    local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.num_ranks))
    precision: Any = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[point.dtype]
    return pl.Trainer(
        accelerator="gpu" if on_gpu else "cpu",
        devices=local,
        num_nodes=max(1, ranks.num_ranks // local),
        strategy=strategy_of(run.ds_config, on_gpu=on_gpu, num_ranks=ranks.num_ranks),
        precision=precision,
        max_steps=point.iterations,
        max_epochs=-1,
        accumulate_grad_batches=point.accumulation,
        gradient_clip_val=point.clip_grad or None,
        callbacks=[callback, *([LearningRateMonitor("step")] if run.log_to else [])],
        logger=of_lightning(run.log_to, run.run_dir, os.environ) or False,
        log_every_n_steps=1,
        default_root_dir=run.run_dir,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )


class Recording(pl.Callback):
    """Times and records iterations and evaluations, and keeps the final state's digests.

    An iteration begins when the one before it ends, so that waiting for the loader counts; what
    lies between two epochs does not. An epoch's time is without its validation.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.iterations_s: list[float] = []
        self.epochs_s: list[float] = []
        self._clock = PhaseClock(torch.device("cpu"))
        self._begin = self._epoch_begin = 0.0
        self._losses: list[Tensor] = []
        self._rate, self._num_skipped = 0.0, 0
        self._grad_norm: float | None = None
        self.digests: Digests = (None, None)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._clock = PhaseClock(trainer.strategy.root_device)
        self._begin = self._epoch_begin = self._clock.now()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        self._clock.begin()
        self._rate = float(trainer.optimizers[0].param_groups[0]["lr"])

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        self._clock.end("forward")

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._clock.end("backward")

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: object
    ) -> None:
        # Without DeepSpeed the parameters still have their gradients now.
        if not _is_deepspeed(trainer.model):
            grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
            self._grad_norm = float(nn.utils.get_total_norm(grads))

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: object,
        batch_idx: int,
    ) -> None:
        self._clock.end("update")
        now = self._clock.now()
        if batch_idx + 1 == trainer.num_training_batches:
            self.epochs_s.append(now - self._epoch_begin)
        self._losses.append(outputs["loss"].detach().double())
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        seconds, self._begin = now - self._begin, now
        self.iterations_s.append(seconds)
        loss = _mean_over_ranks(torch.stack(self._losses).mean())
        self._losses = []
        if _is_deepspeed(trainer.model):
            norm = trainer.model.get_global_grad_norm()  # type: ignore[union-attr, operator]
            self._grad_norm = None if norm is None else float(norm)
        # DeepSpeed leaves updates out where 16-bit gradients overflow.
        skipped_before = self._num_skipped
        self._num_skipped = int(getattr(trainer.model, "skipped_steps", 0))
        self._recorder.timer("interval-time", seconds)
        self._recorder.iteration(
            Iteration(
                number=len(self.iterations_s),
                seconds=seconds,
                loss=loss,
                learning_rate=self._rate,
                skipped=self._num_skipped > skipped_before,
                grad_norm=self._grad_norm,
                phases_ms=self._clock.take(),
                device_bytes=_allocated_peak_bytes(trainer.strategy.root_device),
            )
        )

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        loss, accuracy = (
            float(trainer.callback_metrics[f"validation_{name}"]) for name in ("loss", "accuracy")
        )
        self._recorder.evaluation(len(self.iterations_s), loss, accuracy)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        model: Any = trainer.model  # Lightning takes the strategy down after this
        # Without DeepSpeed every rank has the same weights, and optimizer state is not read.
        is_engine = _is_deepspeed(model)
        self.digests = state_digests(model) if is_engine else (digest(model.parameters()), None)


def _is_deepspeed(model: object) -> bool:
    return hasattr(model, "get_global_grad_norm")


def _mean_over_ranks(value: Tensor) -> float:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(value)
        value = value / dist.get_world_size()
    return value.item()


def _allocated_peak_bytes(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _memory_gib(device: torch.device) -> dict[str, Any]:
    """Return peaks of CUDA's allocator, and of the rank with the largest resident set."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    mine = _allocated_peak_bytes(device), resident
    everyone = [mine]
    if dist.is_initialized():
        everyone = everyone * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    devices = [allocated / GIB for allocated, _ in everyone if allocated is not None]
    return {
        "device_peak_gib": max(devices, default=None),
        "rank_peak_gib": max(held for _, held in everyone) / GIB,
    }
