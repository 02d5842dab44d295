"""DeepSpeed asked in the process of the test, which has imported it: a process takes seconds."""

import json

import deepspeed

from ds_config import installed
from ds_config.release import read_answer, without_auto

VERSION = deepspeed.__version__.partition("+")[0].strip()


def ask(table):
    """What ``ds_config.release.ask`` returns."""
    found = installed.answer(without_auto(table), table)
    return read_answer(VERSION, json.loads(json.dumps(found)))
