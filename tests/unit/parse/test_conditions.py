"""What figures of a run show, the lines that show it, and advice that fits what the log states."""

import itertools
import math
import random

import pytest

from parse.diagnose import diagnose
from parse.log import read_log
from parse.verdict import judge_log

VOCABULARY = "> padded vocab (size: 50257) with 47 dummy tokens (new size: 50304)\n"
WARMUP = "  lr_warmup_iters ................................. 1\n"
GUESS = math.log(50304)


def megatron(losses, timers=(), rates=(3e-4,) * 20):
    """Lines of Megatron; it leaves a loss of None out."""
    lines = []
    shares = itertools.chain(timers, itertools.repeat(None))
    for at, (loss, share, rate) in enumerate(zip(losses, shares, rates, strict=False), 1):
        if share is not None:
            lines.append(f"time (ms) | fwd: 50.00 | bwd: 50.00 | step: {share:.2f}")
        of_loss = "" if loss is None else f" lm loss: {loss:.6E} |"
        lines.append(
            f" iteration {at:8d}/     10 | consumed samples: {at:12d} | elapsed time per iteration "
            f"(ms): 16343.6 | learning rate: {rate:.3E} | global batch size:     1 |{of_loss} loss "
            "scale: 1.0 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        )
    return "".join(f"{line}\n" for line in lines)


def found(tmp_path, text, name="run.log"):
    path = tmp_path / name
    path.write_text(text)
    return diagnose(path)


def only(diagnosis):
    (illness,) = diagnosis.illnesses
    return illness


THROWN_OFF = [11.63, 11.62, 20.2, 24.2, 14.9, 44.6, 16.3, 13.1, 12.51, 12.49]


def test_a_loss_that_its_first_updates_threw_off_is_unstable(tmp_path):
    told = only(found(tmp_path, WARMUP + VOCABULARY + megatron(THROWN_OFF)))
    assert (told.name, told.line) == ("loss-unstable", 5)
    for words in (
        "from 11.62 to 20.2 at loss 3 of 10 and to 44.6 at loss 6, 3.8 times the first one",
        "all 10 are worse than an even guess: ln(50304) = 10.826",
        "learning rate up to 0.0003, lr_warmup_iters 1 (line 1)",
    ):
        assert words in told.evidence


def test_five_losses_and_no_word_on_the_warm_up_are_enough(tmp_path):
    told = only(found(tmp_path, VOCABULARY + megatron([11.61, 11.63, 22.1, 34.8, 15.1])))
    assert told.name == "loss-unstable"
    assert "lr_warmup" not in told.evidence


RANDOM = random.Random(5)
HEALTHY = {
    "falls": [10.9 - 0.1 * at for at in range(10)],
    "begins above a guess": [11.64, 11.6, 11.5, 11.3, 11.2, 11.1, 10.95, 10.9, 10.87, 10.84],
    "begins above a guess, five": [11.64, 11.5, 11.3, 11.1, 10.9],
    "rises at first": [11.64, 11.9, 12.6, 12.2, 11.7, 11.4, 11.2, 11.1, 11.0, 10.9],
    "is noisy": [11.6 - 0.05 * at + RANDOM.gauss(0, 0.3) for at in range(10)],
    "one hard batch, then better than a guess": [11.6, 11.5, 15.2, 12.1, 11.2, 10.9, 10.5, 10.2],
    "fine-tuning, each sample another loss": [0.4, 1.9, 0.7, 2.8, 1.1, 0.3, 2.2, 0.9, 1.6, 0.5],
    "two losses": [11.6, 24.0],
}


@pytest.mark.parametrize("losses", HEALTHY.values(), ids=HEALTHY)
def test_healthy_short_runs_are_not_unstable(tmp_path, losses):
    assert not found(tmp_path, VOCABULARY + megatron(losses)).illnesses


def test_without_a_vocabulary_no_jump_is_judged(tmp_path):
    told = found(tmp_path, megatron([11.61, 11.63, 22.1, 34.8, 15.1]))
    assert not told.illnesses
    assert "5 losses are too few to tell if it falls" in told.not_judged[0]


def test_a_loss_that_diverges_is_shown_where_it_jumps(tmp_path):
    losses = [11.65, 11.63, 24.15, 18.1, 12.5, 12.78, 13.71, 14.02, 12.9, 12.92]
    told = only(found(tmp_path, VOCABULARY + megatron(losses)))
    assert (told.name, told.line) == ("loss-diverging", 4)


def test_a_loss_that_megatron_leaves_out_is_said_to_be_nan(tmp_path):
    told = only(found(tmp_path, VOCABULARY + megatron([11.65, 10.82584, None])))
    assert (told.name, told.line) == ("loss-nan", 4)
    assert "the line has none, which Megatron leaves out when it is NaN" in told.evidence
    assert "exactly ln(50304)" in told.evidence
    assert "right after the first update: look at what the update wrote" in told.evidence


@pytest.mark.parametrize("losses", [[11.65, 10.83, None], [10.82584, None]])
def test_a_loss_near_a_guess_or_before_any_update_is_no_clue(tmp_path, losses):
    told = only(found(tmp_path, VOCABULARY + megatron(losses)))
    assert "look at what the update wrote" not in told.evidence


def test_a_loss_that_is_printed_as_nan_is_not_left_out(tmp_path):
    assert (
        "leaves out" not in only(found(tmp_path, "step 1 loss: 2.0\nstep 2 loss: nan\n")).evidence
    )


def advice(diagnosis, name):
    (text,) = (one.remedy(diagnosis.states) for one in diagnosis.illnesses if one.name == name)
    return text


@pytest.mark.parametrize(
    ("stated", "is_advised"),
    [
        ("", True),
        ("  bf16 ............................................ False\n", True),
        ("  fp16 ............................................ True\n", True),
        ("  bf16 ............................................ True\n", False),
        ("[INFO] [config.py:1002:print]   bfloat16_enabled ............. True\n", False),
        ("[INFO] [Rank 0] Creating torch.bfloat16 ZeRO stage 2 optimizer\n", False),
    ],
)
def test_bf16_is_advised_where_the_log_does_not_state_it(tmp_path, stated, is_advised):
    diagnosis = found(tmp_path, stated + megatron([11.65, None]))
    assert ("bf16" in advice(diagnosis, "loss-nan")) == is_advised


def test_what_hugging_face_prints_is_told_of_its_logs_alone(tmp_path):
    still = "{'loss': 2.1234567, 'grad_norm': 1.0, 'learning_rate': 1e-05, 'epoch': 0.1}\n"
    assert "Hugging Face" in advice(found(tmp_path, still * 9), "loss-frozen")
    diagnosis = found(tmp_path, VOCABULARY + megatron([10.82584] * 9))
    assert "Hugging Face" not in advice(diagnosis, "loss-frozen")


PLUGIN = '    "deep_optimizer_states": {\n        "enabled": true\n    }\n'


@pytest.mark.parametrize(
    ("stated", "name", "is_overlapped"),
    [
        ("", "run.log", False),
        ("", "log-7B-tp1-dp1-prefetch1-flush_async1-opt_gaps5.log", True),
        ("", "log-7B-tp1-dp1-prefetch0-flush_async0-opt_gaps5.log", False),
        ("", "log-tiny-tp1-dp1-engine_stride.log", True),
        ("", "log-tiny-tp1-dp1-engine_stock.log", False),
        ("zero_config ... prefetch_optimizer=True, part_grads_async=False)\n", "a", True),
        ("zero_config ... prefetch_optimizer=False, part_grads_async=False)\n", "a", False),
        ('    "part_grads_async": 1, \n', "run.log", True),
        (PLUGIN, "run.log", True),
        (PLUGIN.replace("true", "false"), "run.log", False),
    ],
)  # fmt: skip
def test_a_run_that_overlaps_its_update_is_not_told_to(tmp_path, stated, name, is_overlapped):
    losses = [9 - 0.1 * at for at in range(6)]
    diagnosis = found(tmp_path, stated + megatron(losses, timers=[300] * 6), name)
    text = advice(diagnosis, "step-over-half")
    assert ("Or overlap the update" in text) == (not is_overlapped)
    assert ("overlaps its update already" in text) == is_overlapped


def test_a_slow_step_is_shown_by_a_line_that_counts(tmp_path):
    """The first iteration sets up; the second one here is fast."""
    losses = [9 - 0.1 * at for at in range(6)]
    told = only(found(tmp_path, megatron(losses, timers=[900, 10, 300, 300, 300, 300])))
    assert (told.name, told.line) == ("step-over-half", 5)


FLAT = [11.45, 11.45, 11.5, 11.53, 11.4, 11.45, 11.4, 11.49, 11.45, 11.49]


@pytest.mark.parametrize("losses", [FLAT, THROWN_OFF[:5]], ids=["flat", "jumps"])
def test_both_readers_tell_the_same_of_a_loss_no_better_than_a_guess(tmp_path, losses):
    rates = [3e-4 - 1e-6 * at for at in range(10)]
    told = only(found(tmp_path, VOCABULARY + megatron(losses, rates=rates)))
    verdict = judge_log(read_log(tmp_path / "run.log"))
    assert verdict.word == "undecided"
    assert verdict.remark
    assert told.evidence.startswith(verdict.remark)
    assert verdict.text.endswith(verdict.remark)


def test_a_loss_still_in_its_warm_up_gets_no_remark(tmp_path):
    path = tmp_path / "run.log"
    path.write_text(VOCABULARY + megatron(FLAT, rates=[1e-5 * at for at in range(1, 11)]))
    assert not judge_log(read_log(path)).remark
    assert not diagnose(path).illnesses


def test_the_figures_of_an_undecided_loss_are_explained(tmp_path):
    diagnosis = found(tmp_path, megatron([2.0, 2.3, 1.9, 2.2, 2.0, 2.1, 2.2, 2.0]))
    assert "medians of its first and last third" in diagnosis.not_judged[0]
    assert "standard deviation around its trend is" in diagnosis.not_judged[0]
