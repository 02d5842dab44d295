"""What DeepSpeed, or our plugin in it, cannot run, whichever trainer calls it."""

from __future__ import annotations

from configs.schema import Point
from launch.ds_json import deepspeed_config

PLUGIN_BLOCK = "deep_optimizer_states"


def deepspeed_limits(point: Point) -> list[str]:
    """Why DeepSpeed cannot run a point, each reason with field, value and remedy."""
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
    return [*reasons, *_plugin_limits(point)]


def _plugin_limits(point: Point) -> list[str]:
    """The plugin takes the place of an optimizer that is offloaded to host memory."""
    if PLUGIN_BLOCK not in deepspeed_config(point):
        return []
    needs = {"offload_optimizer": "cpu"}
    return [
        f"{field} = {getattr(point, field)!r}: engine '{point.engine}' needs {field} = {value!r}; "
        f"give that, or engine '{point.study.reference if point.study else point.engine}'"
        for field, value in needs.items()
        if getattr(point, field) != value
    ]
