"""DeepSpeed asked in the process of the test, which has imported it: a process takes seconds."""

import json

import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig

from configs.cli import run_command
from deep_optimizer_states.errors import DeepOptimizerStatesError
from ds_config import installed
from ds_config.__main__ import main
from ds_config.explain import explain
from ds_config.release import read_answer, without_auto

VERSION = deepspeed.__version__.partition("+")[0].strip()


def ask(table):
    """Return what ``ds_config.release.ask`` returns."""
    found = installed.answer(without_auto(table), table)
    return read_answer(VERSION, json.loads(json.dumps(found)))


def refuses(table):
    """Tell whether DeepSpeed's own loader raises for a configuration."""
    try:
        DeepSpeedConfig(without_auto(table))
    except Exception:  # noqa: BLE001 - whatever it raises
        return True
    return False


def told(table, **more):
    """Explain a configuration by what DeepSpeed says of it."""
    return explain(table, ask(table), **more)


def explain_or_advise(words):
    """The exit code of ``python -m ds_config`` with these words."""
    return run_command(lambda: main([*map(str, words)]), DeepOptimizerStatesError)
