"""A loss that is no number is NaN for every reader, however its program spells it."""

import json
import math

import pytest

from parse.diagnose import diagnose
from parse.figures import figure
from parse.log import read_log
from parse.verdict import compare, judge_log

SPELLINGS = (
    *("nan", "NaN", "-nan(ind)", "nan(snan)", "1.#QNAN", "-1.#IND", "tensor(nan)"),
    *("tensor(nan, device='cuda:0')", "np.float64(nan)", "None", "null"),
)
LOSSES = tuple(9.0 - 0.25 * at for at in range(12))
LOST_FROM = 7


def lost(line):
    """Lines of twelve steps, each made of its number and its loss.

    Who writes them says how a loss is spelt from step ``LOST_FROM`` on, or nothing.
    """
    return lambda spelling="": "".join(
        line(at, spelling if spelling and at >= LOST_FROM else f"{loss:.6f}") + "\n"
        for at, loss in enumerate(LOSSES, 1)
    )


def seconds(at):
    return f"0:{at // 3:02}:{at % 3 * 20:02}"


WRITERS = {
    "Megatron": lost(
        lambda at, loss: (
            f" iteration {at}/ 12 | consumed samples: {4 * at} | elapsed time "
            f"per iteration (ms): {500 + at}.0 | global batch size: 4 | lm loss: {loss} "
            "| loss scale: 1.0 | number of skipped iterations: 0 | number of nan iterations: 0 |"
        )
    ),
    "DeepSpeed's pipeline": lost(
        lambda at, loss: f"steps: {at} loss: {loss} iter time (s): 0.{50 + at} samples/sec: 4.0"
    ),
}
JSON_WRITERS = {
    "LLaMA-Factory": lost(
        lambda at, loss: (
            f'{{"current_steps": {at}, "total_steps": 12, "loss": {loss}, '
            f'"elapsed_time": "{seconds(at)}"}}'
        )
    ),
    "a text": lost(
        lambda at, loss: (
            f'{{"current_steps": {at}, "loss": "{loss}", "lr": 1e-05, '
            f'"elapsed_time": "{seconds(at)}"}}'
        )
    ),
    "Composer": lost(
        lambda at, loss: (
            f"[batch={at}/12]:\n\t Train time/batch: {at - 1}\n\t Train loss/train/total: {loss}\n"
        )
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("program", WRITERS)
def test_a_lost_loss_is_nan_in_a_line_of_any_program(write_log, program, spelling):
    check(write_log, "run.log", WRITERS[program], spelling)


@pytest.mark.parametrize(
    ("program", "spelling"),
    [
        *(("LLaMA-Factory", word) for word in ("NaN", "nan", "null", "-nan(ind)", "1.#QNAN")),
        *(("a text", word) for word in SPELLINGS),
        *(("Composer", word) for word in ("nan", "-nan(ind)", "None")),
    ],
)
def test_a_lost_loss_is_nan_in_json(write_log, program, spelling):
    check(write_log, "trainer_log.jsonl", JSON_WRITERS[program], spelling)


def check(write_log, name, write, spelling):
    whole = read_log(write_log(f"a/{name}", text=write()))
    path = write_log(f"b/{name}", text=write(spelling))
    log = read_log(path)
    assert len(log.iterations) == len(whole.iterations) == len(LOSSES)
    assert judge_log(log).text == f"nan from iteration {LOST_FROM}"
    result = compare(whole, log)
    assert result["speedup"] is None
    assert f"the loss of ours is nan from iteration {LOST_FROM}" in result["speedup_withheld"]
    found = diagnose(path)
    assert (found.num_steps, [one.name for one in found.illnesses]) == (12, ["loss-nan"])


def test_a_finite_loss_in_a_wrapper_is_its_number(write_log):
    log = read_log(write_log(text=WRITERS["Megatron"]("tensor(7.5, device='cuda:0')")))
    assert log.iterations[-1].loss == 7.5
    assert [figure(text) for text in ("-inf", "1.#INF", "1e3", "np.float64(2)")] == [
        -math.inf, math.inf, 1000.0, 2.0,
    ]  # fmt: skip


def test_a_null_of_an_evaluation_or_of_the_end_is_no_loss(write_log):
    steps = JSON_WRITERS["LLaMA-Factory"]()
    empty = {"current_steps": 12, "total_steps": 12, "loss": None}
    others = (
        {**empty, "eval_loss": 7.5},
        {**empty, "eval_loss": None, "predict_loss": None, "learning_rate": None, "epoch": 3.0},
        {**empty, "eval_accuracy": 0.5},
    )
    text = steps + "".join(json.dumps(one) + "\n" for one in others)
    path = write_log("trainer_log.jsonl", text=text)
    log = read_log(path)
    assert (len(log.iterations), log.notes, log.iterations[-1].loss) == (12, [], 6.25)
    assert "loss-nan" not in [one.name for one in diagnose(path).illnesses]


def test_a_dictionary_without_its_loss_is_a_step_that_lost_it(write_log):
    good = "".join(f"{{'loss': {9 - at}, 'learning_rate': 1e-05}}\n" for at in range(3))
    path = write_log(text=good + "{'loss': None, 'learning_rate': 1e-05}\n")
    assert [(one.name, one.line) for one in diagnose(path).illnesses] == [("loss-nan", 4)]


@pytest.mark.parametrize("damaged", ["8.5x", "", "?"])
def test_a_loss_that_cannot_be_read_allows_no_speed_up(write_log, damaged):
    write = WRITERS["Megatron"]
    whole = read_log(write_log("a.log", text=write()))
    text = write().replace("lm loss: 8.500000", f"lm loss: {damaged}")
    log = read_log(write_log("b.log", text=text))
    result = compare(whole, log)
    assert result["speedup"] is None
    assert "cannot be read" in result["speedup_withheld"] or judge_log(log).word == "nan"
    # What the line says else may be damaged without a word on the loss.
    other = read_log(write_log("c.log", text=write().replace("(ms): 503.0", "(ms): 50x")))
    assert len(other.iterations) == 11
    assert compare(whole, other)["speedup"] is not None
