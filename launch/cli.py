"""Command lines made from the point's own fields, and what every command prints and returns."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from configs import cli
from configs.cli import Parser, count, duration
from configs.schema import MODEL_FIELDS
from configs.study import Study, default_study, load_study
from launch.backends import OWN_TRAINER, TRAINERS
from launch.ds_keys import check_study
from launch.launchers import KINDS, TORCHRUN

NOT_OF_SWEEPS = ("name", "model", "engine")
"""Fields that tell a sweep's points apart, and are no options of it."""

_OF_SWEEPS: Mapping[str, str | None] = {
    **dict.fromkeys(("--engines", "--model", "--repeats", "--trainer")),
    "--size": "auto",
}
"""Options of sweeps that decide which runs they consist of, and what they are by default."""
_BESIDE = frozenset({"--log-to"})
"""Options of trainers that change no result."""
_LEAVE_OUT = "leave it out:"
MEGATRON = {
    "--dataset-impl": f"{_LEAVE_OUT} token files are always read as mmap does",
    "--data-impl": f"{_LEAVE_OUT} token files are always read as mmap does",
    "--lr-decay-style": f"{_LEAVE_OUT} the rate always falls as half a cosine",
    "--lr-decay-iters": f"{_LEAVE_OUT} the rate falls until the last iteration",
    "--log-interval": f"{_LEAVE_OUT} every iteration is written down",
    "--distributed-backend": f"{_LEAVE_OUT} NCCL on GPUs, else gloo",
    "--tokenizer-type": f"{_LEAVE_OUT} tokens are made before, by python -m dataset",
    "--vocab-file": f"{_LEAVE_OUT} tokens are made before, by python -m dataset",
    "--merge-file": f"{_LEAVE_OUT} tokens are made before, by python -m dataset",
    "--data-path": "give --data-prefix",
    "--num-layers": "give --model.layers",
    "--hidden-size": "give --model.hidden",
    "--ffn-hidden-size": "give --model.ffn",
    "--num-attention-heads": "give --model.heads",
    "--seq-length": "give --model.seq-length",
    "--max-position-embeddings": "give --model.seq-length",
    "--train-iters": "give --iterations",
    "--eval-iters": "give --eval-iterations",
    "--lr-warmup-iters": "give --lr-warmup-iterations",
    "--tensor-model-parallel-size": "give --tp",
    "--pipeline-model-parallel-size": "give --pp",
    "--attention-dropout": f"{_LEAVE_OUT} there is no dropout",
    "--hidden-dropout": f"{_LEAVE_OUT} there is no dropout",
    "--fp16": "give --dtype fp16",
    "--bf16": "give --dtype bf16",
    "--checkpoint-activations": "give --activation-checkpointing",
    "--recompute-activations": "give --activation-checkpointing",
    "--save": "give --save-interval: a run's folder has its checkpoints",
    "--load": "give --continue-from",
}
"""Options of Megatron's scripts, to what stands for them here."""


def add_study_option(parser: cli.Options) -> None:
    """Add ``--study``, which :func:`study_in` reads."""
    cli.add_study(parser, default_study().name)


def study_in(argv: Sequence[str]) -> Study:
    """Return the study that a command line names, or the default one; it has the points' fields.

    Raises:
        ConfigError: there is no such study, its file is wrong, or sets a key of DeepSpeed's JSON
            that nobody reads.
    """
    parser = Parser("", "", add_help=False)
    add_study_option(parser)
    name = parser.parse_known_args(argv)[0].study
    study = default_study() if name is None else load_study(name)
    check_study(study)
    return study


def add_field_options(parser: Parser, study: Study, left_out: Sequence[str] = ()) -> None:
    """Add an option for each field of a point and of its model.

    Values stay text; the schema reads and checks them, with one wording of errors for files and
    command lines. An option that the parser has already stays. A switch without a value is on.
    """
    parser.elsewhere = MEGATRON

    def add(group: argparse._ArgumentGroup, name: str, field: FieldInfo, default: str = "") -> None:
        row = study.fields.get(name)
        spellings = [name, *(row.spellings if row else ())]
        flags = [_flag(spelling) for spelling in spellings]
        switch: dict[str, Any] = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
        if flags[0] not in parser._option_string_actions:
            text = _help(field) + default
            group.add_argument(*flags, dest=name, metavar="V", help=text, **switch)

    fields = parser.add_argument_group("fields of the point (they replace those of the file)")
    for name, field in study.point_type.model_fields.items():
        default = "" if field.is_required() else f" [default {field.default!s}]"
        if name not in left_out:
            add(fields, name, field, default)
    model = parser.add_argument_group("fields of the model")
    for name, field in MODEL_FIELDS.items():
        add(model, name, field)


def field_overrides(options: argparse.Namespace, study: Study) -> dict[str, str]:
    """Return the fields that were given, as text."""
    names = [*study.point_type.model_fields, *MODEL_FIELDS]
    given = vars(options)
    return {name: given[name] for name in names if given.get(name) is not None}


@dataclass(frozen=True)
class Asked:
    """What of a command line decides of which runs a sweep consists."""

    options: list[str] = dataclasses.field(default_factory=list)
    """Words of the options, those of ``fields`` among them."""
    fields: dict[str, str] = dataclasses.field(default_factory=dict)
    """Fields of points and their values, in place of the sweep's own."""

    def as_table(self) -> dict[str, Any]:
        """Return it as ``sweep.json`` has it."""
        return dataclasses.asdict(self)


def asked(options: argparse.Namespace, study: Study) -> Asked:
    """Return what the command line of a sweep asks for in place of what the sweep's file says.

    Options that choose some of its points, or how runs are started and watched, are not among it.
    """
    over = field_overrides(options, study)
    over = {name: value for name, value in over.items() if name not in NOT_OF_SWEEPS}
    of_trainers = {flag for trainer in TRAINERS.values() for flag in trainer.options}
    given = {flag: _given(options, flag) for flag in (*_OF_SWEEPS, *sorted(of_trainers - _BESIDE))}
    given |= {_flag(name): [value] for name, value in over.items()}
    words: list[str] = []
    for flag, values in given.items():
        for value in values:  # a value may begin with a dash, as an option does
            words += [f"{flag}={value}"] if value.startswith("-") else [flag, value]
    return Asked(words, over)


def _given(options: argparse.Namespace, flag: str) -> list[str]:
    value = getattr(options, flag.removeprefix("--").replace("-", "_"))
    if value is None or _OF_SWEEPS.get(flag) == value:
        return []
    return [str(one) for one in (value if isinstance(value, list) else [value])]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def add_run_options(parser: Parser) -> None:
    """Add the options of every command that starts runs."""

    def value(flag: str, metavar: str, text: str, **more: Any) -> None:
        parser.add_argument(flag, metavar=metavar, help=text, **more)

    cli.add_results_dir(parser)
    parser.add_argument("--dry-run", action="store_true", help="show what would run, start nothing")
    seconds, or_0 = partial(duration, "seconds"), partial(duration, "seconds", least=0)
    value("--timeout", "SECONDS", "end a run that takes longer", type=seconds)
    hang = "end a run without progress for so long, 0 for never [default adapts to the run]"
    value("--hang-timeout", "SECONDS", hang, type=or_0)
    monitor = "sample memory, CPU and GPUs so often, 0 for never [default 1]"
    value("--monitor-interval", "SECONDS", monitor, type=or_0, default=1.0)
    raw = "print the log as it grows, in place of a line that tells how the run fares"
    parser.add_argument("--raw", action="store_true", help=raw)
    share = "measure beside the runs of other calls on this machine [default: take turns]"
    parser.add_argument("--share", action="store_true", help=share)
    memory = "start a run even if memory looks short"
    parser.add_argument("--no-memory-check", action="store_true", help=memory)
    _add_launch_options(parser)


def _add_launch_options(parser: Parser) -> None:
    where = parser.add_argument_group(
        "where the ranks run (results and data must lie on a file system that all hosts share)"
    )
    add = where.add_argument
    kind = "who starts them; srun on the nodes of the Slurm job we are in [default torchrun]"
    add("--launcher", choices=KINDS, default=TORCHRUN, help=kind)
    hosts = "with --launcher deepspeed: start them on these hosts: HOST slots=N"
    add("--hostfile", type=Path, metavar="FILE", help=hosts)
    add("--nnodes", type=count, metavar="N", help="use N machines, equally")
    endpoint = "where the ranks meet; with torchrun, on this machine, which is the first"
    add("--rdzv-endpoint", metavar="HOST:PORT", help=endpoint)
    trainer = parser.add_argument_group("what the ranks run")
    own = f"[default the study's only one, else {OWN_TRAINER.name}]"
    trainer.add_argument("--trainer", choices=TRAINERS, help=own)
    # Two trainers may have an option in common.
    options = {flag: known.options[flag] for known in TRAINERS.values() for flag in known.options}
    for flag, settings in options.items():
        trainer.add_argument(flag, **settings)


def _help(field: FieldInfo) -> str:
    return " ".join((field.description or "").replace("``", "").split()).replace("%", "%%")
