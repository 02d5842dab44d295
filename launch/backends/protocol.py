"""What the launcher needs to know of a trainer, and what DeepSpeed cannot run under any."""

from __future__ import annotations

import abc
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from configs.schema import Point
from deep_optimizer_states.config import BLOCK, read_settings, translate_paper_keys
from deep_optimizer_states.errors import ConfigError as PluginError
from deep_optimizer_states.predict.workload import Workload
from launch.ds_json import deepspeed_config
from launch.launchers import Program
from launch.records import RunFolder
from launch.simulate.workloads import workload_of_point


class Trainer(abc.ABC):
    """What the ranks of a run run, and what it leaves behind."""

    name: ClassVar[str]
    """What ``--trainer`` calls it."""
    options: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Options that it adds to the command line: flag to arguments of ``add_argument``. An option's
    default must count as false: any other value is refused beside another trainer."""
    own_data: ClassVar[Mapping[str, Callable[[str, bool], str | None]]] = {}
    """Data that it makes itself: what a point's ``data_prefix`` calls them, to what gives the
    absolute prefix of their ``.bin`` and ``.idx``. Data that are not there yet are made or fetched
    if its second argument is true; otherwise it returns None for them."""
    writes_metrics: ClassVar[bool] = True
    """Whether a run has a ``metrics.jsonl``."""
    end_mark: ClassVar[str] = "'end' line in metrics.jsonl"
    """What shows that a run came to its end, for the user."""

    @classmethod
    def of(cls, given: Namespace) -> Self:
        """Make it from the command line's options.

        Raises:
            ConfigError: an option is missing or wrong.
        """
        return cls()

    @property
    def versions(self) -> dict[str, str]:
        """Tell this trainer's runs from those of others."""
        return {}

    def refuse(self, point: Point) -> list[str]:
        """Say why this trainer cannot run a point, each reason with field, value and remedy.

        A trainer that has a pipeline gives reasons of its own alone.
        """
        pipeline = f"pp = {point.pp}: --trainer {self.name} has no pipeline; give pp = 1"
        return [*([pipeline] if point.pp > 1 else []), *_deepspeed_limits(point)]

    def ds_config(self, point: Point) -> dict[str, Any]:
        """Return DeepSpeed's config of a run."""
        return deepspeed_config(point)

    def workload(self, point: Point) -> Workload:
        """Say what the ranks hold, for the prediction of memory.

        Raises:
            WorkloadError: the model of memory does not know such a run; names the setting.
        """
        return workload_of_point(point)

    @abc.abstractmethod
    def program(self, point: Point, folder: Path, data_prefix: str) -> Program:
        """Return what every rank of a run in ``folder`` runs; :meth:`refuse` has no reason."""

    def environment(self, point: Point) -> dict[str, str]:
        """Return variables that it needs, over those of every run."""
        return {}

    def has_ended(self, folder: RunFolder, point: Point) -> bool:
        """Tell whether a run came to its end, whatever its exit code."""
        return folder.has_ended()


def _deepspeed_limits(point: Point) -> list[str]:
    stage, offload = point.zero_stage, point.offload_optimizer
    reasons = []
    if stage == 0 and offload != "none":
        reasons.append(
            f"zero_stage = 0: goes without offload_optimizer = '{offload}'; give "
            "offload_optimizer = 'none', or zero_stage 1 to 3"
        )
    if stage < 3 and point.offload_param != "none":
        reasons.append(
            f"offload_param = '{point.offload_param}': needs zero_stage = 3, not {stage}; give "
            "offload_param = 'none'"
        )
    ratio = point.values.get("offload_ratio", 1.0)
    if (stage < 3 or offload == "none") and ratio < 1:
        reasons.append(
            f"offload_ratio = {ratio:g}: needs zero_stage = 3 and offload_optimizer "
            "= 'cpu'; give offload_ratio = 1"
        )
    if stage == 0 and point.dtype == "bf16" and point.grad_accum_dtype == "fp32":
        reasons.append(
            "grad_accum_dtype = 'fp32': a bf16 model at zero_stage = 0 sums its gradients in "
            "bf16; give grad_accum_dtype = 'bf16', or zero_stage 1 to 3"
        )
    config = deepspeed_config(point)
    try:
        read_settings(translate_paper_keys(config))
    except PluginError as error:
        reasons.append(f"engine '{point.engine}': {error}")
    # The plugin takes the place of an optimizer that is offloaded to host memory.
    if offload != "cpu" and BLOCK in config:
        reasons.append(
            f"offload_optimizer = {offload!r}: engine '{point.engine}' needs offload_optimizer = "
            f"'cpu'; give that, or engine '{point.study.reference}'"
        )
    return reasons
