"""Train a point: ``python -m launch.frameworks.imdb.train RUN_JSON``, alone or by ``torchrun``.

RUN_JSON is a run folder's ``run.json``; ``ds_config.json`` lies beside it (docs/design.md).
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from launch.trainer.program import answer_when_asked, leave, run_program
from launch.trainer.ranks import Ranks
from launch.trainer.runfile import RunFile
from launch.trainer.scalars import TENSORBOARD_VARIABLE, WANDB_VARIABLE


def require_reviews(prefix: Path) -> Path:
    """The prefix of tokenized reviews that are there.

    Raises:
        ConfigError: they are not.
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
    import torch

    from launch.frameworks.imdb import files
    from launch.frameworks.imdb.recording import GradientNorm, Recorder, SecondsPerBatch, summary
    from launch.trainer.log import parameters_line, world_line, write_line
    from launch.trainer.metrics import MetricsFile

    on_gpu = _prepare(run, ranks)
    pl.seed_everything(run.point.seed, workers=True, verbose=False)
    reviews = files.read(str(run.data_prefix))
    module, data = build(run, reviews)
    timing, norm = SecondsPerBatch(), GradientNorm()
    with MetricsFile(run.metrics_path if ranks.is_first else None) as metrics:
        recorder = Recorder(run.point, metrics, timing, norm, _digests)
        loggers = loggers_of(run, os.environ)
        trainer = make_trainer(run, ranks, on_gpu, [timing, norm, recorder], loggers)
        parameters = sum(param.numel() for param in module.parameters())
        if ranks.is_first:
            write_line(world_line(run.point))
            write_line(parameters_line(0, parameters))
        device = torch.cuda.get_device_name(ranks.local_rank) if on_gpu else "cpu"
        metrics.write("start", _start_fields(run, parameters, device, reviews))
        trainer.fit(module, data)
        trainer.test(module, data, verbose=False)
        found = summary(timing, module.results, trainer.strategy.root_device)
        weights, state = recorder.digests
        end = {
            "iterations": recorder.iterations,
            "seconds": time.perf_counter() - started,
            "weights_sha256": weights,
            "optimizer_sha256": state,
        }
        metrics.write("end", {**end, **found})


def build(run: RunFile, reviews: Any) -> tuple[Any, Any]:  # noqa: ANN401 - loaded late
    """Module and data of a point.

    Raises:
        ConfigError: the model's vocabulary is smaller than the tokenizer's.
    """
    from launch.frameworks.imdb.data import ReviewsData
    from launch.frameworks.imdb.encoder import SentimentEncoder, Shape
    from launch.frameworks.imdb.module import SentimentModule
    from launch.frameworks.imdb.strategies import offloads_optimizer

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
    module = SentimentModule(encoder, point.lr, on_host=offloads_optimizer(run.ds_config))
    data = ReviewsData(
        reviews,
        point.micro_batch_size,
        model.seq_length,
        workers=point.value("loader_workers"),
        seed=point.seed,
    )
    return module, data


def make_trainer(
    run: RunFile,
    ranks: Ranks,
    on_gpu: bool,
    callbacks: list[Any],
    loggers: list[Any],
) -> Any:  # noqa: ANN401 - Lightning's trainer
    """Lightning's trainer of a point: so many iterations, an evaluation after every epoch."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import LearningRateMonitor

    from launch.frameworks.imdb.strategies import strategy_of

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
        callbacks=[*callbacks, *([LearningRateMonitor()] if loggers else [])],
        logger=loggers or False,
        log_every_n_steps=1,
        default_root_dir=run.run_dir,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )


def loggers_of(run: RunFile, environment: Mapping[str, str]) -> list[Any]:
    """Lightning's loggers that the launcher asked for; ``WANDB_MODE=offline`` needs no network.

    On the other ranks Lightning's loggers write nothing.
    """
    from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger

    found: list[Any] = []
    if environment.get(TENSORBOARD_VARIABLE):
        found.append(TensorBoardLogger(run.run_dir, name="tensorboard", version=""))
    if project := environment.get(WANDB_VARIABLE):
        name = f"{run.run_dir.parent.name}/{run.run_dir.name}"
        found.append(WandbLogger(name=name, project=project, save_dir=run.run_dir))
    return found


def _prepare(run: RunFile, ranks: Ranks) -> bool:
    """Choose the device and ready the libraries; whether it is a GPU.

    Raises:
        ConfigError: the point asks for CUDA and there is none, or the plugin refuses.
    """
    from launch.trainer.log import write_only_whole_lines
    from launch.trainer.runtime import choose_device, make_deterministic, remember_cpu_info

    write_only_whole_lines()
    device = choose_device(run.point, ranks)
    os.environ["DS_ACCELERATOR"] = device.type
    if device.type == "cuda":
        make_deterministic()
    # Advice on loader processes and on what Lightning's own dependencies will rename.
    warnings.filterwarnings("ignore", module=r"(lightning|torch|deepspeed)\.")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    if not run.ds_config:
        return device.type == "cuda"
    remember_cpu_info()
    if "deep_optimizer_states" in run.ds_config:
        _install_plugin()
    return device.type == "cuda"


def _install_plugin() -> None:
    import deep_optimizer_states as plugin

    try:
        plugin.install()
    except (plugin.ConfigError, plugin.UnsupportedDeepSpeedError, plugin.KernelError) as error:
        raise ConfigError(f"deep_optimizer_states: {error}") from None


def _digests(model: Any) -> tuple[str | None, str | None]:  # noqa: ANN401 - Lightning's
    """Fingerprints of weights and optimizer state; without DeepSpeed of the weights alone."""
    from deep_optimizer_states.state_reader import digest
    from launch.frameworks.imdb.recording import is_deepspeed
    from launch.trainer.digest import state_digests

    return state_digests(model) if is_deepspeed(model) else (digest(model.parameters()), None)


def _start_fields(
    run: RunFile,
    parameters: int,
    device: str,
    reviews: Any,  # noqa: ANN401 - loaded late
) -> dict[str, Any]:
    return {
        "engine": str(run.point.engine),
        "parameters": parameters,
        "vocab_size": reviews.vocab_size,
        "device": device,
        "num_ranks": run.point.num_ranks,
        "seed": run.point.seed,
        "reviews": reviews.source,
        "pad_id": reviews.pad_id,
    }


def main(argv: list[str] | None = None) -> int:
    """Run the program in this process; 0 after a finished run, 2 when the user has to mend it."""
    return run_program(train, "launch.frameworks.imdb.train", __doc__, argv, require_reviews)


if __name__ == "__main__":
    answer_when_asked()
    leave(main())
