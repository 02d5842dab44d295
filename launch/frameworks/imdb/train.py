"""Train a point: ``python -m launch.frameworks.imdb.train RUN_JSON``, alone or by ``torchrun``.

RUN_JSON is a run folder's ``run.json``; ``ds_config.json`` lies beside it (docs/design.md).
Lightning has a loop of its own: a callback hands its iterations to the recorder of all trainers.
"""

from __future__ import annotations

import logging
import os
import resource
import time
import warnings
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from configs.errors import ConfigError
from launch.trainer.runfile import Ranks, RunFile, run_and_leave, run_program

if TYPE_CHECKING:
    import torch

    from launch.frameworks.imdb.files import TokenizedReviews
    from launch.frameworks.imdb.module import ReviewsData, SecondsPerBatch, SentimentModule

_GIB = 2.0**30


def require_reviews(prefix: Path) -> Path:
    """Return the prefix of tokenized reviews.

    Raises:
        ConfigError: they are not there.
    """
    manifest = prefix.with_name(f"{prefix.name}.manifest.json")
    if not manifest.is_file():
        raise ConfigError(f"data_prefix = {prefix}: {manifest} is missing; launch the run again")
    return prefix


def train(run: RunFile, ranks: Ranks) -> None:
    """Train, evaluate and test one point, and write down what it came to.

    Raises:
        ConfigError: the user has to mend something.
    """
    started = time.perf_counter()
    # Only now: torch, Lightning and DeepSpeed take seconds to import.
    import lightning.pytorch as pl

    from launch.frameworks.imdb import files
    from launch.frameworks.imdb.module import SecondsPerBatch
    from launch.frameworks.imdb.recording import Recording
    from launch.trainer.loop import device_name
    from launch.trainer.recorder import Recorder
    from launch.trainer.runtime import choose_device, plugin_installed, remember_cpu_info

    with Recorder(run, ranks, counts_tokens=False) as recorder, plugin_installed(run):
        device = choose_device(run.point, ranks)
        os.environ["DS_ACCELERATOR"] = device.type
        # Advice on loader processes and on what Lightning's own dependencies will rename.
        warnings.filterwarnings("ignore", module=r"(lightning|torch|deepspeed)\.")
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        if run.ds_config:
            remember_cpu_info()
        pl.seed_everything(run.point.seed, workers=True, verbose=False)
        reviews = files.read(str(run.data_prefix))
        module, data = build(run, reviews)
        timing = SecondsPerBatch()
        recording = Recording(recorder, timing)
        trainer = make_trainer(run, ranks, device.type == "cuda", [timing, recording])
        parameters = sum(param.numel() for param in module.parameters())
        recorder.sizes()
        if ranks.is_first:
            recorder.parameters(parameters)
        recorder.start(
            {
                "parameters": parameters,
                "vocab_size": reviews.vocab_size,
                "device": device_name(device),
                "reviews": reviews.source,
                "pad_id": reviews.pad_id,
            }
        )
        trainer.fit(module, data)
        trainer.test(module, data, verbose=False)
        weights, optimizer_state = recording.digests
        end = {
            "iterations": recording.iterations,
            "seconds": time.perf_counter() - started,
            "weights_sha256": weights,
            "optimizer_sha256": optimizer_state,
        }
        recorder.end({**end, **_summary(timing, module.results, trainer.strategy.root_device)})


def build(run: RunFile, reviews: TokenizedReviews) -> tuple[SentimentModule, ReviewsData]:
    """Make module and data of a point.

    Raises:
        ConfigError: the model's vocabulary is smaller than the tokenizer's.
    """
    from launch.frameworks.imdb.encoder import SentimentEncoder, Shape
    from launch.frameworks.imdb.module import ReviewsData, SentimentModule

    point, model = run.point, run.point.model
    if reviews.vocab_size > model.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {model.vocab_size}: the tokenizer knows {reviews.vocab_size} "
            f"tokens; give {reviews.vocab_size} or more"
        )
    shape = Shape(
        hidden=model.hidden,
        ffn=model.ffn,
        layers=model.layers,
        heads=model.heads,
        max_length=model.seq_length,
        dropout=point.value("dropout"),
    )
    encoder = SentimentEncoder(model.vocab_size, reviews.pad_id, shape)
    module = SentimentModule(encoder, point.lr, on_host=point.offload_optimizer != "none")
    data = ReviewsData(
        reviews,
        point.micro_batch_size,
        model.seq_length,
        workers=point.value("loader_workers"),
        seed=point.seed,
    )
    return module, data


def make_trainer(run: RunFile, ranks: Ranks, on_gpu: bool, callbacks: list[Any]) -> Any:  # noqa: ANN401
    """Make Lightning's trainer of a point: so many iterations, an evaluation after every epoch."""
    import lightning.pytorch as pl

    from launch.frameworks.imdb.module import strategy_of

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
        callbacks=callbacks,
        logger=False,
        default_root_dir=run.run_dir,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )


def _summary(
    timing: SecondsPerBatch, results: dict[str, float], device: torch.device
) -> dict[str, Any]:
    """Return what a run came to; every rank must call it.

    Memory is that of the rank that took most: the peak of CUDA's allocator and of its resident set.
    """
    import torch.distributed as dist

    from launch.frameworks.imdb.recording import allocated_peak_bytes
    from launch.trainer.recorder import finite_or_none

    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    mine = allocated_peak_bytes(device), resident
    everyone = [mine]
    if dist.is_initialized():
        everyone = everyone * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
    devices = [bytes_ / _GIB for bytes_, _ in everyone if bytes_ is not None]
    return {
        "epoch_s": fmean(timing.epochs_s) if timing.epochs_s else None,
        "batch_s": timing.seconds_per_batch,
        "device_peak_gib": max(devices, default=None),
        "device_peaks_gib": devices,
        "rank_peak_gib": max(bytes_ for _, bytes_ in everyone) / _GIB,
        **{name: finite_or_none(value) for name, value in results.items()},
        "test_error": 1.0 - results["test_accuracy"],
    }


def main(argv: list[str] | None = None) -> int:
    """Run the program in this process; 0 after a finished run, 2 when the user has to mend it."""
    return run_program(train, "launch.frameworks.imdb.train", __doc__, argv, require_reviews)


if __name__ == "__main__":
    run_and_leave(main)
