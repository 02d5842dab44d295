"""Illnesses that figures and settings of a run show; those of single lines are in ``failures``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from parse.illnesses import Illness
from parse.observed import Loss, Norm, Observed
from parse.verdict import (
    DIVERGED_RISE,
    FALL_TO_ZERO,
    STANDSTILL,
    LossVerdict,
    judge_guess,
    judge_loss,
    ln_name,
    steps_since_rise,
)

Found = Iterator[Illness]
_LAST = 20
_CERTAIN = 3
"""So many norms in a row that are not finite are no steps which a loss scaler left out."""
_SPIKE = 10
"""A norm so many times the usual one is a spike."""
_FEWEST_NORMS = 20
_FAR = 20
"""A norm never within this factor of the clip value is not clipped by it."""
_FEWEST_TIMED = 4
_DROPS = ((0, 15, 2), (0, 18, 9))
"""First and last release that drop gradients, DeepSpeed pull requests 6550, 7967 and 7981."""
_LEAVES_SINCE = (0, 18, 0)
_LEAVES = re.compile(r"Mixtral|Qwen2Moe|Qwen3Moe")
"""Classes of experts that DeepSpeed's own default makes leaves."""


def _loss(seen: Observed) -> Found:
    """The first that holds: a loss that is NaN also stands still."""
    bad = next((loss for loss in seen.losses if not math.isfinite(loss.value)), None)
    if bad is not None:
        yield Illness("loss-nan", bad.line, _not_finite(seen, bad))
    elif still := _standstill(seen):
        yield still
    elif seen.losses:
        verdict = _verdict(seen)
        if verdict.word == "diverged" and verdict.start is not None:
            above = verdict.start + DIVERGED_RISE
            line = next(loss.line for loss in seen.losses if loss.value > above)
            yield Illness("loss-diverging", line, f"the loss {verdict.text}")
        else:
            yield from _no_better_than_guess(seen, verdict.word)


def _not_finite(seen: Observed, bad: Loss) -> str:
    before = [loss.value for loss in seen.losses if loss.line < bad.line]
    text = f"the loss is {bad.value} for the first time"
    if bad.is_left_out:
        text += " (the line has none, which Megatron leaves out when it is NaN)"
    text += f"; the last finite one: {f'{before[-1]:g}' if before else 'none'}"
    name = ln_name(before[-1], seen.log.vocab_sizes) if before else None
    if name and len(before) > 1 and before[-2] != before[-1]:
        first = "the first update" if len(before) == 2 else f"update {len(before) - 1}"
        text += f", exactly {name}, the loss of a model that gives all tokens the same chance,"
        text += f" right after {first}: look at what the update wrote to the weights"
    return text


def _verdict(seen: Observed) -> LossVerdict:
    finite = [loss.value for loss in seen.losses if math.isfinite(loss.value)]
    return judge_loss(enumerate(finite))


def _standstill(seen: Observed) -> Illness | None:
    losses, last = seen.losses, seen.losses[-1].value if seen.losses else None
    length = 0
    while length < len(losses) and losses[-1 - length].value == last:
        length += 1
    # Zeros at the end of a figure may be left out, and a zero itself has no digit that counts.
    printed = losses if last == 0 else losses[len(losses) - length :]
    digits = max((loss.digits for loss in printed), default=0)
    if last is None or length < next(count for least, count in STANDSTILL if digits >= least):
        return None
    # A loss that is printed as 0 may just be small; one that fell there at once is not.
    before = losses[-1 - length].value if length < len(losses) else None
    if last == 0 and before is not None and before <= FALL_TO_ZERO:
        return None
    # The loss of weights that are lost stands still as well.
    lost = _lost_norms(seen)
    if lost and lost[0].line <= losses[2 - length].line:
        return None
    named = judge_loss(enumerate([last] * length), seen.log.vocab_sizes).text
    text = f"the loss is {named.partition(' from')[0]}: {last} in the last {length} steps"
    return Illness("loss-frozen", losses[-length].line, text)


def _no_better_than_guess(seen: Observed, word: str) -> Found:
    """A loss that stays worse than an even guess: it only wavers, or it was thrown off."""
    losses, since = [loss.value for loss in seen.losses], steps_since_rise(seen.rates)
    shown = judge_guess(losses, seen.log.vocab_sizes, since)
    if shown is None or (shown.is_flat and (word != "undecided" or _lost_norms(seen))):
        return
    line = seen.losses[shown.at].line
    if shown.is_flat:
        yield Illness("loss-frozen", line, shown.text)
        return
    rate = f"; learning rate up to {max(seen.rates):g}" if seen.rates else ""
    warmup = seen.facts.get("warmup")
    told = f", lr_warmup_iters {warmup.value} (line {warmup.line})" if warmup else ""
    yield Illness("loss-unstable", line, f"{shown.text}{rate}{told}")


def _norms(seen: Observed) -> Found:
    """Norms that are not finite at the end, and a clip value that always or never bites."""
    if lost := _lost_norms(seen):
        zero = any(norm.loss == 0 for norm in lost if not math.isfinite(norm.value))
        more = ", and the loss is printed as 0" if zero else ""
        text = f"the gradient norm is {lost[-1].value} from here to the end{more}"
        yield Illness("norm-nan", lost[0].line, text)
        return
    clip, norms = seen.number("clip"), [n.value for n in seen.norms if math.isfinite(n.value)]
    if len(norms) < _FEWEST_NORMS or not clip:
        return
    line, count, middle = seen.norms[-1].line, f"of {len(norms)} norms", median(norms)
    if min(norms) > clip and middle > 2 * clip:
        text = f"clip value {clip:g}, smallest {count} {min(norms):g}, median {middle:g}"
        yield Illness("clipping-always", line, text)
    elif max(norms) * _FAR < clip:
        yield Illness(
            "clipping-never", line, f"clip value {clip:g}, largest {count} {max(norms):g}"
        )


def _lost_norms(seen: Observed) -> Sequence[Norm]:
    """The last norms from the first that is not finite on; empty where such steps were skipped.

    The loss scaler of fp16 leaves single steps out without a word. What tells that a step's weights
    are lost is a loss that is NaN too (which transformers prints as 0), or that stands still.
    """
    norms = seen.norms
    count = next(
        (at for at, norm in enumerate(reversed(norms)) if math.isfinite(norm.value)), len(norms)
    )
    good, lost = norms[: len(norms) - count], norms[len(norms) - count :]
    last = norms[-_LAST:]
    bad = sum(not math.isfinite(norm.value) for norm in last)
    if not lost or count >= _CERTAIN or (bad >= _CERTAIN and 2 * bad >= len(last)):
        return lost
    is_ill = _is_lost(good, lost)
    if "fp16" not in seen.facts and good:
        is_nan = all(math.isnan(norm.value) for norm in lost)
        is_ill |= is_nan and (count > 1 or _is_spike([norm.value for norm in good[-_LAST:]]))
    return lost if is_ill else []


def _is_lost(good: Sequence[Norm], lost: Sequence[Norm]) -> bool:
    before, after = good[-1].loss if good else None, [norm.loss for norm in lost]
    no_loss = any(loss == 0 or (loss is not None and not math.isfinite(loss)) for loss in after)
    stands_still = len(lost) > 1 and None not in after and {*after} == {before}
    return stands_still or (no_loss and before != 0)


def _is_spike(norms: Sequence[float]) -> bool:
    usual = [norm for norm in norms if math.isfinite(norm)]
    return len(usual) > 1 and usual[-1] > _SPIKE * median(usual[:-1])


def _step_share(seen: Observed) -> Found:
    """The median tells; the first iteration sets up."""
    if len(seen.shares) < _FEWEST_TIMED:
        return
    lines, shares, updates = zip(*seen.shares[1:], strict=True)
    if (share := median(shares)) > 0.5:
        text = f"step takes {share:.0%} of forward, backward and step"
        text += f" (medians of {len(shares)}: {median(updates):.0f} ms a step)"
        line = next(line for line, one in zip(lines, shares, strict=True) if one > 0.5)
        yield Illness("step-over-half", line, text)


def _dropped_gradients(seen: Observed) -> Found:
    facts, version = seen.facts, _version(seen)
    if version is None or not _DROPS[0] <= version <= _DROPS[1]:
        return
    is_offloaded = "offload" in facts and seen.number("stage") in (1, 2)
    if is_offloaded and seen.number("accumulation") != 1:
        steps = facts["accumulation"].value if "accumulation" in facts else "not stated"
        text = f"DeepSpeed {facts['version'].value}, stage {facts['stage'].value}, optimizer "
        text += f"on the {facts['offload'].value.replace('True', 'cpu')}, accumulation {steps}"
        yield Illness("dropped-gradients", facts["offload"].line, text)


def _experts(seen: Observed) -> Found:
    facts, version = seen.facts, _version(seen)
    experts = facts.get("experts") or facts.get("experts_counted")
    if experts is None or "leaf" in facts or seen.number("stage") != 3:
        return
    covered = version is not None and version >= _LEAVES_SINCE and _LEAVES.search(experts.text)
    # Of an unknown release it is told only when ranks did wait for each other in vain.
    if not covered and (version is not None or seen.failures.has("collective-timeout")):
        name = f"DeepSpeed {facts['version'].value}" if version else "DeepSpeed"
        text = f"{experts.text} under ZeRO-3 of {name}, no leaf modules in the log"
        yield Illness("experts-without-leaf", experts.line, text)


def _settings(seen: Observed) -> Found:
    """Illnesses that a single setting, or two of them, lead to."""
    facts = seen.facts
    offload = facts["offload"].value if "offload" in facts else ""
    gpus, world = seen.number("gpus") or 0, seen.number("world") or 1
    for name, fact, holds in (
        ("buckets-1e9", "reduce_bucket", (seen.number("reduce_bucket") or 0) >= 1e9),
        ("one-process-many-gpus", "gpus", gpus > 1 and world == 1),
        ("one-thread-for-offload", "one_thread", offload in ("cpu", "True")),
    ):
        if fact in facts and holds:
            yield Illness(name, facts[fact].line, facts[fact].text)


def _version(seen: Observed) -> tuple[int, ...] | None:
    fact = seen.facts.get("version")
    return tuple(map(int, fact.value.split("."))) if fact else None


def _rebuilt(seen: Observed) -> Found:
    if seen.rebuilt:
        first, more = seen.rebuilt[0], len(seen.rebuilt) - 1
        text = f"{first.evidence} ({more} more such lines)" if more else first.evidence
        yield Illness("ops-recompile", first.line, text)


CONDITIONS: tuple[Callable[[Observed], Found], ...] = (
    _loss, _norms, _step_share, _dropped_gradients, _experts, _settings, _rebuilt,
)  # fmt: skip


def illnesses(seen: Observed) -> list[Illness]:
    """Judge the figures and the settings of a run."""
    return [illness for condition in CONDITIONS for illness in condition(seen)]


def not_judged(seen: Observed) -> Iterator[str]:
    """Say what could not be judged, and what the log lacks."""
    if not seen.losses:
        text = "whether it learns: no loss that is known here"
        if seen.num_progress:
            text += f" ({seen.num_progress} lines of DeepSpeed's own progress)"
            text += "; print the loss of each step"
        yield text
    elif not any(_loss(seen)) and (verdict := _verdict(seen)).word == "undecided":
        yield f"whether the loss falls: {verdict.text}"
    if not seen.norms:
        yield "gradient norms and clipping: no line with a norm"
    elif not seen.number("clip"):
        yield "clipping: the log does not state the clip value"
    if len(seen.shares) < _FEWEST_TIMED:
        yield "the share of the optimizer step: no timers (wall_clock_breakdown: true)"
    if "DeepSpeed" in seen.software and "version" not in seen.facts:
        yield "faults of certain releases: the log does not state DeepSpeed's version"
