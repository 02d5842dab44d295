"""Programs run in the process of the test by their words; they return their exit codes."""

from collections.abc import Callable, Sequence
from importlib import import_module

from configs.cli import run_command

_PROGRAMS = {
    "parse_logs": ("parse.__main__", "parse"),
    "report": ("parse.report", "parse.report"),
    "plot": ("plots.__main__", "plots"),
    "prepare": ("dataset.cli", "dataset"),
}


def __getattr__(program: str) -> Callable[[Sequence[str]], int]:
    # Whoever imports one of them imports its module then, and not the others'.
    if program not in _PROGRAMS:
        raise AttributeError(program)
    module, name = _PROGRAMS[program]
    main = import_module(module).main
    return lambda words: run_command(lambda: main(words), name=name)
