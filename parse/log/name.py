"""Settings that a log's file name carries, as the paper's script builds it."""

from __future__ import annotations

import re

from parse.log.records import Setting

_MODEL = re.compile(r"^log-(?P<model>.+?)-tp\d")
_KEYS = {
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
    "subg": "subgroup_numel",
    "prefetch": "prefetch",
    "flush_async": "flush_async",
    "opt_gaps": "opt_gaps",
}
_LAST_KEYS = ("subg", "prefetch", "flush_async", "opt_gaps")
"""A name may end with one of these."""
_PART = re.compile(rf"-({'|'.join(_KEYS)})(\d{{1,15}})(?=-|(\.))")
_RATIO = re.compile(r"-ratio(\d{1,3}(?:\.\d{1,12})?)(?=-)")
_ENGINE = re.compile(r"-engine_([A-Za-z0-9][\w-]*)\.")


def settings_from_name(name: str) -> dict[str, Setting]:
    """Read ``log-{model}-tp{n}-...`` up to ``-opt_gaps{n}.log`` or ``-engine_{name}.log``.

    Early logs lack ``flush_async`` and ``opt_gaps``; a name of another form gives few or no
    settings, and parts that are not known are passed over. ``engine`` is the name at the end, or
    else follows with ``stride`` from the last three numbers: without prefetch the gaps have no
    effect, whatever the name says (the paper's vanilla logs carry left-over ones).

    Returns:
        Setting by name; a setting that the name does not carry is absent.
    """
    model = _MODEL.search(name)
    if not model:
        return {}
    engine, rest = _ENGINE.search(name), name[model.end("model") :]
    parts = _ENGINE.sub("-.", rest)
    found: dict[str, Setting] = {"model": model["model"]}
    for key, value, end in _PART.findall(parts):
        if not end or key in _LAST_KEYS:
            found[_KEYS[key]] = int(value)
    if ratio := _RATIO.search(parts):
        found["offload_ratio"] = float(ratio[1])
    return found | ({"engine": engine[1]} if engine else _paper_engine(found))


def _paper_engine(found: dict[str, Setting]) -> dict[str, Setting]:
    if found.get("prefetch") == 1:
        stride = found.get("opt_gaps")
        return {"engine": "hybrid"} | ({"stride": stride} if stride is not None else {})
    if found.get("flush_async") == 1:
        return {"engine": "async-gradients", "stride": 0}
    return {"engine": "vanilla", "stride": 0} if "prefetch" in found else {}
