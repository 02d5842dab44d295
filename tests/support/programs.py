"""Programs run in the process of the test by their words; they return their exit codes."""

from collections.abc import Callable, Sequence
from importlib import import_module

from configs.cli import run_command


def _program(module: str, name: str) -> Callable[[Sequence[str]], int]:
    return lambda words: run_command(lambda: import_module(module).main(words), name=name)


parse_logs = _program("parse.__main__", "parse")
report = _program("parse.report", "parse.report")
plot = _program("plots.__main__", "plots")
prepare = _program("dataset.cli", "dataset")
