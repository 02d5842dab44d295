"""Keeps the start of a process short: what DeepSpeed and megatron-core load but never use here."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def eager_imports() -> Iterator[None]:
    """Import libraries without their ``torch.compile`` decorators.

    They belong to megatron-core's fusions and to DeepSpeed's Muon, neither of which this trainer
    uses, yet decorating loads torch's compiler: about two seconds a process.
    """
    compiler = torch.compile
    torch.compile = _as_it_is
    try:
        yield
    finally:
        torch.compile = compiler


def remember_cpu_info() -> None:
    """Ask for the processor's name and flags once.

    DeepSpeed asks three times while it loads CPUAdam, and each answer starts processes for a
    second.
    """
    cpuinfo: Any = importlib.import_module("cpuinfo")
    if not hasattr(cpuinfo.get_cpu_info, "cache_info"):
        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)


def spare_garbage_collector() -> None:
    """Take everything made so far out of the garbage collector's sight.

    DeepSpeed's ``memory_breakdown`` collects garbage six times a micro-batch; going through every
    module and function each time costs a quarter of a second a collection.
    """
    gc.collect()
    gc.freeze()


def _as_it_is(model: Callable[..., Any] | None = None, **_options: object) -> Callable[..., Any]:
    return (lambda function: function) if model is None else model
