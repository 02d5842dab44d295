"""What settings that the log states lead to."""

from __future__ import annotations

import re
from collections.abc import Iterator

from parse.diagnose.illness import Illness
from parse.diagnose.watcher import Fact, Watcher

_DROPS = ((0, 15, 2), (0, 18, 9))
"""First and last release that drop gradients, DeepSpeed pull requests 6550, 7967 and 7981."""
_LARGE_BUCKET = 1e9
_LEAVES_SINCE = (0, 18, 0)
_LEAVES = re.compile(r"Mixtral|Qwen2Moe|Qwen3Moe")
"""Classes of experts that DeepSpeed's own default makes leaves."""


class SetupWatcher(Watcher):
    """Judges the settings at the end, when all of them are known."""

    def illnesses(self) -> Iterator[Illness]:
        """Each by a rule of its own."""
        yield from self._dropped_gradients()
        yield from self._buckets()
        yield from self._experts()
        yield from self._processes()
        yield from self._threads()

    def _dropped_gradients(self) -> Iterator[Illness]:
        facts, version = self.run.facts, self._version()
        if version is None or not _DROPS[0] <= version <= _DROPS[1]:
            return
        is_offloaded = "offload" in facts and self.run.number("stage") in (1, 2)
        if is_offloaded and self.run.number("accumulation") != 1:
            steps = facts["accumulation"].value if "accumulation" in facts else "not stated"
            text = f"DeepSpeed {facts['version'].value}, stage {facts['stage'].value}, optimizer "
            text += f"on the {facts['offload'].value.replace('True', 'cpu')}, accumulation {steps}"
            yield Illness("dropped-gradients", facts["offload"].line, text)

    def _buckets(self) -> Iterator[Illness]:
        size = self.run.number("reduce_bucket")
        if size is not None and size >= _LARGE_BUCKET:
            fact = self.run.facts["reduce_bucket"]
            yield Illness("buckets-1e9", fact.line, fact.text)

    def _experts(self) -> Iterator[Illness]:
        facts = self.run.facts
        experts = facts.get("expert_class") or facts.get("experts")
        if experts is None or "leaf" in facts or self.run.number("stage") != 3:
            return
        version = self._version()
        covered = version is not None and version >= _LEAVES_SINCE and self._is_default(experts)
        # Of an unknown release it is told only when ranks did wait for each other in vain.
        if not covered and (version is not None or "collective-timeout" in self.run.steps_at):
            name = f"DeepSpeed {facts['version'].value}" if version else "DeepSpeed"
            text = f"{experts.text} under ZeRO-3 of {name}, no leaf modules in the log"
            yield Illness("experts-without-leaf", experts.line, text)

    def _is_default(self, experts: Fact) -> bool:
        return bool(_LEAVES.search(experts.text))

    def _processes(self) -> Iterator[Illness]:
        gpus, world = self.run.number("gpus"), self.run.number("world")
        if gpus and gpus > 1 and (world or 1) == 1:
            fact = self.run.facts["gpus"]
            yield Illness("one-process-many-gpus", fact.line, fact.text)

    def _threads(self) -> Iterator[Illness]:
        facts = self.run.facts
        if "one_thread" in facts and facts.get("offload", Fact("", 0, "")).value in ("cpu", "True"):
            fact = facts["one_thread"]
            yield Illness("one-thread-for-offload", fact.line, fact.text)

    def _version(self) -> tuple[int, ...] | None:
        fact = self.run.facts.get("version")
        return tuple(map(int, fact.value.split("."))) if fact else None

    def not_judged(self) -> Iterator[str]:
        """What depends on the release."""
        if "DeepSpeed" in self.run.software and "version" not in self.run.facts:
            yield "faults of certain releases: the log does not state DeepSpeed's version"
