"""Settings that the name of a log carries, as the paper's script names its logs."""

from __future__ import annotations

import re

from parse.records import Setting

_NAME_KEYS = {
    "tp": "tp",
    "pp": "pp",
    "dp": "dp",
    "l": "num_layers",
    "h": "hidden",
    "a": "heads",
    "sl": "seq_length",
    "gbs": "global_batch_size",
    "mbs": "micro_batch_size",
    "link": "link_mbit",
    "ratio": "offload_ratio",
    "subg": "subgroup_numel",
    "prefetch": "prefetch",
    "flush_async": "flush_async",
    "opt_gaps": "opt_gaps",
}
_NAME_PART = re.compile(rf"-({'|'.join(_NAME_KEYS)})(\d{{1,15}}(?:\.\d{{1,12}})?)(?=-|$)")


_OVERLAPPED = frozenset(
    [
        *("auto", "dynamic", "all-host", "stride", "ratio"),
        *("async-gradients", "hybrid", "resident"),  # as earlier logs have them
    ]
)


def settings_from_name(name: str) -> dict[str, Setting]:
    """Read ``log-{model}-tp{n}-...`` up to ``-opt_gaps{n}.log`` or ``-engine_{name}.log``.

    ``engine`` is the name at the end, or else follows with ``stride`` from the last three numbers:
    without prefetch the gaps have no effect, whatever the name says (the paper's logs of stock
    DeepSpeed carry left-over ones).

    Returns:
        Setting by name; a setting that the name does not carry is absent.
    """
    stem, _, engine = name.removesuffix(".log").partition("-engine_")
    model = re.match(r"log-(.+?)(?=-tp\d)", stem)
    if not model:
        return {}
    found: dict[str, Setting] = {"model": model[1]}
    for key, value in _NAME_PART.findall(stem[model.end() :]):
        if key == "ratio" or value.isdecimal():
            found[_NAME_KEYS[key]] = float(value) if key == "ratio" else int(value)
    if engine:
        return found | {"engine": engine}
    if found.get("prefetch") == 1:
        stride = found.get("opt_gaps")
        return found | {"engine": "stride"} | ({} if stride is None else {"stride": stride})
    if found.get("flush_async") == 1:
        return found | {"engine": "all-host", "stride": 0}
    return found | ({"engine": "stock", "stride": 0} if "prefetch" in found else {})


def is_overlapped(name: str) -> bool:
    """Return whether a log is named by an engine whose update goes on beside other work."""
    return settings_from_name(name).get("engine") in _OVERLAPPED
