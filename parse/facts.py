"""What a log says of its run as a whole: ranks, vocabulary, parameters, arguments, its own name.

Standard library alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from parse.records import Log, Setting


class Row(NamedTuple):
    """A figure that logs print."""

    name: str
    pattern: str
    """Of the value behind a label, from end to end; or to search a line for, with one group."""
    unit: str = ""
    kind: Callable[[str], Setting] = float


_FACTS = (
    Row("world_size", r"\busing world size:\s*(\d{1,18})(?=,|\s|$)", "ranks", int),
    Row("dist_world_size", r"\bdist_world_size=(\d{1,18})(?=\s|$)", "ranks", int),
    Row("tensor", r", tensor-model-parallel[- ]size: (\d{1,18})(?=,|\s|$)", "ranks", int),
    Row("pipeline", r", pipeline-model-parallel[- ]size: (\d{1,18})(?=,|\s|$)", "ranks", int),
    Row("vocab_size", r"padded vocab .* dummy tokens \(new size: (\d{1,18})\)", "tokens", int),
    Row("device", r"Setting ds_accelerator to (\w{1,20})\b", "", str),
)
"""What the start of a run prints of it as a whole."""
_FACT_PATTERNS = [(row, re.compile(row.pattern)) for row in _FACTS]
_ARGUMENT = re.compile(r"(?:\[?[\w.-]+\]?: )?\s{2,3}(\w+) \.{3,} (\d{1,18})\s*$")
"""Megatron's list of arguments; DeepSpeed's own list looks the same behind a ``[file]`` prefix."""
_ARGUMENTS = {
    "tensor_model_parallel_size": "tp",
    "data_parallel_size": "dp",
    "num_layers": "num_layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "seq_length": "seq_length",
    "global_batch_size": "global_batch_size",
    "micro_batch_size": "micro_batch_size",
}
_SUBGROUP = re.compile(r"\bzero_config \.{2,}.*\bsub_group_size=(\d{1,15})(?=\s)")
_RATIO = re.compile(r"\bzero_config \.{2,}.*[ (]ratio=(\d\.\d{1,12})(?=[,)\s])")
_RANK_PARAMETERS = re.compile(
    r"number of parameters on \(tensor, pipeline\) model parallel rank "
    r"\((\d{1,6}), (\d{1,6})\):\s*(\d{1,18})(?=\s|$|<|\[)"
)


class RunFacts:
    """Collects what a log says of its run as a whole: ranks, vocabulary, parameters, arguments."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self._found: dict[str, Any] = {}
        self._settings: dict[str, Setting] = {}
        self._parameters: dict[tuple[int, int], set[int]] = {}

    def feed(self, text: str) -> bool:
        """Take one line; returns whether it is one that the start of a run prints."""
        if " ...." in text:
            self._take_argument(text)
            return False
        found = {row.name: row.kind(m[1]) for row, how in _FACT_PATTERNS if (m := how.search(text))}
        for tensor, pipeline, value in _RANK_PARAMETERS.findall(text):
            found["parameters"] = int(value)
            self._parameters.setdefault((int(tensor), int(pipeline)), set()).add(int(value))
        self._found |= found
        self.log.recognised |= bool(found)
        self.log.vocab_size = self._found.get("vocab_size")
        self.log.device = self._found.get("device")
        return "world_size" in found

    def _take_argument(self, text: str) -> None:
        argument = _ARGUMENT.match(text)
        if argument and argument[1] in _ARGUMENTS:
            self._settings[_ARGUMENTS[argument[1]]] = int(argument[2])
        if subgroup := _SUBGROUP.search(text):
            self._settings["subgroup_numel"] = int(subgroup[1])
        if ratio := _RATIO.search(text):
            self._settings["offload_ratio"] = float(ratio[1])

    def finish(self, trained: bool) -> None:
        """Work out what needs the whole log; ``trained`` says that it goes on beyond its setup."""
        log, found = self.log, self._found
        log.settings = self._settings | log.settings
        tp, dp = log.settings.get("tp"), log.settings.get("dp")
        from_name = tp * dp if isinstance(tp, int) and isinstance(dp, int) else None
        log.world_size = found.get("world_size") or found.get("dist_world_size") or from_name
        # Of a log that ends in its setup, ranks may be missing that nothing names.
        if self._parameters and (trained or tp is not None or "tensor" in found):
            log.parameters = self._whole_model(tp)
        if self._parameters and log.parameters is None:
            log.notes.append("the number of parameters of some rank is missing or contradictory")

    def _whole_model(self, tp: Setting | None) -> int | None:
        """Parameters over all model-parallel ranks; None unless each rank's is known."""
        ranks = self._parameters
        tensor, pipeline = (1 + max(places) for places in zip(*ranks, strict=True))
        fits = {self._found.get("tensor"), tp} <= {None, tensor}
        fits = fits and self._found.get("pipeline", pipeline) == pipeline
        if not fits or len(ranks) != tensor * pipeline or any(len(v) > 1 for v in ranks.values()):
            return None
        return sum(value for values in ranks.values() for value in values)


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
    "subg": "subgroup_numel",
    "prefetch": "prefetch",
    "flush_async": "flush_async",
    "opt_gaps": "opt_gaps",
}
_NAME_PART = re.compile(rf"-({'|'.join(_NAME_KEYS)})(\d{{1,15}})(?=-|(\.))")
_NAME_RATIO = re.compile(r"-ratio(\d{1,3}(?:\.\d{1,12})?)(?=-)")
_NAME_ENGINE = re.compile(r"-engine_([A-Za-z0-9][\w-]*)\.")


def settings_from_name(name: str) -> dict[str, Setting]:
    """Read ``log-{model}-tp{n}-...`` up to ``-opt_gaps{n}.log`` or ``-engine_{name}.log``.

    ``engine`` is the name at the end, or else follows with ``stride`` from the last three numbers:
    without prefetch the gaps have no effect, whatever the name says (the paper's vanilla logs carry
    left-over ones).

    Returns:
        Setting by name; a setting that the name does not carry is absent.
    """
    model = re.search(r"^log-(?P<model>.+?)-tp\d", name)
    if not model:
        return {}
    engine, rest = _NAME_ENGINE.search(name), name[model.end("model") :]
    parts = _NAME_ENGINE.sub("-.", rest)
    found: dict[str, Setting] = {"model": model["model"]}
    last_keys = ("subg", "prefetch", "flush_async", "opt_gaps")  # a name may end with one of these
    for key, value, end in _NAME_PART.findall(parts):
        if not end or key in last_keys:
            found[_NAME_KEYS[key]] = int(value)
    if ratio := _NAME_RATIO.search(parts):
        found["offload_ratio"] = float(ratio[1])
    if engine:
        return found | {"engine": engine[1]}
    if found.get("prefetch") == 1:
        stride = found.get("opt_gaps")
        return found | {"engine": "hybrid"} | ({} if stride is None else {"stride": stride})
    if found.get("flush_async") == 1:
        return found | {"engine": "async-gradients", "stride": 0}
    return found | ({"engine": "vanilla", "stride": 0} if "prefetch" in found else {})
