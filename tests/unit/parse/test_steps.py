"""A step of training is read in the words of any program."""

import pytest
from programs import parse_logs

from parse.diagnose import diagnose
from parse.lines import Line
from parse.log import read_log
from parse.steps import read_step

# How training programs word a step: number, loss.
OF_STEPS = {
    "torchtune": "1|{0}|Loss: {1}:   3%|#  | {0}/900 [00:09<26:11,  1.02it/s]",
    "NeMo 1": "Epoch 0: :   3%|# | {0}/100 [00:09<01:11, v_num=3-11, reduced_train_loss={1}]",
    "NeMo 2": "Training epoch 0, iteration {0}/99 | lr: 1.5e-07 | global_batch_size: 512 | "
    "peak_memory_usage: 40000 | max_reserved: 42000 | reduced_train_loss: {1} | in s: 9.9",
    "fairseq": "2026-01-01 00:00:00 | INFO | epoch 001:   {0} / 2000 loss={1}, ppl=5",
    "mmengine": "01/02 10:11:12 - INFO - Iter(train) [  {0}/900]  eta: 1:02:33 loss: {1}",
    "OpenRLHF": "Train step of epoch 0:  3%|# | {0}/300 [00:09<11:22,  1.0s/it, gpt_loss={1}]",
    "diffusers": "Steps:  3%|#  | {0}/300 [00:09<11:22,  1.02s/it, lr=1e-05, step_loss={1}]",
    "litgpt": "Epoch 1 | iter {0} step 7 | loss train: {1}, val: n/a | iter time: 200.12 ms",
    "timm": "Train: 0 [  {0}/1251 (  0%)]  Loss: {1} ({1})  Time: 0.5s",
    "a pair": "[1,   {0}] loss: {1}",
    "MaxText": "completed step: {0}, seconds: 1.2, TFLOP/s/device: 180.1, Tokens/s/device: 1200.1, "
    "total_weights: 4096, loss: {1}",
    "brackets": "Epoch [1/3], Step [{0}/300], Loss: {1}",
    "both losses": "step {0}: train loss {1}, val loss 1.7654",
    "an epoch": "Epoch {0} finished, avg loss: {1}",
    "Lightning, rich": "Epoch 0/9 ━━━ {0}/100 0:00:10 • 0:01:20 1.02it/s train_loss: {1}",
    "a fork of Megatron": " iteration       {0}/   900 | elapsed time per iteration (ms): 143.1 | "
    "learning rate 1.0E-03 | total loss {1} | loss {1} | PPL 1.27 | loss scale 65536.0 |speed 4.1",
    "critic": "Epoch: 0 | Step: {0} | Actor Loss: 0.013 | Critic Loss: {1}",
}


@pytest.mark.parametrize("line", OF_STEPS.values(), ids=OF_STEPS)
def test_a_step_is_read_in_the_words_of_every_program(tmp_path, line):
    path = tmp_path / "run.log"
    path.write_text("".join(line.format(at, f"{2 - 0.03 * at:.4f}") + "\n" for at in range(1, 31)))
    found = diagnose(path)
    assert (found.num_steps, found.illnesses) == (30, [])
    path.write_text(path.read_text() + f"{line.format(31, 'nan')}\n")
    assert [(one.name, one.line) for one in diagnose(path).illnesses] == [("loss-nan", 31)]


def composer(losses, head="[epoch={epoch}][batch={batch}/5]:"):
    """A log of Composer, whose epochs have five batches, with an evaluation after each."""
    text = ""
    for at, loss in enumerate(losses):
        text += head.format(epoch=at // 5, batch=at % 5 + 1)
        text += f"\n\t Train time/batch: {at}\n\t Train loss/train/total: {loss}\n"
        text += f"\t Train metrics/train/LanguageCrossEntropy: {loss}\n"
        text += "\t Train l2_norm/grad/global: 1.5000\n\t Train lr-DecoupledAdamW/group0: 0.0000\n"
        if at % 5 == 4:
            text += "[Eval batch=1/1] Eval on eval data:\n\t Eval metrics/eval/Loss: 1.2345\n"
    return text


@pytest.mark.parametrize("source", ["", "0: "])
def test_composers_steps_of_many_lines_are_read_as_others_are(tmp_path, source):
    losses = [f"{9 - 0.1 * at:.4f}" for at in range(12)]
    path = tmp_path / "run.log"
    path.write_text("".join(source + line for line in composer(losses).splitlines(keepends=True)))
    found = diagnose(path)
    assert (found.num_steps, found.software, found.illnesses) == (12, ["Composer"], [])
    records = read_log(path).iterations
    assert [(one.iteration, one.loss) for one in records] == [
        (at + 1, float(loss)) for at, loss in enumerate(losses)
    ]
    assert records[-1].printed == {"grad_norm": 1.5}
    path.write_text(path.read_text() + composer(["nan"], "[batch=13/13]:"))
    (lost,) = diagnose(path).illnesses
    assert (lost.name, path.read_text().splitlines()[lost.line - 1].split()[-1]) == (
        "loss-nan",
        "nan",
    )


@pytest.mark.parametrize(
    "line",
    [
        "Validation 1/3 [00:01<00:02, loss=nan]",
        "step 7: val/loss: nan",
        "warmup ends at step 300; loss scale 65536",
        "max_steps: 300 loss: nan",
        "02/11 22:36:19 - INFO - loss: nan",
        "02/11/2024 22:36:19 - INFO - loss: nan",
        "epoch 1 train_loss_epoch=nan step 3",
    ],
)
def test_a_line_with_a_loss_that_is_of_no_step_of_training(line):
    assert read_step(Line(1, line, False)) is None


GOOD = [f"{{'loss': {2 - 0.01 * at:.4f}, 'grad_norm': 1.0}}" for at in range(18)]
EVALUATED = "{'eval_loss': nan, 'epoch': 0.1}"


@pytest.mark.parametrize(
    ("lines", "illness"),
    [
        ([*GOOD, "{'loss': nan, 'grad_norm': nan}"], ("loss-nan", 19)),
        ([*GOOD, "{'loss': 1.8, 'grad_norm': nan}", "{'loss': nan, 'grad_norm': nan}"],
         ("norm-nan", 19)),
        ([*GOOD, EVALUATED, *GOOD], ("eval-loss-nan", 19)),
        ([EVALUATED, *GOOD, "{'loss': nan, 'grad_norm': nan}"], ("loss-nan", 20)),
    ],
)  # fmt: skip
def test_figures_that_are_not_finite_are_one_illness(tmp_path, lines, illness):
    path = tmp_path / "run.log"
    path.write_text("\n".join(lines))
    assert [(one.name, one.line) for one in diagnose(path).illnesses] == [illness]


def test_a_log_without_times_is_left_to_the_diagnosis(tmp_path, capsys):
    path = tmp_path / "run.log"
    path.write_text("\n".join(GOOD))
    assert parse_logs([str(path), "--out", str(tmp_path / "tables")]) == 2
    assert "`python -m parse diagnose` reads the losses" in capsys.readouterr().err
