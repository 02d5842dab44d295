import math
import random
from pathlib import Path

import pytest
from programs import parse_logs

from parse.compare import compare_points
from parse.log import read_log
from parse.run import label_runs, read_sweep
from parse.verdict import compare, judge_log, judge_loss, judge_pair

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
        ((11.62, 11.63, 21.97, 34.86, 15.13), "undecided", None),
        ((11.64, 11.62, 25.17, 17.36, 14.05, 19.01, 11.3, 11.33, 11.02, 11.01), "undecided", None),
        # No more than noise, whichever way the last one points.
        ((11.44, 11.45, 11.5, 11.53, 11.4, 11.45, 11.4, 11.49, 11.45, 11.49), "undecided", None),
        ((11.43, 11.4, 11.42, 11.34, 11.45, 11.37, 11.47, 11.52, 11.36, 11.35), "undecided", None),
        ((9.0,), "undecided", None),
        ((8.0, 8.5, 8.9), "undecided", None),
        ((8.0, 8.5, 9.1, 9.3, 9.4), "undecided", None),
        ((8.0, 8.5, 9.1, 9.3, 9.4, 9.5), "diverged", None),
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
    assert (close.word, close.largest_at) == ("close", 2)
    assert close.largest_difference == pytest.approx(5e-4)
    differs = pair(write_log, base, (9.0, 8.5005, 8.1))
    assert (differs.word, differs.from_iteration) == ("differs", 3)
    assert pair(write_log, base, (9.0, 8.5005, 8.0), tolerance=1e-4).word == "differs"
    assert pair(write_log, base, (9.0, 8.5, math.nan)).from_iteration == 3
    assert pair(write_log, (9.0, math.nan), (9.0, math.nan)).word == "equal"


def test_only_common_iterations_are_compared(write_log):
    verdict = pair(write_log, (9.0, 8.5, 8.0), (9.0, 8.5))
    assert (verdict.word, verdict.num_losses) == ("equal", 2)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, "equal (5 losses, 5 gradient norms, weights and optimizer state)"),
        # A last bit that print does not show.
        ({"losses": (9.0, 8.5, 8.25, 8.125, math.nextafter(8.0, 9)), "digest": "bb"},
         "close (5 losses, largest difference 1.78e-15 at iteration 5)"),
        # It began earlier than where it is large.
        ({"losses": (9.0, 8.5, math.nextafter(8.25, 9), 8.125, 8.5)},
         "differs from iteration 3 (5 losses, largest difference 0.5 at iteration 5)"),
        ({"norms": [0.5, 0.5, 0.5, 0.5, 0.5000001]},
         "close (5 losses, losses equal, gradient norms differ by up to 2e-07 of their size)"),
        ({"digest": "bb"},
         "differs: the losses agree, the final weights and optimizer state do not"),
        # Digests of runs of different length are not compared.
        ({"losses": (9.0, 8.5, 8.25), "digest": "bb"}, "equal (3 losses, 3 gradient norms)"),
    ],
)  # fmt: skip
def test_words_for_a_pair_of_exact_figures(sweep_writer, changed, text):
    folder = sweep_writer.write((("stock", 0), ("stride", 2)), stride=changed)
    assert judge_pair(*(run.log for run in read_sweep(folder))).text == text


def test_two_logs_beside_one_metrics_file_are_judged_by_print(sweep_writer):
    folder = sweep_writer.write((("stock", 0),))
    log = next(folder.rglob("*.log"))
    other = log.with_name("other.log")
    other.write_text(log.read_text())
    verdict = judge_pair(read_log(log), read_log(other))
    assert verdict.text == "equal (5 losses as printed)"
    assert judge_pair(read_log(log), read_log(log)).exact


def scaled(write_log, recipe, skipped, losses=(9.0, 8.5, 8.25, 8.125)):
    """A log whose iterations say how many updates the loss scaler left out."""
    text = recipe(losses).text()
    for count in skipped:
        text = text.replace("skipped iterations:   0", f"skipped iterations: {count:3}", 1)
    return read_log(write_log("scaled.log", text=text))


def test_a_run_all_of_whose_updates_were_skipped_is_no_result(write_log, recipe):
    verdict = judge_log(scaled(write_log, recipe, (1, 1, 1, 1)))
    assert (verdict.word, verdict.failed) == ("skipped", True)
    assert verdict.text == "that of unchanged weights: all 4 updates were skipped"


@pytest.mark.parametrize("skipped", [(), (1,), (1, 1, 1)])
def test_a_loss_scaler_that_finds_its_scale_is_no_failure(write_log, recipe, skipped):
    assert judge_log(scaled(write_log, recipe, skipped)).word == "trains"


def test_updates_are_counted_over_lines_of_several_iterations(write_log, recipe):
    def of(first, second):
        log = scaled(write_log, recipe, (first, second), losses=(9.0, 8.5))
        for number, record in zip((10, 20), log.iterations, strict=True):
            record.iteration = number
        return judge_log(log).word

    assert of(10, 10) == "skipped"
    assert of(10, 9) != "skipped"


def test_a_gate_does_not_let_a_skipped_run_pass(sweep_writer, write_log):
    # Both skip every update: their losses are equal, and neither is a result.
    sweep_writer.write(engines=(("stock", 0), ("stride", 2)))
    for path in sweep_writer.folder.rglob("*.log"):
        path.write_text(
            path.read_text().replace(
                "iterations:   0 | number of nan", "iterations:   1 | number of nan"
            )
        )
    runs = read_sweep(sweep_writer.folder)
    label_runs(runs)
    [item] = compare_points(runs, 1)
    assert item.equality == "equal"
    assert not any(finding.holds for finding in item.findings)
    assert "loss: that of unchanged weights" in item.findings[0].verdict
    assert "skipped" in item.withheld or "unchanged weights" in item.withheld
    assert [run.status for run in runs] == ["skipped", "skipped"]


HEAD = (
    "using world size: {0}, data-parallel-size: {0}, sequence-parallel size: 1, "
    "tensor-model-parallel size: 1, pipeline-model-parallel size: 1 "
)
PACES = tuple(0.5 + 0.01 * at for at in range(12)), tuple(0.25 + 0.01 * at for at in range(12))
FALLING = tuple(9.0 - 0.25 * at for at in range(12))


def both(write_log, second, first=None, name="{}.log"):
    """Compare two logs that train alike, the second twice as fast, each with changed fields."""
    sides = []
    for at, (pace, changed) in enumerate(zip(PACES, (first or {}, second), strict=True)):
        fields = {"losses": FALLING, "seconds": pace, **changed}
        sides.append(read_log(write_log(name.format(at), **fields)))
    return compare(*sides)


def arguments(**sizes):
    return [HEAD.format(1), *(f"  {name} {'.' * 20} {size}" for name, size in sizes.items())]


@pytest.mark.parametrize(
    ("second", "first", "why"),
    [
        ({"head": [HEAD.format(4)]}, {"head": [HEAD.format(1)]},
         "number of ranks differs (1 and 4)"),
        ({"batch": 8}, {}, "global batch differs (2 and 8)"),
        ({"head": arguments(num_layers=2, hidden_size=256)},
         {"head": arguments(num_layers=32, hidden_size=4096)},
         "number of layers differs (32 and 2); hidden size differs (4096 and 256)"),
        ({"head": arguments(micro_batch_size=1)}, {"head": arguments(micro_batch_size=2)},
         "micro-batch differs (2 and 1)"),
        ({"head": [" > padded vocab (size: 9) with 1 dummy tokens (new size: 10)"]},
         {"head": [" > padded vocab (size: 9) with 3 dummy tokens (new size: 12)"]},
         "vocabulary size differs (12 and 10)"),
    ],
)  # fmt: skip
def test_logs_that_state_other_work_have_no_speed_up(write_log, second, first, why):
    result = both(write_log, second, first)
    assert (result["verdict"]["pair"], result["speedup"]) == ("equal", None)
    assert result["speedup_withheld"] == why


def test_another_length_of_sequences_is_other_work(write_log):
    first, second = (write_log(f"{at}.log", losses=FALLING, seconds=PACES[at]) for at in (0, 1))
    second.write_text(second.read_text().replace("actual seqlen:    64", "actual seqlen:    32"))
    result = compare(read_log(first), read_log(second))
    assert result["speedup_withheld"] == "sequence length differs (64 and 32)"


def test_a_run_that_starts_anew_states_its_own_work(write_log, recipe):
    earlier = recipe(losses=FALLING, batch=8).text()
    first = write_log("0.log", losses=FALLING, seconds=PACES[0])
    second = write_log("1.log", text=earlier + recipe(losses=FALLING, seconds=PACES[1]).text())
    result = compare(read_log(first), read_log(second))
    assert result["speedup"] == pytest.approx(0.56 / 0.31)


def test_stages_of_a_pipeline_count_as_ranks(write_log):
    name = "log-7B-tp1-pp2-dp2-l32-h4-a2-sl64-gbs2-mbs1-ratio1-subg1-prefetch0-flush_async0-{}.log"
    result = both(write_log, {"head": []}, {"head": ["using world size: 4"]}, name)
    assert result["speedup_withheld"] is None


def test_what_an_engine_may_choose_or_one_log_alone_states_withholds_nothing(write_log):
    zero = "[1] [INFO] [config.py:1:print]   zero_config .... stage=3 sub_group_size={} ratio={} x"
    own = ({"head": [HEAD.format(1), zero.format(*sizes)]} for sizes in ((100, 1.0), (200, 0.5)))
    assert both(write_log, *own)["speedup"] == pytest.approx(0.56 / 0.31)
    stated = {"head": arguments(num_layers=2, micro_batch_size=1)}
    assert both(write_log, stated, {"head": []})["speedup_withheld"] is None


def test_the_text_of_a_log_goes_before_its_name(write_log):
    name = "log-7B-tp1-dp1-l32-h4-a2-sl64-gbs2-mbs2-ratio1-subg100-prefetch{0}-flush_async{0}.log"
    first, second = {"head": [HEAD.format(1)]}, {"head": [HEAD.format(4)]}
    result = both(write_log, second, first, name)
    assert result["speedup_withheld"] == "number of ranks differs (1 and 4)"
    assert "ours: its name says dp 1, its text 4: the text counts" in result["notes"]
    other = {"head": arguments(num_layers=2, micro_batch_size=2)}
    result = both(write_log, other, first, name)
    assert result["speedup_withheld"] == "number of layers differs (32 and 2)"
    assert result["notes"] == ["ours: its name says num_layers 32, its text 2: the text counts"]


def test_a_name_that_contradicts_its_log_is_told(write_log, tmp_path, capsys):
    name = "log-7B-tp1-dp4-l2-h4-a2-sl64-gbs2-mbs1-ratio1-subg100-prefetch0-flush_async0.log"
    path = write_log(name, losses=FALLING)
    assert parse_logs([str(path), "--out", str(tmp_path / "out")]) == 0
    said = "its name says dp 4, its text 1: the text counts"
    assert capsys.readouterr().err == f"parse: {path}: {said}\n"


def part(write_log, recipe, numbers):
    """Compare all of twelve iterations with some of them."""
    paths = []
    for at, pace in enumerate(PACES):
        made = recipe(losses=FALLING, seconds=pace)
        head, *blocks = made.blocks()
        kept = blocks if at == 0 else [blocks[number - 1] for number in numbers]
        text = "".join(f"{line}\n" for block in [head, *kept] for line in block)
        paths.append(write_log(f"{at}.log", text=text))
    return compare(*map(read_log, paths))


@pytest.mark.parametrize(
    ("numbers", "why"),
    [
        ([1, 2, 3], "3 of 12 and 3 iterations in common: at least 5, and more than half of the "),
        ([1, 2, 3, 4], "4 of 12 and 4 iterations in common: at least 5"),
    ],
)
def test_logs_with_few_iterations_in_common_have_no_speed_up(write_log, recipe, numbers, why):
    result = part(write_log, recipe, numbers)
    assert result["verdict"]["pair"] == "equal"
    assert result["speedup_withheld"].startswith(why)


def test_only_common_iterations_are_timed(write_log, recipe):
    result = part(write_log, recipe, range(1, 7))
    assert result["speedup_withheld"] is None
    assert [times["iteration"] for times in result["timed_iterations"].values()] == [5, 5]
    assert result["speedup"] == pytest.approx(0.53 / 0.28)


def test_half_of_the_shorter_log_is_too_little(write_log, recipe):
    paths = []
    for at, (pace, first) in enumerate(zip(PACES, (1, 7), strict=True)):
        made = recipe(losses=tuple(9.0 - 0.25 * i for i in range(18)), seconds=pace + pace[:6])
        head, *blocks = made.blocks()
        lines = [line for block in [head, *blocks[first - 1 : first + 11]] for line in block]
        paths.append(write_log(f"{at}.log", text="".join(f"{line}\n" for line in lines)))
    result = compare(*map(read_log, paths))
    assert (result["verdict"]["pair"], result["speedup"]) == ("equal", None)
    assert result["speedup_withheld"].startswith("6 of 12 and 12 iterations in common")


def test_one_loss_is_not_called_losses(write_log):
    assert pair(write_log, (9.0,), (9.0,)).text == "equal (1 loss as printed)"
    assert "(1 loss, largest" in pair(write_log, (9.0,), (8.0,)).text
