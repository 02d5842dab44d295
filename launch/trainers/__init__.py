"""Trainers by name. A new one is a module with a class of :class:`protocol.Trainer`, and a row."""

from __future__ import annotations

from argparse import Namespace

from configs.errors import ConfigError
from launch.trainers.megatron_deepspeed import MegatronDeepSpeed
from launch.trainers.own import OwnTrainer
from launch.trainers.protocol import Trainer

TRAINERS: dict[str, type[Trainer]] = {
    trainer.name: trainer for trainer in (OwnTrainer, MegatronDeepSpeed)
}
OWN_TRAINER: Trainer = OwnTrainer()


def trainer_of(given: Namespace) -> Trainer:
    """The trainer that the command line asks for.

    Raises:
        ConfigError: an option is another trainer's, or one of its own is missing or wrong.
    """
    for name, trainer in TRAINERS.items():
        for flag in trainer.options if name != given.trainer else ():
            if getattr(given, flag.removeprefix("--").replace("-", "_")):
                raise ConfigError(f"{flag} goes with --trainer {name}")
    return TRAINERS[given.trainer].of(given)
