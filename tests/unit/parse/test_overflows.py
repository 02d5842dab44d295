"""Overflows that a loss scale gets over are healthy, in all words; those to the end are not."""

from itertools import pairwise

import pytest

from parse.diagnose import diagnose

WORDS = {
    "DeepSpeed": "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {}, "
    "reducing to {}",
    "DeepSpeed's fused": "[deepspeed] fp16 dynamic loss scale overflow! Skipping step. "
    "Attempted loss scale: {}, reducing to {}",
    "DeepSpeed before 0.4": "[INFO] [fused_optimizer.py:314:_update_scale] \nGrad overflow on "
    "iteration 7\n[INFO] Reducing dynamic loss scale from {0} to {1}\n"
    "[Rank 0] Overflow detected. Skipping step. Attempted loss scale: {0}, reducing to {1}",
    "its ranks": "Grad overflow on iteration 7\nReducing dynamic loss scale from {} to {}",
    "apex": "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {1}",
    "fairseq": "NOTE: gradient overflow detected, ignoring gradient, setting loss scale to: {1}",
}


def names(tmp_path, lines):
    path = tmp_path / "run.log"
    path.write_text("".join(f"{line}\n" for line in lines))
    return [illness.name for illness in diagnose(path).illnesses]


def overflows(words, count, highest=32):
    scales = [2.0 ** max(highest - at, 0) for at in range(count + 1)]
    return [words.format(*pair) for pair in pairwise(scales)]


def counted(*pairs):
    return [f"[Rank 0] step={steps}, skipped={skipped}, lr=[0.1]" for steps, skipped in pairs]


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_every_wording_is_counted_once(tmp_path, words):
    assert names(tmp_path, overflows(words, 12)) == ["overflow-every-step"]
    path = tmp_path / "run.log"
    assert "12 of the last 12 steps" in diagnose(path).illnesses[0].evidence
    losses = [f"step {at} loss: {2 - 0.01 * at:.4f}" for at in range(30)]
    assert names(tmp_path, overflows(words, 12) + losses) == []


@pytest.mark.parametrize("words", [WORDS["DeepSpeed"], WORDS["DeepSpeed before 0.4"]])
def test_a_scale_that_stays_at_its_minimum_is_told(tmp_path, words):
    assert names(tmp_path, overflows(words, 12, highest=4)) == ["overflow-every-step"]
    assert " to 1.0" in diagnose(tmp_path / "run.log").illnesses[0].evidence


SAID = overflows(WORDS["DeepSpeed"], 7)
OF_COUNTS = {
    "good steps are counted alone": ([*SAID, *counted((10, 7), (20, 7), (30, 7))], False),
    "the log ends with the first count": ([*SAID, *counted((10, 7))], False),
    "every step is skipped": ([*SAID, *counted((7, 7)), *SAID, *counted((14, 14))], True),
    "without a word": (counted((10, 10), (20, 20), (30, 30)), True),
    "some without a word": (counted((10, 2), (20, 2), (30, 3)), False),
    "skipped at first alone": (counted((10, 9), (20, 10), (30, 10), (40, 10)), False),
    "a run that was resumed": ([*SAID, *counted((1007, 20))], True),
    "counts by the timer": (
        [*SAID, *(f"epoch=0/micro_step={at}/global_step={at}, RunningAvg" for at in (10, 20))],
        False,
    ),
    "another rank's words": (
        [f"{rank}: {line}" for line in SAID[:3] for rank in range(4)] + counted((20, 3)), False,
    ),
    "the old timer goes on": ([*SAID, *(f"0/{at}, SamplesPerSec=2.0" for at in range(9))], False),
    "the old timer between": (
        [line for said in SAID for line in (said, *["0/10, SamplesPerSec=2.0"] * 4)], True,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("lines", "is_ill"), OF_COUNTS.values(), ids=OF_COUNTS)
def test_steps_that_are_only_counted_count(tmp_path, lines, is_ill):
    assert names(tmp_path, lines) == ["overflow-every-step"] * is_ill
