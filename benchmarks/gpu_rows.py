"""What ``make bench-gpu`` compares: each row as a change of stock's DeepSpeed config. No torch."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STOCK = "stock"
STOCK_HOST_BYTES, OUR_HOST_BYTES = 18, 14
"""Host bytes a parameter: fp32 state, fp32 and 16-bit gradient; ours without the fp32 one."""
RESIDENT_DEVICE_BYTES = 18
"""Device bytes a parameter where nothing is offloaded: weights, gradients twice while they are
reduced, fp32 state."""
_OURS: dict[str, Any] = {"enabled": True, "just_in_time_forward": False}


@dataclass(frozen=True)
class Row:
    """One way to run the same training.

    Attributes:
        name: In tables and on the command line.
        title: What it is.
        offload: Goes into ``zero_optimization.offload_optimizer``.
        zero: Goes into ``zero_optimization``.
        block: The plugin's; None leaves DeepSpeed stock.
        config: Goes into the config's top level.
        host_bytes: A parameter in host memory, at least.
        device_bytes: A parameter on the device, at least, where it holds more than weights and
            gradients; otherwise 0.
        stale: Whether it trains on stale weights, so that its losses cannot be stock's.
        ends_update: Whether the update is over when ``step()`` returns, so that it has a time.
        on_host: Whether all state lives in host memory, which the bounds take for granted.
        zero_init: Whether the model may be partitioned while it is made; ZenFlow transposes whole
            matrices when it starts, and fails where there are none any more.
    """

    name: str
    title: str
    offload: Mapping[str, Any] = field(default_factory=dict)
    zero: Mapping[str, Any] = field(default_factory=dict)
    block: Mapping[str, Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    host_bytes: int = STOCK_HOST_BYTES
    device_bytes: int = 0
    stale: bool = False
    ends_update: bool = True
    on_host: bool = True
    zero_init: bool = True


ROWS: tuple[Row, ...] = (
    Row(STOCK, "stock ZeRO-3 offload"),
    Row(
        "all-host",
        "ours, every subgroup on the CPU",
        block={**_OURS, "policy": "all-host"},
        host_bytes=OUR_HOST_BYTES,
    ),
    Row(
        "just-in-time",
        "ours, dynamic, forward just in time",
        block={"enabled": True, "policy": "dynamic"},
        host_bytes=OUR_HOST_BYTES,
        ends_update=False,
    ),
    Row(
        "dynamic",
        "ours, dynamic split",
        block={**_OURS, "policy": "dynamic"},
        host_bytes=OUR_HOST_BYTES,
    ),
    Row(
        "stride-2",
        "the paper's stride 2",
        block={**_OURS, "policy": "stride", "stride": 2},
        host_bytes=OUR_HOST_BYTES,
    ),
    Row(
        "all-resident",
        "ours, all state on the GPU (ratio 0)",
        block={**_OURS, "policy": "ratio", "ratio": 0.0},
        host_bytes=OUR_HOST_BYTES,
        device_bytes=RESIDENT_DEVICE_BYTES,
        on_host=False,
    ),
    Row(
        "just-in-time-timer",
        "just in time, DeepSpeed's timer synchronised",
        block={"enabled": True, "policy": "dynamic"},
        config={"timers": {"throughput": {"synchronized": True}}},
        host_bytes=OUR_HOST_BYTES,
        ends_update=False,
    ),
    Row("stock-ratio", "stock, ratio 0.8", offload={"ratio": 0.8}, on_host=False),
    Row(
        "superoffload",
        "SuperOffload",
        offload={"super_offload": True, "cpuadam_cores_perc": 0.8},
    ),
    Row(
        "zenflow",
        "ZenFlow (stale)",
        # DeepSpeed's own example; with "auto" neither part of it needs a data loader's length.
        zero={
            "zenflow": {
                "topk_ratio": 0.05,
                "select_strategy": "auto",
                "select_interval": "auto",
                "update_interval": 4,
                "full_warm_up_rounds": 0,
                "overlap_step": True,
            }
        },
        stale=True,
        ends_update=False,
        on_host=False,
        zero_init=False,
    ),
)
"""The rows of most use first: when time runs out the last are left out."""


def config_of(row: Row, stock: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSpeed's config for a row; nothing but the row's own keys differs from ``stock``."""
    config = copy.deepcopy({**stock, **row.config})
    config["zero_optimization"].update(copy.deepcopy(dict(row.zero)))
    config["zero_optimization"]["offload_optimizer"].update(row.offload)
    if row.block is not None:
        config["deep_optimizer_states"] = dict(row.block)
    return config
