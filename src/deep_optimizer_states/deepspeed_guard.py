"""Refuse a DeepSpeed whose internals differ from those this package was checked against.

A version number says little: a patch release may rewrite a method we override. So the source of
every such method is hashed, and a difference is named.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import textwrap
from typing import Any

from deep_optimizer_states.errors import UnsupportedDeepSpeedError

CHECKED_VERSION = "0.19.8"
"""The DeepSpeed release whose methods are hashed below."""

_STAGE3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"

FINGERPRINTS: dict[str, dict[str, str]] = {
    _STAGE3: {
        "_configure_master_weights": "2e06087f5428",
        "_create_fp32_partitions": "8f0c20d2a040",
        "_finalize_offload_gradient_accumulation": "679a033b22b1",
        "_get_fp32_grad_state_partition": "9f3326d625e4",
        "_offload_grad_partition_at_boundary": "9eea82cddee2",
        "_optimizer_step": "fe3c9c581308",
        "_post_step": "d32eb3074137",
        "_pre_step": "0c1a34ee0d5a",
        "_prepare_sub_group": "35d806f141e9",
        "_reassign_or_swap_out_partitioned_parameters": "082dcb44891a",
        "_release_sub_group": "ebde3fca8c27",
        "_restore_from_bit16_weights": "1718f9402185",
        "_rigid_load_state_dict": "2b97ce59ae02",
        "_setup_for_real_optimizer": "0230b3e76976",
        "_constant_buffered_norm2": "0e40fbdf9b3d",
        "_unflatten_partitioned_parameters": "959c6cf88351",
        "complete_grad_norm_calculation_for_cpu_offload": "7dd98e51c7ca",
        "destroy": "6c7cbd9ed942",
        "finalize_gradient_accumulation_boundary": "9d0d316d73eb",
        "get_fp32_grad_partitions": "a8407290c490",
        "get_param_id": "9227fc75949f",
        "has_overflow": "4778da6df5e7",
        "initialize_optimizer_states": "7c4649dc4a9b",
        "partition_grads": "ef0ab1c41f74",
        "set_grad_positions": "023eaac7f300",
        "step": "588aaf2c337d",
        "unscale_and_clip_grads": "0fe1c92e67ff",
        "_get_norm_groups": "1b079baf0be2",
        "_overflow_check_and_loss_scale_update": "75ae5dc07e50",
        "_loss_scale_update_and_overflow_cleanup": "a1ab8e3aaf59",
        "_partition_all_parameters": "6a228b8ffd8d",
        "_get_fp32_opt_state_partition": "d5834f46b354",
        "_create_fp16_partitions_with_defragmentation": "04460e4b753d",
        "_create_fp16_sub_groups": "cc968c892505",
        "load_hp_checkpoint_state_from_checkpoint_dir_stage3": "cc48e84b25bc",
        "offload_states": "af6ca5a1a3c2",
        "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads": "84d08310e73d",
        "_DeepSpeedZeroOptimizer_Stage3__add_grad_to_ipg_bucket": "37f91bb25aa2",
    },
    "deepspeed.runtime.zero.partition_parameters:Init": {
        "_ensure_availability_of_partitioned_params": "18f20b15122b",
        "_all_gather": "22cb12fc7bf2",
    },
    "deepspeed.runtime.swap_tensor.optimizer_utils:OptimizerSwapper": {
        "parameter_id": "ee2282c2ab4e",
    },
    "deepspeed.runtime.engine:DeepSpeedEngine": {
        "_configure_zero_optimizer": "bfb60fb6e6da",
    },
    "deepspeed.runtime.config:DeepSpeedConfig": {
        "_initialize_params": "ffc2eaea488b",
    },
    "deepspeed.ops.adam:DeepSpeedCPUAdam": {
        "__init__": "35843cb98de3",
        "step": "5087412e98e7",
    },
}
"""Class -> method -> first 12 hex digits of the sha256 of its source in ``CHECKED_VERSION``."""


def check_deepspeed() -> None:
    """Compare the installed DeepSpeed's methods with those checked.

    Raises:
        UnsupportedDeepSpeedError: DeepSpeed is missing or a method differs; names them.
    """
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ImportError as error:
        raise UnsupportedDeepSpeedError(
            f"DeepSpeed cannot be imported ({error}); install deepspeed=={CHECKED_VERSION}"
        ) from error
    changed = [
        f"{path.partition(':')[2]}.{method}"
        for path, methods in FINGERPRINTS.items()
        for method, expected in methods.items()
        if fingerprint(path, method) != expected
    ]
    if changed:
        raise UnsupportedDeepSpeedError(
            f"DeepSpeed {deepspeed.__version__} differs from {CHECKED_VERSION} in "
            f"{', '.join(changed)}, which this package overrides or relies on; "
            f"install deepspeed=={CHECKED_VERSION}"
        )


def fingerprint(path: str, method: str) -> str:
    """Hash of a method's source, indentation and trailing blanks left out; empty if it is gone.

    Args:
        path: ``module:class``.
        method: Name of a method of that class.
    """
    module, _, name = path.partition(":")
    try:
        function = getattr(getattr(importlib.import_module(module), name), method)
    except (ImportError, AttributeError):
        return ""
    source = textwrap.dedent(inspect.getsource(_innermost(function)))
    lines = "\n".join(line.rstrip() for line in source.splitlines())
    return hashlib.sha256(lines.encode()).hexdigest()[:12]


def _innermost(function: Any) -> Any:  # noqa: ANN401 - a function as DeepSpeed decorates it
    """The method inside DeepSpeed's decorators, which do not say what they wrap."""
    function = inspect.unwrap(function)
    while function.__name__ == "wrapped_fn" and function.__closure__:
        names = function.__code__.co_freevars
        function = function.__closure__[names.index("func")].cell_contents
    return function
