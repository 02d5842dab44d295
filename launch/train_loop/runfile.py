"""What a trainer's program is given: run folder, place among the ranks, command line.

All of it is checked before anything slow is imported.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from configs.errors import ConfigError
from configs.files import read_given_json
from configs.schema import Point
from configs.study import default_study, study_from
from launch.loggers import PACKAGES, log_to, set_wandb
from launch.train_loop.checkpoint import Checkpoint, find_checkpoint

SCHEMA_VERSION = 2
COMPRESSION = "optimus_cc"
"""Key of ``ds_config.json`` that holds what is compressed."""
ERROR = "pretrain_gpt: error: "
"""Begins the line that tells the user what to mend; the launcher looks for it."""
DEFAULTS = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
"""Variables of a run's place, with their values for a process that is alone, on any free port."""


@dataclass(frozen=True)
class RunFile:
    """What one run needs to know, as its run folder says it; all that it writes goes there."""

    run_dir: Path
    point: Point
    ds_config: dict[str, Any]
    data_prefix: Path
    metrics_path: Path
    data_facts: Any = None
    """Sizes and checksums of the data's files; None where ``run.json`` has none."""
    checkpoint: Checkpoint | None = None
    """Where training begins; None for initial weights."""
    log_to: tuple[str, ...] = ()
    """Loggers beside ``metrics.jsonl``, of :data:`launch.loggers.PACKAGES`."""

    @property
    def uses_plugin(self) -> bool:
        """Tell whether ``ds_config.json`` holds an enabled ``deep_optimizer_states`` block."""
        block = self.ds_config.get("deep_optimizer_states")
        return isinstance(block, dict) and bool(block.get("enabled", False))


def read_run_file(path: Path, continue_from: Path | None = None) -> RunFile:
    """Read ``run.json`` and the ``ds_config.json`` beside it, and find data and checkpoint.

    Raises:
        ConfigError: something is missing or malformed, or the folder already holds metrics of an
            earlier run.
    """
    table = read_given_json(path)
    if table.get("schema_version") != SCHEMA_VERSION:
        found = table.get("schema_version")
        raise ConfigError(f"{path}: schema_version = {found!r}: this trainer reads 2")
    for field in ("point", "data_prefix"):
        if not table.get(field):
            raise ConfigError(f"{path}: field '{field}' is missing")
    if not isinstance(table["point"], dict):
        raise ConfigError(f"{path}: field 'point' is not a table of fields")
    study = study_from(table["study"], str(path)) if table.get("study") else default_study()
    point = study.point_type.read(table["point"], f"{path}: point")
    run_dir = path.resolve().parent
    ds_config = read_given_json(run_dir / "ds_config.json")
    metrics_path = run_dir / str(table.get("metrics", "metrics.jsonl"))
    if metrics_path.exists():
        raise ConfigError(
            f"{metrics_path}: already there; a run is never overwritten, start it in a new folder"
        )
    prefix = Path(table["data_prefix"])
    for end in (".bin", ".idx"):
        if not prefix.with_name(prefix.name + end).is_file():
            raise ConfigError(
                f"data_prefix = {prefix}: {prefix}{end} is missing; make it with "
                "'python -m dataset prepare' or give another prefix"
            )
    data = (table.get("provenance") or {}).get("data")
    return RunFile(
        run_dir=run_dir,
        point=point,
        ds_config=ds_config,
        data_prefix=prefix,
        metrics_path=metrics_path,
        # Data that were moved keep their sizes and checksums.
        data_facts={end: data.get(end) for end in (".bin", ".idx")} if data else None,
        checkpoint=None if continue_from is None else find_checkpoint(continue_from),
    )


@dataclass(frozen=True)
class Ranks:
    """Place of this process among the run's."""

    rank: int
    local_rank: int
    """The index of the CUDA device."""
    num_ranks: int

    @property
    def is_first(self) -> bool:
        """Tell whether this is rank 0, which writes the metrics."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Tell whether this rank writes the line of an iteration, as Megatron's last one does."""
        return self.rank == self.num_ranks - 1

    def require(self, point: Point) -> None:
        """Check that as many processes run as the point asks for.

        Raises:
            ConfigError: more or fewer.
        """
        if self.num_ranks != point.num_ranks:
            raise ConfigError(
                f"WORLD_SIZE = {self.num_ranks}: the point needs tp {point.tp} x pp {point.pp} x "
                f"dp {point.dp} = {point.num_ranks} ranks; start it with torchrun --nproc-per-node "
                f"{point.num_ranks}"
            )

    def export(self, environment: MutableMapping[str, str]) -> None:
        """Set what torch and DeepSpeed read; without it DeepSpeed looks for MPI."""
        environment.update({**DEFAULTS, **environment})


Train = Callable[[RunFile, Ranks], None]


def ranks_from_environment(environment: Mapping[str, str]) -> Ranks:
    """Read the variables of :data:`DEFAULTS`.

    Raises:
        ConfigError: a value is not a number, or there are several ranks and no meeting point.
    """

    def number(name: str) -> int:
        text = environment.get(name, DEFAULTS[name])
        try:
            return int(text)
        except ValueError:
            raise ConfigError(f"{name} = {text!r}: not a number") from None

    rank, num_ranks = number("RANK"), number("WORLD_SIZE")
    if not 0 <= rank < num_ranks:
        raise ConfigError(f"RANK = {rank}: must lie between 0 and WORLD_SIZE {num_ranks} - 1")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if num_ranks > 1 and name not in environment:
            raise ConfigError(f"{name} is not set, but WORLD_SIZE = {num_ranks}: use torchrun")
    return Ranks(rank, number("LOCAL_RANK"), num_ranks)


def run_program(train: Train, description: str | None, argv: list[str] | None = None) -> int:
    """Read what a trainer is given on its command line, and train as one of the run's ranks.

    ``train`` imports torch, megatron-core and DeepSpeed, which takes seconds, when it is called.

    Returns:
        Exit code: 0 after a finished run, 2 when the user has to mend something.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("run_json", type=Path, help="run.json of a run folder")
    parser.add_argument("--continue-from", type=Path, help="folder of the checkpoint to begin at")
    parser.add_argument("--log-to", default="", type=log_to, help=f"of {', '.join(PACKAGES)}")
    arguments = parser.parse_args(argv)
    try:
        run = read_run_file(arguments.run_json, arguments.continue_from)
        run = replace(run, log_to=tuple(filter(None, arguments.log_to.split(","))))
        ranks = ranks_from_environment(os.environ)
        ranks.require(run.point)
        ranks.export(os.environ)
        set_wandb(run.log_to, run.run_dir, os.environ)
        train(run, ranks)
    except ConfigError as error:
        # Every rank meets the same cause; one line of it is enough.
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"{ERROR}{error}\n")
        return 2
    return 0


def run_and_leave(train: Train, description: str | None) -> NoReturn:
    """Run a trainer's program and end its process.

    SIGUSR1 makes it write where every thread is: the launcher asks a run that hangs what it does.
    After good work the interpreter is not torn down: with gloo that now and then ends in SIGABRT,
    and torchrun would call the run failed.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=True, chain=False)
    code = run_program(train, description)
    if code == 0:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    sys.exit(code)
