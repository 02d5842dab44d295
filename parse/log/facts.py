"""What a log says of its run as a whole: ranks, vocabulary, parameters, arguments.

Standard library alone.
"""

from __future__ import annotations

import re
from math import prod

from parse.log.records import Log, Setting

_INTEGER = r"\d{1,18}"
_WORLD = re.compile(rf"\busing world size:\s*({_INTEGER})(?=,|\s|$)")
_WORLD_PARTS = re.compile(
    r", (data|sequence|context|tensor-model|pipeline-model)-parallel[- ]size: "
    rf"({_INTEGER})(?=,|\s|$)"
)
_DIST_WORLD = re.compile(rf"\bdist_world_size=({_INTEGER})(?=\s|$)")
_VOCABULARY = re.compile(
    rf"padded vocab \(size: ({_INTEGER})\) with ({_INTEGER}) dummy tokens "
    rf"\(new size: ({_INTEGER})\)"
)
_DEVICE = re.compile(r"Setting ds_accelerator to (\w{1,20})\b")
_RANK_PARAMETERS = re.compile(
    r"number of parameters on \(tensor, pipeline\) model parallel rank "
    rf"\((\d{{1,6}}), (\d{{1,6}})\):\s*({_INTEGER})(?=\s|$|<|\[)"
)
_ARGUMENT_LINE = re.compile(rf"(?:\[?[\w.-]+\]?: )?\s{{2,3}}(\w+) \.{{3,}} ({_INTEGER})\s*$")
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
_ZERO_CONFIG = re.compile(r"\bzero_config \.{2,}.*\bsub_group_size=(\d{1,15})(?=\s)")
_RATIO = re.compile(r"[ (]ratio=(\d\.\d{1,12})(?=[,)\s])")


class RunFacts:
    """Collects the facts of one log."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self._rank_parameters: dict[tuple[int, int], set[int]] = {}
        self._parameters_damaged = False
        self._settings: dict[str, Setting] = {}
        self._dist_world_size: int | None = None
        self._degrees: dict[str, int] = {}

    def feed(self, text: str) -> bool:
        """Take one whole line; returns whether it is one that the start of a run prints."""
        if " ...." in text:
            self._argument(text)
            return False
        log, world = self.log, _WORLD.search(text)
        if world:
            degrees = {name: int(size) for name, size in _WORLD_PARTS.findall(text)}
            total, product = int(world[1]), prod(degrees.values())
            if total and product and total % product == 0:
                log.world_size, self._degrees = total, degrees
        if dist := _DIST_WORLD.search(text):
            self._dist_world_size = int(dist[1]) or None
        vocabulary = _VOCABULARY.search(text)
        if vocabulary and int(vocabulary[1]) + int(vocabulary[2]) == int(vocabulary[3]):
            log.vocab_size = int(vocabulary[3])
        if device := _DEVICE.search(text):
            log.device = device[1]
        parameters = _RANK_PARAMETERS.findall(text)
        for tensor, pipeline, value in parameters:
            self._rank_parameters.setdefault((int(tensor), int(pipeline)), set()).add(int(value))
        marks = max(map(text.count, ("number of parameters on", "model parallel rank (")))
        self._parameters_damaged |= len(parameters) < marks
        log.recognised |= bool(world or dist or vocabulary or device or parameters)
        return bool(world)

    def _argument(self, text: str) -> None:
        argument = _ARGUMENT_LINE.match(text)
        if argument and argument[1] in _ARGUMENTS:
            self._settings[_ARGUMENTS[argument[1]]] = int(argument[2])
        if zero := _ZERO_CONFIG.search(text):
            self._settings["subgroup_numel"] = int(zero[1])
            ratio = _RATIO.search(text)
            if ratio and 0 <= float(ratio[1]) <= 1:
                self._settings["offload_ratio"] = float(ratio[1])

    def finish(self, trained: bool) -> None:
        """Work out what needs the whole log; ``trained`` says that it goes on beyond its setup."""
        log = self.log
        log.settings = self._settings | log.settings
        tp, dp = log.settings.get("tp"), log.settings.get("dp")
        from_name = tp * dp if isinstance(tp, int) and isinstance(dp, int) else None
        log.world_size = log.world_size or self._dist_world_size or from_name
        # Of a log that ends in its setup, ranks may be missing that nothing names.
        if self._rank_parameters and (trained or tp is not None or "tensor-model" in self._degrees):
            log.parameters = self._whole_model(tp)
        if self._rank_parameters and log.parameters is None:
            log.notes.append("the number of parameters of some rank is missing or contradictory")

    def _whole_model(self, tp: Setting | None) -> int | None:
        """Parameters over all model-parallel ranks; None unless each rank's is known."""
        ranks = self._rank_parameters
        tensor, pipeline = (1 + max(places) for places in zip(*ranks, strict=True))
        sound = len(ranks) == tensor * pipeline and all(len(v) == 1 for v in ranks.values())
        fits = {self._degrees.get("tensor-model"), tp} <= {None, tensor}
        fits = fits and self._degrees.get("pipeline-model", pipeline) == pipeline
        if self._parameters_damaged or not (sound and fits):
            return None
        return sum(value for values in ranks.values() for value in values)
