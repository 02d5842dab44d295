"""``python -m ds_config explain FILE``: what a configuration of DeepSpeed says and does.

Exit code 0: DeepSpeed would take it; 1: it would not, or a key does nothing; 2: no configuration.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ds_config import advise, guide
from ds_config.explain import Explanation, Note, explain
from ds_config.fix import fixed, write_beside
from ds_config.loader import NoAnswerError, answers, installed
from ds_config.read import Loaded, NotAConfigError, read_config
from ds_config.releases import versions
from ds_config.render import as_json, as_page, as_text
from ds_config.rules import Setting


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code.
    """
    arguments = _parser().parse_args(argv)
    if "run" in arguments:
        return int(arguments.run(arguments))
    try:
        setting = Setting(_version(arguments.version), _hidden(arguments.model), arguments.ranks)
        loaded = read_config(arguments.file)
        found = explain(loaded.table, setting)
        if loaded.table and not found.keys:
            raise NotAConfigError(f"{loaded.source}: has no key of DeepSpeed, no configuration")
        _add_notes(found, loaded.notes)
        if found.is_accepted and installed() == setting.version:
            _ask(found, loaded.table)
        if arguments.json:
            text = as_json(loaded.source, found)
        elif arguments.html is not None:
            text = f"{_write_page(arguments.html, as_page(loaded.source, found))}\n"
        else:
            text = as_text(loaded.source, found)
        if arguments.fix:
            _fix(arguments.file, loaded, found)
    except NotAConfigError as error:
        sys.stderr.write(f"ds_config: error: {error}\n")
        return 2
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
    return 0 if found.is_accepted else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ds_config", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    advise.register(commands)
    guide.register(commands)
    one = commands.add_parser("explain", help="what every key means, costs and does")
    one.add_argument("file", metavar="FILE", help="the configuration; - for standard input")
    one.add_argument(
        "--for", dest="version", metavar="VERSION", help="a release of DeepSpeed, or `newest` "
        "[default: the installed one]",
    )  # fmt: skip
    one.add_argument("--model", metavar="NAME|config.json", help="what `auto` values follow from")
    one.add_argument(
        "--ranks", type=_ranks, metavar="N", help="data-parallel ranks, to check batches"
    )
    one.add_argument("--json", action="store_true", help="write JSON")
    one.add_argument("--html", type=Path, metavar="PAGE", help="write a page")
    one.add_argument("--fix", action="store_true", help="write a corrected copy beside FILE")
    return parser


def _ranks(text: str) -> int:
    """A number of ranks.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not text.isascii() or not text.isdigit() or not 0 < len(text) < 10 or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}': give a whole number, 1 or more")
    return int(text)


def _version(asked: str | None) -> str:
    """The release to explain for.

    Raises:
        NotAConfigError: it is not on file.
    """
    known = versions()
    asked = asked or installed() or "newest"
    asked = known[-1] if asked == "newest" else asked
    if asked not in known:
        raise NotAConfigError(f"--for {asked}: not on file; known are {known[0]} to {known[-1]}")
    return asked


def _ask(found: Explanation, table: dict[str, object]) -> None:
    """Let the installed release have the last word: some of its checks are code alone."""
    try:
        found.faults += answers(table)
    except NoAnswerError as error:
        sys.stderr.write(f"ds_config: DeepSpeed {found.version} was not asked itself: {error}\n")


def _hidden(model: str | None) -> int | None:
    """Hidden size of a shipped model or of a Hugging Face config.json.

    Raises:
        NotAConfigError: there is none.
    """
    if model is None:
        return None
    if Path(model).is_file():
        try:
            table = json.loads(Path(model).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise NotAConfigError(f"--model {model}: cannot be read as JSON: {error}") from None
        table = table.get("text_config", table) if isinstance(table, dict) else {}
        sizes = [table.get(name) for name in ("hidden_size", "n_embd", "d_model")]
        size = next((size for size in sizes if isinstance(size, int) and size > 0), None)
        if size is None:
            raise NotAConfigError(f"--model {model}: has no hidden_size; give a config.json")
        return size
    from configs.errors import ConfigError
    from configs.study import default_study

    try:
        return default_study().load_model(model)[0].hidden
    except ConfigError as error:
        raise NotAConfigError(f"--model: {error}; or give a config.json") from None


def _add_notes(found: Explanation, notes: list[str]) -> None:
    for note in notes:
        (found.faults if "refuses" in note else found.warnings).append(Note("(file)", note))


def _write_page(path: Path, text: str) -> Path:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise NotAConfigError(f"--html {path}: is already there; give another name") from None
    except OSError as error:
        raise NotAConfigError(f"--html {path}: cannot be written: {error.strerror}") from None
    return path


def _fix(file: str, loaded: Loaded, found: Explanation) -> None:
    result, changes = fixed(loaded.table, found)
    changes += ["written as strict JSON, each key once"] if loaded.notes else []
    path = Path("standard-input.json") if file == "-" else Path(file)
    if not changes:
        sys.stderr.write("--fix: nothing to mend\n")
        return
    try:
        target = write_beside(path, result)
    except OSError as error:
        raise NotAConfigError(
            f"--fix: {path.parent}: cannot be written: {error.strerror}"
        ) from None
    sys.stderr.write("".join(f"--fix: {change}\n" for change in changes) + f"--fix: {target}\n")


if __name__ == "__main__":
    sys.exit(main())
