"""Settings that a log's file name carries, as the paper's script builds it."""

from __future__ import annotations

import re

from parse.log.records import Setting

_MODEL = re.compile(r"^log-(?P<model>.+?)-tp\d")
_INTEGERS = {
    "tp": r"-tp(\d{1,9})(?=-)",
    "dp": r"-dp(\d{1,9})(?=-)",
    "num_layers": r"-l(\d{1,9})(?=-)",
    "hidden": r"-h(\d{1,9})(?=-)",
    "heads": r"-a(\d{1,9})(?=-)",
    "seq_length": r"-sl(\d{1,9})(?=-)",
    "global_batch_size": r"-gbs(\d{1,9})(?=-)",
    "micro_batch_size": r"-mbs(\d{1,9})(?=-)",
    "subgroup_numel": r"-subg(\d{1,15})(?=-|\.)",
    "prefetch": r"-prefetch([01])(?=-|\.)",
    "flush_async": r"-flush_async([01])(?=-|\.)",
    "opt_gaps": r"-opt_gaps(\d{1,9})(?=-|\.)",
}
_PATTERNS = {name: re.compile(pattern) for name, pattern in _INTEGERS.items()}
_RATIO = re.compile(r"-ratio(\d{1,3}(?:\.\d{1,12})?)(?=-)")


def settings_from_name(name: str) -> dict[str, Setting]:
    """Read ``log-{model}-tp{n}-...-opt_gaps{n}.log``.

    Early logs lack ``flush_async`` and ``opt_gaps``; a name of another form gives few or no
    settings. ``engine`` and ``stride`` follow from the last three: without prefetch the gaps have
    no effect, whatever the name says (the paper's vanilla logs carry left-over ones).

    Returns:
        Setting by name; a setting that the name does not carry is absent.
    """
    found: dict[str, Setting] = {}
    model = _MODEL.search(name)
    if not model:
        return found
    found["model"] = model["model"]
    for key, pattern in _PATTERNS.items():
        match = pattern.search(name)
        if match:
            found[key] = int(match[1])
    ratio = _RATIO.search(name)
    if ratio:
        found["offload_ratio"] = float(ratio[1])
    found.update(_engine(found))
    return found


def _engine(found: dict[str, Setting]) -> dict[str, Setting]:
    if found.get("prefetch") == 1:
        stride = found.get("opt_gaps")
        return {"engine": "hybrid"} | ({"stride": stride} if stride is not None else {})
    if found.get("flush_async") == 1:
        return {"engine": "async-gradients", "stride": 0}
    return {"engine": "vanilla", "stride": 0} if "prefetch" in found else {}
