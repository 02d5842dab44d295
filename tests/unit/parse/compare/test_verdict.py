import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

from parse.compare.verdict import judge_loss, judge_pair
from parse.log.read import read_log
from parse.verdict import main as verdict_of

ROOT = Path(__file__).resolve().parents[4]


def numbered(*losses):
    return list(enumerate(losses, 1))


@pytest.mark.parametrize(
    ("losses", "word", "from_iteration"),
    [
        ((9.0, 8.0, 7.0), "trains", None),
        ((9.0, 8.0, 8.0), "trains", None),
        ((9.0, 8.0, 8.0, 8.0), "frozen", 2),
        ((8.0, 8.0, 8.0), "frozen", 1),
        ((8.0, 8.0, 8.0, 7.9), "trains", None),
        ((9.0, math.nan, 8.0), "nan", 2),
        ((9.0, 8.0, -math.inf), "nan", 3),
        ((math.nan, 8.0, 8.0, 8.0), "nan", 1),
        ((), "", None),
        ((None, None), "", None),
        ((9.0, None, 7.0), "trains", None),
        # Losses of published runs: a spike that ends above the start, and one that comes back.
        ((11.6, 11.6, 24.2, 18.1, 12.5, 12.8, 13.7, 14.0, 12.9, 12.9), "diverged", None),
        ((11.62, 11.63, 21.97, 34.86, 15.13), "diverged", None),
        ((11.64, 11.62, 25.17, 17.36, 14.05, 19.01, 11.3, 11.33, 11.02, 11.01), "undecided", None),
        # No more than noise, whichever way the last one points.
        ((11.44, 11.45, 11.5, 11.53, 11.4, 11.45, 11.4, 11.49, 11.45, 11.49), "undecided", None),
        ((11.43, 11.4, 11.42, 11.34, 11.45, 11.37, 11.47, 11.52, 11.36, 11.35), "undecided", None),
        ((9.0,), "undecided", None),
        ((8.0, 8.5, 8.9), "undecided", None),
        ((8.0, 8.5, 9.1), "diverged", None),
    ],
)
def test_words_for_a_loss(losses, word, from_iteration):
    verdict = judge_loss(numbered(*losses))
    assert (verdict.word, verdict.from_iteration) == (word, from_iteration)


def test_pure_noise_seldom_passes_for_training_and_never_for_divergence():
    rng = random.Random(7)
    words = [
        judge_loss(numbered(*(5 + rng.gauss(0, 0.1) for _ in range(length)))).word
        for length in (6, 10, 30)
        for _ in range(300)
    ]
    assert "diverged" not in words
    assert words.count("trains") < 0.12 * len(words)
    falling = [
        judge_loss(numbered(*(9 - 0.2 * i + rng.gauss(0, 0.1) for i in range(10)))).word
        for _ in range(100)
    ]
    assert falling.count("trains") > 95


@pytest.mark.parametrize(
    ("losses", "word", "code"),
    [((9.0, 8.5, 8.0), "trains", 0), ((9.0,), "undecided", 0), ((9.0, 9.5, 11.0), "diverged", 1),
     ((9.0, math.nan), "nan", 1), ((9.0, 8.0, 8.0, 8.0), "frozen", 1)],
)  # fmt: skip
def test_the_command_says_whether_a_loss_failed(write_log, capsys, losses, word, code):
    assert verdict_of([str(write_log(losses=losses))]) == code
    said = json.loads(capsys.readouterr().out)
    assert (said["word"], said["failed"]) == (word, bool(code))
    assert said["text"].startswith(word)


def test_the_command_needs_no_package_at_all(write_log):
    command = [sys.executable, "-S", "-E", "-W", "error", "-m", "parse.verdict"]
    log = write_log(losses=(9.0, math.nan))
    done = subprocess.run(
        [*command, str(log)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(done.stdout)["word"] == "nan"


def test_a_log_that_is_not_there_has_no_verdict(tmp_path, capsys):
    assert verdict_of([str(tmp_path / "no.log")]) == verdict_of([]) == 2
    assert "no.log: no such file" in capsys.readouterr().err


def test_a_uniform_softmax_is_named():
    frozen = numbered(11.6, 10.82584, 10.82584, 10.82584)
    assert judge_loss(frozen).text == "frozen at ln(50304) from iteration 2"
    assert judge_loss(numbered(*[math.log(8320) + 4e-5] * 3), [8320]).at_name == "ln(8320)"
    assert judge_loss(numbered(*[math.log(8320) + 6e-5] * 3), [8320]).at_name is None
    assert judge_loss(numbered(*[8.5] * 3)).text == "frozen at 8.5 from iteration 1"


def pair(write_log, first, second, **options):
    logs = (
        read_log(write_log("a/a.log", losses=first)),
        read_log(write_log("b/b.log", losses=second)),
    )
    return judge_pair(*logs, **options)


def test_words_for_a_pair_of_printed_losses(write_log):
    base = (9.0, 8.5, 8.0)
    equal = pair(write_log, base, base)
    assert equal.text == "equal (3 losses as printed)"
    close = pair(write_log, base, (9.0, 8.5005, 8.0))
    assert (close.word, close.largest_at, close.first_difference) == ("close", 2, 2)
    assert close.largest_difference == pytest.approx(5e-4)
    differs = pair(write_log, base, (9.0, 8.5005, 8.1))
    assert (differs.word, differs.from_iteration, differs.first_difference) == ("differs", 3, 2)
    assert pair(write_log, base, (9.0, 8.5005, 8.0), tolerance=1e-4).word == "differs"
    assert pair(write_log, base, (9.0, 8.5, math.nan)).from_iteration == 3
    assert pair(write_log, (9.0, math.nan), (9.0, math.nan)).word == "equal"


def test_only_common_iterations_are_compared_and_that_is_said(write_log):
    verdict = pair(write_log, (9.0, 8.5, 8.0), (9.0, 8.5))
    assert (verdict.word, verdict.num_losses) == ("equal", 2)
    assert verdict.notes == ("3 and 2 iterations; the 2 that both have were compared",)


def exact_pair(sweep_writer, **hybrid):
    from parse.run_folder import read_sweep_run, sweep_entries

    folder = sweep_writer.write((("vanilla", 0), ("hybrid", 2)), hybrid=hybrid)
    logs = [read_sweep_run(entry).log for entry in sweep_entries(folder)]
    return judge_pair(*logs)


def test_equal_over_exact_figures_says_so(sweep_writer):
    verdict = exact_pair(sweep_writer)
    assert verdict.text == "equal (5 losses, 5 gradient norms, weights and optimizer state)"
    assert verdict.exact


def test_a_last_bit_that_print_does_not_show_is_not_equal(sweep_writer):
    losses = (9.0, 8.5, 8.25, 8.125, math.nextafter(8.0, 9))
    verdict = exact_pair(sweep_writer, losses=losses, digest="bb")
    assert (verdict.word, verdict.largest_at) == ("close", 5)


def test_a_gradient_norm_that_differs_is_not_equal(sweep_writer):
    verdict = exact_pair(sweep_writer, norms=[0.5, 0.5, 0.5, 0.5, 0.5000001])
    assert verdict.word == "close"
    assert "gradient norms differ by up to" in verdict.text


def test_equal_losses_over_different_weights_differ(sweep_writer):
    verdict = exact_pair(sweep_writer, digest="bb")
    assert verdict.text == (
        "differs: the losses agree, the final weights and optimizer state do not"
    )


def test_digests_of_runs_of_different_length_are_not_compared(sweep_writer):
    verdict = exact_pair(sweep_writer, losses=(9.0, 8.5, 8.25), digest="bb")
    assert verdict.text == "equal (3 losses, 3 gradient norms)"


def test_two_logs_beside_one_metrics_file_are_judged_by_print(sweep_writer):
    folder = sweep_writer.write((("vanilla", 0),))
    log = next(folder.rglob("*.log"))
    other = log.with_name("other.log")
    other.write_text(log.read_text())
    verdict = judge_pair(read_log(log), read_log(other))
    assert verdict.text == "equal (5 losses as printed)"
    assert judge_pair(read_log(log), read_log(log)).exact
