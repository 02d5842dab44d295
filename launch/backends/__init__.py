"""Programs that train, by name. A new one is a class of :class:`protocol.Trainer` and a row."""

from __future__ import annotations

from argparse import Namespace

from configs.errors import ConfigError
from configs.study import Study
from launch.backends.megatron_deepspeed import MegatronDeepSpeed
from launch.backends.own import LightningTrainer, OwnTrainer, PipelineTrainer
from launch.backends.protocol import Trainer

TRAINERS: dict[str, type[Trainer]] = {
    trainer.name: trainer
    for trainer in (OwnTrainer, MegatronDeepSpeed, LightningTrainer, PipelineTrainer)
}
OWN_TRAINER: Trainer = OwnTrainer()


def trainer_of(given: Namespace, study: Study | None = None) -> Trainer:
    """Make the trainer that the command line asks for; else the one that all engines need.

    Raises:
        ConfigError: an option is another trainer's, or one of its own is missing or wrong.
    """
    needed = {engine.trainer for engine in study.engines.values()} if study else set()
    alone = needed.pop() if len(needed) == 1 else ""
    chosen = given.trainer or alone or OWN_TRAINER.name
    for name, trainer in TRAINERS.items():
        for flag in trainer.options.keys() - TRAINERS[chosen].options.keys():
            if getattr(given, flag.removeprefix("--").replace("-", "_")):
                raise ConfigError(f"{flag} goes with --trainer {name}")
    return TRAINERS[chosen].of(given)
