"""One run from the paper's flags: the logic of ``config-n-run.sh``."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from configs.cli import Parser, run_command
from configs.errors import ConfigError
from configs.schema import Point
from configs.study import default_study, make_point
from launch import cli
from launch.run import run_point


class Flag(NamedTuple):
    """One of the paper's flags, for a field of a point or, with ``model.`` before it, of its model.

    The default is what the paper's script takes; None where the flag must be given, empty where the
    others decide.
    """

    letter: str
    field: str
    default: str | None
    help: str


_ENGINE_KEYS = ("prefetch_optimizer", "part_grads_async", "prefetch_optimizer_gap")
"""Flags that together name an engine, as the paper's fork of DeepSpeed does."""
_ENGINES = {"-P 0 -A 0": "stock", "-P 0 -A 1": "all-host", "-P 1 -A 1": "stride"}
FLAGS = (
    Flag("m", "model.name", None, "model's label in billions of parameters: 7 is written 7B"),
    Flag("H", "model.hidden", None, "hidden size"),
    Flag("F", "model.ffn", None, "inner size of the feed-forward block"),
    Flag("N", "model.layers", None, "transformer layers"),
    Flag("L", "model.heads", None, "attention heads"),
    Flag("U", "model.seq_length", None, "tokens a sample"),
    Flag("S", "model.kv_heads", None, "key-value heads"),
    Flag("K", "iterations", None, "iterations"),
    Flag("T", "tp", "1", "tensor-parallel degree"),
    Flag("M", "micro_batch_size", "1", "samples a rank handles in one forward"),
    Flag("B", "global_batch_size", "1", "samples an iteration"),
    Flag("R", "offload_ratio", "1", "share of the optimizer state in host memory"),
    Flag("G", "subgroup_numel", "1000000000", "elements after which a subgroup closes"),
    Flag("P", "prefetch_optimizer", "0", "1 for the hybrid update"),
    Flag("D", "dp", "1", "data-parallel degree"),
    Flag("A", "part_grads_async", "", "1 for asynchronous gradients, which -P 1 needs"),
    Flag("O", "prefetch_optimizer_gap", "2", "stride of the hybrid update; unused without -P 1"),
    Flag("h", "hog_share", "0", "share of each device's time that another process takes"),
)


def build_parser() -> Parser:
    """Return the paper's flags, and the options of every run."""
    # -h is a flag of the paper's script.
    parser = Parser("bash config-n-run.sh", "Run one point, by the paper's flags.", add_help=False)
    parser.add_argument("--help", action="help", help="show this text and leave")
    for flag in FLAGS:
        default = "required" if flag.default is None else f"default {flag.default or 'as -P'}"
        parser.add_argument(
            f"-{flag.letter}", dest=flag.field, metavar="V", help=f"{flag.help} [{default}]"
        )
    for name, text in (
        ("data-prefix", "prefix of Megatron's .bin/.idx, embedded or oscar-1gb"),
        ("device", "auto, cpu or cuda"),
        ("seed", "seed of the weights and of the order of samples"),
    ):
        parser.add_argument(f"--{name}", metavar="V", help=text)
    cli.add_run_options(parser)
    return parser


def point_from_flags(values: Mapping[str, str | None]) -> Point:
    """Return the point that the flags describe, None where one was left out, by their fields.

    The vocabulary is GPT-2's, as in the paper.

    Raises:
        ConfigError: a flag is missing or its value is wrong.
    """
    names = ("data_prefix", "device", "seed")
    table: dict[str, Any] = {name: values[name] for name in names if values.get(name) is not None}
    model: dict[str, str] = {}
    keys: dict[str, str] = {}
    for flag in FLAGS:
        given = values.get(flag.field)
        value = flag.default if given is None else given
        if value is None:
            raise ConfigError(f"-{flag.letter} is missing ({flag.help})")
        if flag.field.startswith("model."):
            model[flag.field.removeprefix("model.")] = value
        elif flag.field in _ENGINE_KEYS and value:
            keys[flag.field] = value
        elif value:
            table[flag.field] = value
    if not re.fullmatch(r"\d+(\.\d+)?", model["name"]):
        raise ConfigError(f"-m {model['name']!r}: give billions of parameters, such as 7 or 8.3")
    model["name"] += "B"
    return make_point({**table, "model": model, **_engine_of(keys)}, source="config-n-run.sh")


def _engine_of(keys: Mapping[str, str]) -> dict[str, str]:
    """Return the engine that -P and -A name, and the stride; without -A, -P decides."""
    hybrid, flushes, stride = (keys.get(name) for name in _ENGINE_KEYS)
    flushes = hybrid if flushes is None else flushes
    engine = _ENGINES.get(f"-P {hybrid} -A {flushes}")
    if engine is None:
        known = "; ".join(f"{name}: {words}" for words, name in _ENGINES.items())
        raise ConfigError(
            f"config-n-run.sh: -P {hybrid} -A {flushes} is no engine; known are {known}"
        )
    return {"engine": engine, **({"stride": stride or ""} if hybrid == "1" else {})}


def main(argv: Sequence[str]) -> int:
    """Run the point of the flags.

    Raises:
        ConfigError: a flag is wrong or missing, or the machine is too small.
    """
    given = build_parser().read(argv)
    return run_point(point_from_flags(vars(given)), given, default_study())


if __name__ == "__main__":
    raise SystemExit(run_command(lambda: main(sys.argv[1:])))
