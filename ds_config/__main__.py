"""``python -m ds_config explain FILE``: what a configuration of DeepSpeed says and does.

Exit code 0: DeepSpeed would take it; 1: it would not, or a key does nothing; 2: no configuration.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from configs.errors import ConfigError
from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.predict.model import load_model
from ds_config import advise, guide
from ds_config.command import CommandError, read_config, whole_number, write_beside, write_new
from ds_config.explain import explain, fixed
from ds_config.release import Note, ask
from ds_config.render import as_json, as_page, as_text


def main(argv: list[str] | None = None) -> int:
    """Run a command, and return the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except (CommandError, ConfigError, DeepOptimizerStatesError) as error:
        sys.stderr.write(f"ds_config {arguments.command}: error: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ds_config", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    advise.register(commands)
    guide.register(commands)
    one = commands.add_parser("explain", help="what every key means, costs and does")
    one.set_defaults(run=_explain)
    one.add_argument("file", metavar="FILE", help="the configuration; - for standard input")
    one.add_argument("--model", metavar="NAME|config.json", help="what `auto` values follow from")
    one.add_argument(
        "--ranks", type=whole_number, metavar="N", help="data-parallel ranks, to check batches"
    )
    one.add_argument("--json", action="store_true", help="write JSON")
    one.add_argument("--html", type=Path, metavar="PAGE", help="write a page")
    one.add_argument("--fix", action="store_true", help="write a corrected copy beside FILE")
    return parser


def _explain(arguments: argparse.Namespace) -> int:
    hidden = _hidden(arguments.model) if arguments.model else None
    loaded = read_config(arguments.file)
    found = explain(loaded.table, ask(loaded.table), hidden, arguments.ranks)
    if loaded.table and not found.keys:
        raise CommandError(f"{loaded.source}: has no key of DeepSpeed, no configuration")
    for note in loaded.notes:
        group = found.faults if "refuses" in note else found.warnings
        group.append(Note("(file)", note))
    text = as_json(loaded.source, found) if arguments.json else as_text(loaded.source, found)
    if arguments.html and not arguments.json:
        write_new(arguments.html, as_page(loaded.source, found), "--html")
        text = str(arguments.html)
    if arguments.fix:
        result, changes = fixed(loaded.table, found)
        changes += ["written as strict JSON, each key once"] if loaded.notes else []
        path = Path("standard-input.json" if arguments.file == "-" else arguments.file)
        changes.append(str(write_beside(path, result)) if changes else "nothing to mend")
        sys.stderr.write("".join(f"--fix: {change}\n" for change in changes))
    sys.stdout.write(f"{text.rstrip()}\n")
    return 0 if found.is_accepted else 1


def _hidden(model: str) -> int:
    """Return the hidden size of a shipped model or of a Hugging Face config.json.

    Raises:
        CommandError: there is none.
    """
    if not Path(model).is_file():
        try:
            return load_model(model)[0].hidden
        except DeepOptimizerStatesError as error:
            raise CommandError(f"--model: {error}; or give a config.json") from None
    try:
        table = json.loads(Path(model).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CommandError(f"--model {model}: cannot be read as JSON: {error}") from None
    table = table.get("text_config", table) if isinstance(table, dict) else {}
    for name in ("hidden_size", "n_embd", "d_model"):
        size = table.get(name)
        if isinstance(size, int) and size > 0:
            return size
    raise CommandError(f"--model {model}: has no hidden_size; give a config.json")


if __name__ == "__main__":
    sys.exit(main())
