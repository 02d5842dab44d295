import math

import pytest

from parse.compare.verdict import judge_loss, judge_pair
from parse.log.read import read_log


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
    ],
)
def test_words_for_a_loss(losses, word, from_iteration):
    verdict = judge_loss(numbered(*losses))
    assert (verdict.word, verdict.from_iteration) == (word, from_iteration)


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
