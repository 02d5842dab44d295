"""What every trainer's run writes down: log lines and metrics.jsonl."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.schema import Model
from configs.study import default_study, make_point
from launch.train_loop.recorder import Iteration, Recorder, flops_per_iteration, iteration_line
from launch.train_loop.runfile import RunFile, ranks_from_environment

Point = default_study().point_type

MODEL = Model(name="m", hidden=4096, ffn=11008, layers=32, heads=32, kv_heads=4)
POINT = Point(model=MODEL, iterations=10)
ROOT = Path(__file__).resolve().parents[4]
ARTIFACT_LOGS = ROOT / ".." / "shared" / "data" / "logs" / "artifact"
# The shape of an iteration's line in the paper's logs, down to the spaces.
PAPER_LINE = (
    " elapsed_time 9.649179 | consumed samples:            2 | consumed tokens:         4096"
    " | elapsed time per iteration (ms): 9649.2 | learning rate: 2.919E-04"
    " | global batch size:     1 | lm loss: 1.162482E+01 | loss scale: 1.0"
    " | actual seqlen:  2048 | number of skipped iterations:   0"
    " | number of nan iterations:   0 | samples per second: 0.104 | TFLOPs: "
)
ITERATION = Iteration(
    number=2,
    seconds=9.649179458618164,
    loss=11.62482,
    learning_rate=2.9185850380609e-4,
    phases_ms={"forward_ms": 100.0, "backward_ms": 200.0, "update_ms": 150.0},
)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "stem" / "run-001"
    folder.mkdir(parents=True)
    point = make_point({"model": "tiny"})
    return RunFile(folder, point, {}, Path("data"), folder / "metrics.jsonl")


def record(run, do, **options):
    """Return the events of a run on one rank."""
    with Recorder(run, ranks_from_environment({}), **options) as recorder:
        do(recorder)
    return [json.loads(line) for line in run.metrics_path.read_text().splitlines()]


def test_an_iteration_line_is_the_papers_byte_for_byte():
    line = iteration_line(POINT, ITERATION)
    assert line.startswith(PAPER_LINE)
    assert re.fullmatch(r"\d+\.\d\d \|", line.removeprefix(PAPER_LINE))
    assert "| loss scale: 65536.0 |" in iteration_line(POINT, replace(ITERATION, loss_scale=65536))


@pytest.mark.skipif(not ARTIFACT_LOGS.is_dir(), reason="the authors' logs are not here")
def test_lines_have_the_shape_of_the_authors_logs(run, capfd):
    record(
        replace(run, point=POINT),
        lambda recorder: (recorder.sizes(), recorder.parameters(5948837888), recorder.start({})),
    )
    ours = [*capfd.readouterr().out.splitlines(), iteration_line(POINT, ITERATION)]
    assert MODEL.num_parameters() == 5948837888
    log = next(ARTIFACT_LOGS.glob("*prefetch0*.log")).read_text()
    assert {shape(line) for line in ours} <= {shape(line) for line in log.splitlines()}
    assert ours[1] in log
    assert ours[2] in log


def shape(line):
    return re.sub(r"\d+", "9", re.sub(r" +(?=\d)", " ", line))


def test_operations_follow_from_the_real_number_of_parameters():
    model, _ = default_study().load_model("7B")
    plain = Point(model=model, activation_checkpointing=False)
    expected = (6 * 5_948_837_888 + 12 * 32 * 4096 * 2048) * 2048
    assert flops_per_iteration(plain) == expected
    recomputed = Point(model=model, global_batch_size=3)
    assert flops_per_iteration(recomputed) == pytest.approx(expected * 3 * 4 / 3)


def test_an_evaluation_is_told_in_megatrons_words(run, capfd):
    def tell(recorder):
        for iteration, loss in ((20, 2.0), (1, 1000.0), (1, math.nan)):
            recorder.evaluation(iteration, loss)

    events = record(run, tell)
    line, large, unknown = capfd.readouterr().out.splitlines()
    assert line.startswith(" validation loss at iteration 20 | lm loss value: 2.000000E+00 | ")
    assert line.endswith(" | lm loss PPL: 7.389056E+00 |")
    assert "lm loss PPL: 4.851652E+08" in large
    assert "lm loss value: nan | lm loss PPL: nan |" in unknown
    assert events[0]["perplexity"] == math.exp(2.0)
    assert (events[2]["loss"], events[2]["perplexity"]) == (None, None)


def test_an_iterations_loss_comes_back_exactly(run):
    iteration = replace(ITERATION, number=3, seconds=0.25, loss=0.1 + 0.2, grad_norm=1.5)
    [fields] = record(run, lambda recorder: recorder.iteration(iteration))
    assert fields.pop("host_memory_bytes") > 1_000_000
    assert fields == {
        **ITERATION.phases_ms,
        "event": "iteration",
        "iteration": 3,
        "iteration_ms": 250.0,
        "loss": 0.1 + 0.2,
        "grad_norm": 1.5,
        "learning_rate": ITERATION.learning_rate,
        "tokens": 3 * run.point.global_batch_size * run.point.model.seq_length,
        "device_memory_bytes": None,
        "skipped": False,
    }


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_null_with_its_text(run, loss, capfd):
    iteration = replace(ITERATION, loss=loss, grad_norm=math.inf, skipped=True)
    [fields] = record(run, lambda recorder: recorder.iteration(iteration))
    assert (fields["loss"], fields["loss_text"], fields["grad_norm"]) == (None, str(loss), None)
    line = capfd.readouterr().out
    assert f"| lm loss: {loss} |" in line
    assert "number of skipped iterations:   1 " in line
    assert f"number of nan iterations:   {int(math.isnan(loss))} " in line


def test_a_classifier_counts_no_tokens_and_tells_its_accuracy(run, capfd):
    def tell(recorder):
        recorder.iteration(ITERATION)
        recorder.evaluation(2, 0.5, accuracy=0.75)

    iteration, evaluation = record(run, tell, counts_tokens=False)
    assert "tokens" not in iteration
    assert evaluation == {"event": "evaluation", "iteration": 2, "loss": 0.5, "accuracy": 0.75}
    line, last = capfd.readouterr().out.splitlines()
    assert not re.search(r"tokens|seqlen|TFLOPs|loss scale", line)
    assert last.endswith("lm loss value: 5.000000E-01 | accuracy: 0.7500 |")


def test_events_are_on_disk_at_once_and_nothing_is_overwritten(run):
    with Recorder(run, ranks_from_environment({})) as recorder:
        assert not run.metrics_path.exists()
        recorder.event("start", {"seed": 1})
        assert run.metrics_path.read_text() == '{"event": "start", "seed": 1}\n'
        with pytest.raises(ValueError, match="JSON"):
            recorder.event("iteration", {"loss": math.nan})
    with pytest.raises(ConfigError, match="already there"):
        Recorder(run, ranks_from_environment({})).event("start", {})


def test_a_line_comes_after_what_python_holds_back():
    code = "from launch.train_loop import recorder; print('before'); recorder.write_line('after')"
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, env=buffered, capture_output=True, check=True)
    assert result.stdout == b"before\nafter\n"


def test_printed_lines_stay_whole_beside_another_ranks_unbuffered_python():
    # A pipe in packet mode keeps what each write brought apart.
    reader, writer = os.pipe2(os.O_DIRECT)
    code = (
        "from launch.train_loop import recorder; recorder._write_only_whole_lines(); print('one');"
        " print('two')"
    )
    subprocess.run([sys.executable, "-u", "-c", code], stdout=writer, cwd=ROOT, check=True)
    os.close(writer)
    assert [os.read(reader, 4096) for _ in range(3)] == [b"one\n", b"two\n", b""]
    os.close(reader)
