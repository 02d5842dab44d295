"""``python -m ds_config explain FILE``: what a configuration of DeepSpeed says and does.

Exit code 0: DeepSpeed would take it; 1: it would not, or a key does nothing; 2: no configuration.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.predict.model import load_model
from ds_config import advise, guide
from ds_config.explain import Explanation, explain, fixed, write_beside
from ds_config.read import Loaded, NotAConfigError, read_config
from ds_config.release import NoAnswerError, Note, ask
from ds_config.render import as_json, as_page, as_text


def main(argv: list[str] | None = None) -> int:
    """Run a command, and return the exit code."""
    arguments = _parser().parse_args(argv)
    return int(arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ds_config", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    advise.register(commands)
    guide.register(commands)
    one = commands.add_parser("explain", help="what every key means, costs and does")
    one.set_defaults(run=_explain)
    one.add_argument("file", metavar="FILE", help="the configuration; - for standard input")
    one.add_argument("--model", metavar="NAME|config.json", help="what `auto` values follow from")
    one.add_argument(
        "--ranks", type=_ranks, metavar="N", help="data-parallel ranks, to check batches"
    )
    one.add_argument("--json", action="store_true", help="write JSON")
    one.add_argument("--html", type=Path, metavar="PAGE", help="write a page")
    one.add_argument("--fix", action="store_true", help="write a corrected copy beside FILE")
    return parser


def _ranks(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < len(text) < 10 or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}': give a whole number, 1 or more")
    return int(text)


def _explain(arguments: argparse.Namespace) -> int:
    try:
        hidden = _hidden(arguments.model) if arguments.model else None
        loaded = read_config(arguments.file)
        found = explain(loaded.table, ask(loaded.table), hidden, arguments.ranks)
        if loaded.table and not found.keys:
            raise NotAConfigError(f"{loaded.source}: has no key of DeepSpeed, no configuration")
        for note in loaded.notes:
            group = found.faults if "refuses" in note else found.warnings
            group.append(Note("(file)", note))
        text = as_json(loaded.source, found) if arguments.json else as_text(loaded.source, found)
        if arguments.html and not arguments.json:
            _write_page(arguments.html, as_page(loaded.source, found))
            text = f"{arguments.html}\n"
        if arguments.fix:
            _fix(arguments.file, loaded, found)
    except (NotAConfigError, NoAnswerError) as error:
        sys.stderr.write(f"ds_config: error: {error}\n")
        return 2
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
    return 0 if found.is_accepted else 1


def _hidden(model: str) -> int:
    """Return the hidden size of a shipped model or of a Hugging Face config.json.

    Raises:
        NotAConfigError: there is none.
    """
    if not Path(model).is_file():
        try:
            return load_model(model)[0].hidden
        except DeepOptimizerStatesError as error:
            raise NotAConfigError(f"--model: {error}; or give a config.json") from None
    try:
        table = json.loads(Path(model).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise NotAConfigError(f"--model {model}: cannot be read as JSON: {error}") from None
    table = table.get("text_config", table) if isinstance(table, dict) else {}
    for name in ("hidden_size", "n_embd", "d_model"):
        size = table.get(name)
        if isinstance(size, int) and size > 0:
            return size
    raise NotAConfigError(f"--model {model}: has no hidden_size; give a config.json")


def _write_page(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise NotAConfigError(f"--html {path}: is already there; give another name") from None
    except OSError as error:
        raise NotAConfigError(f"--html {path}: cannot be written: {error.strerror}") from None


def _fix(file: str, loaded: Loaded, found: Explanation) -> None:
    result, changes = fixed(loaded.table, found)
    changes += ["written as strict JSON, each key once"] if loaded.notes else []
    if not changes:
        sys.stderr.write("--fix: nothing to mend\n")
        return
    path = Path("standard-input.json") if file == "-" else Path(file)
    try:
        target = write_beside(path, result)
    except OSError as error:
        raise NotAConfigError(
            f"--fix: {path.parent}: cannot be written: {error.strerror}"
        ) from None
    sys.stderr.write("".join(f"--fix: {change}\n" for change in changes) + f"--fix: {target}\n")


if __name__ == "__main__":
    sys.exit(main())
