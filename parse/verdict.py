"""Judges if a loss means training, and if two runs train alike. Standard library alone.

No speed-up is worth printing before these words allow it. :func:`compare` sets two logs side by
side, as ``quick-parse-results.py`` prints them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from parse.log import UNREAD_LOSSES, unequal_sizes
from parse.records import PHASES, Iteration, Log, after_warmup, as_number, finite

MINIMUM_TIMED = 2
"""Iterations after the warm-up below which no speed-up is worth stating."""
FEWEST_COMMON = 5
"""Iterations that two logs of other lengths must share; published logs have five or more."""
ON_CPU = "measured on a CPU"
"""Why a CPU's figures never make a speed-up."""
_OF_PAIRS = {
    "world_size": "number of ranks",
    "tp": "tensor-parallel size",
    "pp": "pipeline-parallel size",
    "global_batch_size": "global batch",
    "micro_batch_size": "micro-batch",
    "seq_length": "sequence length",
    "num_layers": "number of layers",
    "hidden": "hidden size",
    "heads": "number of attention heads",
    "parameters": "number of parameters",
    "vocab_size": "vocabulary size",
    "device_name": "device",
}
"""What decides the work of an iteration, or where it is done, and is no matter of the engine.

A micro-batch is such a thing: gradients leave the device once a micro-batch. Sizes of subgroups and
the share that is offloaded are an engine's own.
"""
TIMED = ("iteration", *PHASES, "backward_inner", "backward_allreduce", "optimizer_step")
_SHOWN_REJECTS = 5
FROZEN_ITERATIONS = 3
"""A loss that stands still over at least so many last iterations is frozen."""
STANDSTILL = ((6, FROZEN_ITERATIONS), (4, 8), (0, 20))
"""Significant digits of a printed loss, and how many equal ones are no coincidence."""
FALL_TO_ZERO = 0.05
"""A loss that was above this and is 0 from one step to the next was not learned away."""
LN_VOCABULARY_TOLERANCE = 5e-5
"""How near a frozen loss must be to ln(V) to be a uniform softmax."""
DEFAULT_VOCABULARY = 50304
"""GPT-2's 50257 tokens as Megatron pads them: the paper's, tried when the log names no other."""
DEFAULT_TOLERANCE = 1e-3
"""Largest difference of two losses that still counts as ``close``."""
DIVERGED_RISE = 1.0
"""A loss that ends this far above its start, in nats, has diverged."""
FAILED = ("nan", "frozen", "diverged", "skipped")
"""Words of a loss that make its run a failure, however it ended."""
FEWEST_LOSSES = 6
"""Below this a loss that ends above its start may come down again: first steps often rise."""
UNSTABLE_FACTOR = 1.25
"""A loss so many times the first one was thrown off: no batch is that much harder to guess."""
_FEWEST_UNSTABLE = 5
_STEPS_AT_FULL_RATE = 7
_WAVERS = 0.02
"""Share of itself that a loss moves by from batch to batch."""
_NOISES_FALLEN = 1.5
_NOISE_OF_SECOND_DIFFERENCE = 0.6745 * math.sqrt(6)
"""Median size of a second difference of normal noise, over its standard deviation."""


@dataclass(frozen=True)
class LossVerdict:
    """The verdict on a loss; an empty word when the log holds none.

    ``trains``: it fell by more than its noise. ``nan``, ``frozen`` and ``diverged`` (it ends more
    than :data:`DIVERGED_RISE` above its start, of :data:`FEWEST_LOSSES` or more) are failures, and
    so is ``skipped``: the loss scaler left out every update. ``undecided`` is all that lies
    between: too few iterations, or too much noise, to know.
    """

    word: str
    from_iteration: int | None = None
    """First iteration of the NaN or of the standstill."""
    start: float | None = None
    """Median of the first third of the losses."""
    end: float | None = None
    """Median of the last third."""
    noise: float | None = None
    """Standard deviation of a loss around its trend."""
    at: float | None = None
    """The frozen loss."""
    at_name: str | None = None
    """``ln(50304)`` when the frozen loss is that of a uniform softmax."""
    skipped: int | None = None
    """Updates that were left out, where all were."""
    num_losses: int = 0
    remark: str = ""
    """What an undecided loss shows all the same: that it never was better than a guess."""

    @property
    def failed(self) -> bool:
        """True where the run counts as failed."""
        return self.word in FAILED

    @property
    def text(self) -> str:
        """The verdict as a person reads it."""
        if self.word == "nan":
            return f"nan from iteration {self.from_iteration}"
        if self.word == "frozen":
            return f"frozen at {self.at_name or self.at} from iteration {self.from_iteration}"
        if self.word == "skipped":
            return f"that of unchanged weights: all {self.skipped} updates were skipped"
        if self.word in ("diverged", "undecided"):
            figures = (
                f"from {self.start:.4g} to {self.end:.4g}, medians of its first and last third"
            )
            figures += f"; its standard deviation around its trend is {self.noise:.2g}"
            if self.num_losses < FEWEST_LOSSES:
                figures += f"; {self.num_losses} losses are too few to tell if it falls"
            return f"{self.word} ({figures})" + (f"; {self.remark}" if self.remark else "")
        return self.word or "no loss in the log"


def judge_loss(
    losses: Iterable[tuple[int, float | None]],
    vocab_sizes: Sequence[int] = (),
    is_rounded: bool = False,
) -> LossVerdict:
    """Judge one run's printed losses.

    Args:
        losses: Iteration and its loss; None, a loss that cannot be read, says nothing.
        vocab_sizes: Vocabulary sizes the log names; the paper's is tried too.
        is_rounded: The losses are printed with few digits, so that equal ones may be a coincidence.
    """
    known = [(iteration, loss) for iteration, loss in losses if loss is not None]
    if not known:
        return LossVerdict("")
    for iteration, loss in known:
        if not math.isfinite(loss):
            return LossVerdict("nan", iteration)
    last = known[-1][1]
    still = 0
    while still < len(known) and known[-1 - still][1] == last:
        still += 1
    if still >= (_fewest_equal(known, still) if is_rounded else FROZEN_ITERATIONS):
        name = ln_name(last, vocab_sizes)
        return LossVerdict("frozen", known[-still][0], at=last, at_name=name)
    values = [loss for _, loss in known]
    third = max(1, len(values) // 3)
    start, end, noise = median(values[:third]), median(values[-third:]), _noise(values)
    falls = start - end > _NOISES_FALLEN * noise
    rises = end - start > DIVERGED_RISE and len(values) >= FEWEST_LOSSES
    word = "diverged" if rises else "trains" if falls else "undecided"
    return LossVerdict(word, start=start, end=end, noise=noise, num_losses=len(values))


def _fewest_equal(known: Sequence[tuple[int, float]], still: int) -> float:
    """How many equal losses are no coincidence; infinite where the last is just small."""
    last = known[-1][1]
    before = known[-1 - still][1] if still < len(known) else math.inf
    if last == 0 and before <= FALL_TO_ZERO:
        return math.inf
    # Zeros at the end of a figure may be left out, and a zero itself has no digit that counts.
    printed = [loss for _, loss in known] if last == 0 else [last]
    digits = max(
        len(f"{loss!r}".partition("e")[0].replace(".", "").lstrip("-0")) for loss in printed
    )
    return next(count for least, count in STANDSTILL if digits >= least)


def _noise(losses: Sequence[float]) -> float:
    """Standard deviation of the losses around their trend, which second differences do not see."""
    seconds = [abs(a - 2 * b + c) for a, b, c in zip(losses, losses[1:], losses[2:], strict=False)]
    return median(seconds) / _NOISE_OF_SECOND_DIFFERENCE if seconds else 0.0


@dataclass(frozen=True)
class NoBetterThanGuess:
    """A loss that never was better than an even guess, which costs ln(vocabulary)."""

    is_flat: bool
    """It only wavers; otherwise it jumped."""
    at: int
    """Place of the first loss that shows it, from 0."""
    text: str
    """The same, as a person reads it."""


def judge_guess(
    losses: Sequence[float], vocab_sizes: Sequence[int], steps_at_full_rate: int | None
) -> NoBetterThanGuess | None:
    """Tell a loss that learned nothing from one that its updates threw off.

    A model guesses evenly before it has learned anything; the first steps at the full learning rate
    bring it there at the latest.

    Args:
        losses: All finite ones, in order.
        vocab_sizes: Those that the log names; without one, no jump is judged.
        steps_at_full_rate: Since the learning rate rose last; None where it is unknown.
    """
    size = [*vocab_sizes, DEFAULT_VOCABULARY][0]
    guess = math.log(size)
    if not losses or min(losses) < guess:
        return None
    low, high, first, count = min(losses), max(losses), losses[0], len(losses)
    of_guess = f"worse than an even guess: ln({size}) = {guess:.5g}"
    if high - low <= _WAVERS * low:
        text = f"the loss stays between {low:.5g} and {high:.5g} for {count} steps, {of_guess}"
        is_full = (steps_at_full_rate or 0) >= _STEPS_AT_FULL_RATE
        return NoBetterThanGuess(True, 0, text) if is_full else None
    if not vocab_sizes or count < _FEWEST_UNSTABLE or high < UNSTABLE_FACTOR * first:
        return None
    at = next(place for place, loss in enumerate(losses) if loss >= UNSTABLE_FACTOR * first)
    text = (
        f"the loss jumps from {losses[at - 1]:.4g} to {losses[at]:.4g} at loss {at + 1} of {count}"
    )
    if (top := losses.index(high)) != at:
        text += f" and to {high:.4g} at loss {top + 1}"
    text += f", {high / first:.2g} times the first one; all {count} are {of_guess}"
    return NoBetterThanGuess(False, at, text)


def ln_name(loss: float, vocab_sizes: Sequence[int]) -> str | None:
    """Return ``ln(V)`` where the loss is that of a uniform softmax over V words."""
    for size in (*vocab_sizes, DEFAULT_VOCABULARY):
        if size > 1 and abs(loss - math.log(size)) <= LN_VOCABULARY_TOLERANCE:
            return f"ln({size})"
    return None


def judge_log(log: Log) -> LossVerdict:
    """Judge a log by the digits it prints, and by the updates that it says were skipped."""
    records = log.iterations
    steps = [after.iteration - before.iteration for before, after in pairwise(records)]
    covered = sum(steps) + min(steps, default=1)
    skipped = sum(record.printed.get("skipped") or 0 for record in records)
    if records and skipped >= covered:
        return LossVerdict("skipped", records[0].iteration, skipped=skipped)
    losses = ((record.iteration, record.loss) for record in records)
    verdict = judge_loss(losses, log.vocab_sizes, log.rounded_losses)
    if verdict.word != "undecided":
        return verdict
    known = [record.loss for record in records if record.loss is not None]
    rates = [record.printed.get("learning_rate") for record in records]
    shown = judge_guess(known, log.vocab_sizes, steps_since_rise(finite(rates)))
    return replace(verdict, remark=shown.text) if shown else verdict


def steps_since_rise(rates: Sequence[float]) -> int | None:
    """Return how many steps came after the one at which the rate was highest first."""
    return len(rates) - 1 - rates.index(max(rates)) if rates else None


@dataclass(frozen=True)
class PairVerdict:
    """``equal``, ``close`` or ``differs``; an empty word when there is nothing to compare."""

    word: str
    num_losses: int = 0
    """Iterations whose losses were compared."""
    exact: bool = False
    """True where full-precision figures were compared, rather than printed digits."""
    num_grad_norms: int = 0
    digests: tuple[str, ...] = ()
    """Digests of the final state that were compared: ``weights``, ``optimizer state``."""
    from_iteration: int | None = None
    """The first whose losses differ at all; of printed ones, by more than the tolerance."""
    largest_difference: float = 0.0
    """Largest absolute difference of two losses; infinite when one of them is NaN."""
    largest_at: int | None = None
    largest_norm_difference: float = 0.0
    """Largest relative difference of two gradient norms."""
    state_differs: tuple[str, ...] = ()
    """Digests that differ."""

    @property
    def judged_on(self) -> str:
        """All that was compared, as a person reads it."""
        losses = _losses(self.num_losses)
        if not self.exact:
            return f"{losses} as printed"
        norms = [f"{self.num_grad_norms} gradient norms"] if self.num_grad_norms else []
        state = [" and ".join(self.digests)] if self.digests else []
        return ", ".join([losses, *norms, *state])

    @property
    def text(self) -> str:
        """The verdict as a person reads it."""
        if self.word == "equal":
            return f"equal ({self.judged_on})"
        if self.word == "":
            return "not compared"
        if self.word == "differs" and self.from_iteration is None:
            return f"differs: the losses agree, the final {' and '.join(self.state_differs)} do not"
        detail = f"largest difference {self.largest_difference:.3g} at iteration {self.largest_at}"
        if self.word == "differs":
            start = f"differs from iteration {self.from_iteration}"
            return f"{start} ({_losses(self.num_losses)}, {detail})"
        if not self.largest_difference:
            norm = f"{self.largest_norm_difference:.3g}"
            detail = f"losses equal, gradient norms differ by up to {norm} of their size"
        return f"close ({_losses(self.num_losses)}, {detail})"


def _losses(count: int) -> str:
    return f"{count} loss" if count == 1 else f"{count} losses"


def judge_pair(first: Log, second: Log, tolerance: float = DEFAULT_TOLERANCE) -> PairVerdict:
    """Compare two runs on the iterations both have.

    With ``metrics.jsonl`` beside both logs the comparison is bitwise, on losses, gradient norms and
    the final digests; without it, on the printed losses.

    Args:
        first: The reference.
        second: The run to judge.
        tolerance: Largest absolute difference of two losses for ``close``.
    """
    exact = both_exact(first, second)
    pairs = common_losses(first, second, exact)
    if not pairs:
        return PairVerdict("")
    differences = [(i, difference(a, b)) for i, a, b in pairs]
    norms = _norm_differences(first, second) if exact else []
    digests, unequal = _digests(first, second) if exact else ((), ())
    largest_at, largest = max(differences, key=lambda item: item[1])
    worst_norm = max(norms, default=0.0)
    beginning = next((i for i, d in differences if d > (0 if exact else tolerance)), None)
    same_figures = largest == 0 and worst_norm == 0
    if same_figures and not unequal:
        word = "equal"
    else:
        # Equal losses over unequal weights: the damage is in what no loss has shown yet.
        word = "differs" if same_figures or largest > tolerance else "close"
    return PairVerdict(
        word,
        len(pairs),
        exact,
        len(norms),
        digests,
        from_iteration=beginning,
        largest_difference=largest,
        largest_at=largest_at,
        largest_norm_difference=worst_norm,
        state_differs=unequal,
    )


def both_exact(first: Log, second: Log) -> bool:
    """Return True where both runs have a full-precision loss of every iteration."""
    files = {log.metrics.path.resolve() for log in (first, second) if log.metrics}
    if len(files) == 1 and first.path != second.path:
        # Two logs moved into one folder share its file, which says nothing of one of them.
        return False
    return all(
        log.metrics is not None
        and all(r.exact_loss is not None for r in log.iterations if r.loss is not None)
        for log in (first, second)
    )


def in_common(
    first: Log, second: Log, value: Callable[[Iteration], float | None]
) -> list[tuple[int, float, float]]:
    """Return iteration and both values, where both runs have one."""
    others = {record.iteration: value(record) for record in second.iterations}
    pairs = ((r.iteration, value(r), others.get(r.iteration)) for r in first.iterations)
    return [(i, a, b) for i, a, b in pairs if a is not None and b is not None]


def common_losses(first: Log, second: Log, exact: bool) -> list[tuple[int, float, float]]:
    """Return iteration and both losses, where both runs have one; as printed unless ``exact``."""
    return in_common(first, second, lambda r: r.exact_loss if exact else r.loss)


def difference(a: float, b: float) -> float:
    """Return the distance; infinite where just one is finite, 0 where both are NaN."""
    if math.isfinite(a) and math.isfinite(b):
        return abs(a - b)
    return 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else math.inf


def _norm_differences(first: Log, second: Log) -> list[float]:
    """Relative differences, of the norms in ``metrics.jsonl`` alone."""
    found = []
    for _, a, b in in_common(first, second, lambda r: as_number(r.event.get("grad_norm"))):
        scale = max(abs(a), abs(b))
        found.append(difference(a, b) / scale if 0 < scale < math.inf else difference(a, b))
    return found


def _digests(first: Log, second: Log) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Digests that both runs have after as many iterations, and those of them that differ."""
    sides = [log.metrics for log in (first, second) if log.metrics]
    if len({repr(side.end.get("iterations")) for side in sides}) != 1:
        return (), ()
    keys = {"weights": "weights_sha256", "optimizer state": "optimizer_sha256"}
    found = {name: [side.digest(key) for side in sides] for name, key in keys.items()}
    compared = tuple(name for name, pair in found.items() if all(pair))
    return compared, tuple(name for name in compared if len(set(found[name])) > 1)


# Two logs side by side


def compare(
    reference: Log,
    ours: Log,
    warmup: int = 1,
    tolerance: float = DEFAULT_TOLERANCE,
    keys: tuple[str, str] = ("reference", "ours"),
) -> dict[str, Any]:
    """Compare two logs on their own, without what a run folder says of them.

    Args:
        reference: What it is compared with.
        ours: The run whose speed-up is asked for.
        warmup: First iterations of each log to leave out of times (not of losses).
        tolerance: Largest absolute difference of two losses that allows a speed-up.
        keys: Of the two sides in the object; reasons call them so.

    Returns:
        An object for JSON, with both sides by their keys. A time, loss or ratio that is missing,
        and a loss that is not finite, is None. Times are in s under ``iterations``, in ms
        elsewhere; ``speedup`` is the ratio of the median iterations, None when it is withheld.
    """
    logs = dict(zip(keys, (reference, ours), strict=True))
    losses = {key: judge_log(log) for key, log in logs.items()}
    pair = judge_pair(reference, ours, tolerance)
    timed = set[int].intersection(*(_numbers(log, warmup) for log in logs.values()))
    times = {key: {phase: _times(log, phase, timed) for phase in TIMED}
             for key, log in logs.items()}  # fmt: skip
    means, medians = (
        {key: {phase: of(ms) if ms else None for phase, ms in own.items()}
         for key, own in times.items()}
        for of in (fmean, median)
    )  # fmt: skip
    counts = {key: {phase: len(ms) for phase, ms in own.items()} for key, own in times.items()}
    reasons = loss_reasons(tuple(key.replace("_", "-") for key in keys), tuple(losses.values()))
    if pair.word not in ("equal", "close"):
        reasons.append(f"the pair {pair.text}" if pair.word else "no iteration to compare")
    reasons += log_reasons(reference, ours)
    reasons += timing_reasons([own["iteration"] for own in counts.values()], warmup)
    reasons += [ON_CPU] if reference.on_cpu or ours.on_cpu else []
    ratios = _ratios(medians)
    return {
        "iterations": {k: [r.iteration_s for r in log.iterations] for k, log in logs.items()},
        "losses": {k: [_finite(r.best_loss) for r in log.iterations] for k, log in logs.items()},
        "verdict": {key: loss.word for key, loss in losses.items()} | {"pair": pair.word},
        "verdict_detail": {key: _loss_detail(loss) for key, loss in losses.items()}
        | {
            "pair": {
                "text": pair.text,
                "judged_on": pair.judged_on,
                "exact": pair.exact,
                "compared_iterations": pair.num_losses,
                "from_iteration": pair.from_iteration,
                "largest_difference": _finite(pair.largest_difference),
                "largest_difference_iteration": pair.largest_at,
                "state_differs": list(pair.state_differs),
            },
        },
        "ratio": _ratios(means),
        "ratio_of_medians": ratios,
        "mean_ms": means,
        "median_ms": medians,
        "timed_iterations": counts,
        "speedup": None if reasons else ratios["iteration"],
        "speedup_withheld": "; ".join(reasons) or None,
        "warmup": warmup,
        "tolerance": tolerance,
        "notes": _notes(logs, pair),
    }


def loss_reasons(names: tuple[str, ...], verdicts: tuple[LossVerdict, ...]) -> list[str]:
    """Return why the losses of runs allow no speed-up, if they do not."""
    return [
        f"the loss of {name} is {verdict.text}" if verdict.word else f"{name} has no loss"
        for name, verdict in zip(names, verdicts, strict=True)
        if verdict.failed or not verdict.word
    ]


def timing_reasons(timed: list[int], warmup: int) -> list[str]:
    """Return why so many timed iterations of runs allow no speed-up, if they do not."""
    if min(timed) >= MINIMUM_TIMED:
        return []
    return [
        f"{min(timed)} timed iterations after a warm-up of {warmup}, "
        f"at least {MINIMUM_TIMED} are needed"
    ]


def log_reasons(reference: Log, ours: Log) -> list[str]:
    """Return why two logs, of which no run folder tells more, allow no speed-up, if they do not."""
    return [
        *same_log_reasons(reference, ours),
        *_other_work_reasons(reference, ours),
        *_overlap_reasons(reference, ours),
        *_unread_loss_reasons(reference, ours),
    ]


def _other_work_reasons(reference: Log, ours: Log) -> list[str]:
    """Say what both logs state, and state otherwise: the work of an iteration is another one."""
    sides = [_stated(log) for log in (reference, ours)]
    if (reference.metrics is None) != (ours.metrics is None):
        # One side counts what tensor-parallel ranks share once, the other one once a rank.
        sides[0]["parameters"] = None
    pairs = ((title, *(side.get(name) for side in sides)) for name, title in _OF_PAIRS.items())
    return [
        f"{title} differs ({a} and {b})"
        for title, a, b in pairs
        if a is not None and b is not None and a != b
    ]


def _stated(log: Log) -> dict[str, Any]:
    of_run = ("world_size", "parameters", "vocab_size", "device_name")
    return log.settings | log.stated | {name: getattr(log, name) for name in of_run}


def _overlap_reasons(reference: Log, ours: Log) -> list[str]:
    """Say that two logs are of other iterations, of which they share next to nothing."""
    sides = [_numbers(log) for log in (reference, ours)]
    common, shorter = len(sides[0] & sides[1]), min(map(len, sides))
    if sides[0] == sides[1] or (common >= FEWEST_COMMON and 2 * common > shorter):
        return []
    lengths = f"{len(sides[0])} and {len(sides[1])}"
    return [
        f"{common} of {lengths} iterations in common: at least {FEWEST_COMMON}, and more than half "
        "of the shorter log, are needed"
    ]


def _unread_loss_reasons(reference: Log, ours: Log) -> list[str]:
    """Say that a loss is unknown, which may be the one that is lost; exact figures tell it."""
    unread = [
        (log, reject.line)
        for log in (reference, ours)
        for reject in log.rejects
        if reject.reason in UNREAD_LOSSES and not log.metrics
    ]
    return [f"the loss in line {line} of {log.path} cannot be read" for log, line in unread[:1]]


def same_log_reasons(reference: Log, ours: Log) -> list[str]:
    """Return that two files hold one log, if they do: packed, renamed or with other ends of lines.

    No two runs take the same time to the last digit.
    """
    if not ours.digest or reference.digest != ours.digest:
        return []
    return [f"{ours.path} says the same as {reference.path}, line by line: one log given twice"]


def log_notes(log: Log) -> list[str]:
    """Return the notes of one log, its first rejects included."""
    notes = list(log.notes)
    if log.ends_mid_line:
        notes.append(
            f"the log ends in the middle of a line; its {len(log.iterations)} complete iterations "
            "are used"
        )
    notes += [f"line {r.line} left out: {r.reason}" for r in log.rejects[:_SHOWN_REJECTS]]
    more = len(log.rejects) - _SHOWN_REJECTS
    return [*notes, f"and {more} more lines left out"] if more > 0 else notes


def _notes(logs: dict[str, Log], pair: PairVerdict) -> list[str]:
    """Say what qualifies the figures: sizes, common iterations, lines left out, a cut log."""
    lengths, compared = [len(log.iterations) for log in logs.values()], pair.num_losses
    notes = [] if pair.word in ("", "equal") else unequal_sizes(*logs.values())
    if lengths != [compared, compared]:
        both = f"{lengths[0]} and {lengths[1]} iterations"
        notes.append(f"{both}; the {compared} that both have were compared")
    if any(log.on_cpu for log in logs.values()):
        notes.append("the model ran on a CPU: times there say nothing about a GPU")
    for name, log in zip((next(iter(logs)), "ours"), logs.values(), strict=True):
        notes += [f"{name}: {note}" for note in log_notes(log)]
    return notes


def _loss_detail(loss: LossVerdict) -> dict[str, Any]:
    return {
        "text": loss.text,
        "from_iteration": loss.from_iteration,
        "frozen_at": loss.at,
        "frozen_at_name": loss.at_name,
    }


def _numbers(log: Log, warmup: int = 0) -> set[int]:
    return {record.iteration for record in after_warmup(log.iterations, warmup)}


def _times(log: Log, phase: str, timed: Set[int]) -> list[float]:
    return finite([r.phase_ms(phase) for r in log.iterations if r.iteration in timed])


def _ratios(times_ms: dict[str, dict[str, float | None]]) -> dict[str, float | None]:
    """How many times faster ours is than the reference, by phase."""
    theirs, ours = times_ms.values()
    return {
        phase: above / below if above is not None and (below := ours[phase]) else None
        for phase, above in theirs.items()
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
