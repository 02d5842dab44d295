"""``python -m ds_config``: what a configuration of DeepSpeed says and does, and which one fits.

Exit code of ``explain`` 0: DeepSpeed and the plugin would take it, if need be from a framework that
fills ``auto`` in; 1: one would not, a key does nothing, or a choice is left; 2: no configuration.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from configs.cli import Parser, add_json, add_machine, complain, count, run_command, say
from configs.errors import ConfigError
from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.predict.machine import load_machine, machine_names
from ds_config.advise import add_model, add_options, advise, model_of
from ds_config.auto import FRAMEWORKS
from ds_config.costs import Costs, costs_of
from ds_config.document import Document, read_config, write_new
from ds_config.explain import as_json, as_text, explain
from ds_config.mend import fixed
from ds_config.release import Answer, ask

_SHOWN_KEYS = 8


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code.

    Raises:
        ConfigError: an argument or a file is wrong.
        DeepOptimizerStatesError: a model or a machine is wrong.
    """
    given = _parser().read(argv)
    return int(given.run(given))


def _parser() -> Parser:
    parser = Parser("python -m ds_config", __doc__ or "")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    one = commands.add_parser("advise", help="the fastest configuration that fits")
    add_options(one)
    one.set_defaults(run=advise)
    one = commands.add_parser("explain", help="what every key means, costs and does")
    one.add_argument("file", type=Path, metavar="FILE", help="the configuration")
    add_model(one)
    add_machine(one, f"for the time of the model: {', '.join(machine_names())}")
    tokens = "tokens a sample [default: the model's]"
    one.add_argument("--sequence-length", type=count, default=0, metavar="N", help=tokens)
    ranks = "data-parallel ranks, to check batches and to count memory"
    one.add_argument("--ranks", type=count, metavar="N", help=ranks)
    who = "who hands it to DeepSpeed and fills auto in; every case is told without"
    one.add_argument("--framework", choices=FRAMEWORKS, default="", help=who)
    add_json(one)
    one.add_argument("--fix", action="store_true", help="write a corrected copy beside FILE")
    one.set_defaults(run=_explain)
    return parser


def _explain(given: argparse.Namespace) -> int:
    document = read_config(given.file)
    answer = ask(document.table)
    found = explain(document.table, answer, given.ranks, given.framework)
    if not document.table:
        raise ConfigError(f"{document.source}: is empty: give DeepSpeed's configuration")
    if not found.keys:
        has = ", ".join(list(document.table)[:_SHOWN_KEYS])
        reason = f"has no key of DeepSpeed at its top, but {has}: give DeepSpeed's block alone"
        raise ConfigError(f"{document.source}: {reason}")
    fix = _fix(given, document, answer) if given.fix else []
    found.costs = _costs(given, document)
    found.faults[:0] = document.faults
    found.warnings[:0] = document.warnings
    say((as_json if given.json else as_text)(document.source, found))
    if fix:
        complain("\n".join(f"--fix: {line}" for line in fix))
    return 0 if found.is_accepted else 1


def _costs(given: argparse.Namespace, document: Document) -> Costs | None:
    if not given.model:
        if given.machine or given.sequence_length:
            raise ConfigError("--machine and --sequence-length go with --model or --config")
        return None
    machine = load_machine(given.machine) if given.machine else None
    ranks = given.ranks or 1
    return costs_of(document.table, model_of(given.model), ranks, machine, given.sequence_length)


def _fix(given: argparse.Namespace, document: Document, answer: Answer) -> list[str]:
    """Write the corrected copy, and return what was changed, where it is and what is left in it."""
    result, changes = fixed(document.table, answer, given.framework)
    changes = document.changes + changes
    choices = [f"left to you: {choice}" for choice in document.choices]
    if not changes:
        return [*choices, "nothing to mend"]
    copy = given.file.with_name(f"{given.file.stem}.fixed.json")
    write_new(copy, json.dumps(result, indent=2) + "\n", "--fix")
    found = explain(result, ask(result), given.ranks, given.framework)
    chosen = {note.key for note in document.faults}
    left = [f"left to you: {n.sentence}" for n in found.faults if n.key not in chosen]
    left = [*choices, *left] or ["no fault is left in it"]
    return [*changes, str(copy), *left]


if __name__ == "__main__":
    raise SystemExit(run_command(main, DeepOptimizerStatesError))
