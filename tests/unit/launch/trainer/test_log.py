import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from configs.schema import Model, Point
from configs.study import default_study
from launch.trainer.log import (
    IterationResult,
    checkpoint_line,
    evaluation_line,
    flops_per_iteration,
    iteration_line,
    parameters_line,
    timer_line,
    vocabulary_line,
    world_line,
)

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


def _result(**changes: object) -> IterationResult:
    fields = {
        "iteration": 2,
        "seconds": 9.649179458618164,
        "loss": 11.62482,
        "learning_rate": 2.9185850380609e-4,
        "skipped": False,
    }
    return IterationResult(**{**fields, **changes})


def test_an_iteration_line_is_the_papers_byte_for_byte() -> None:
    line = iteration_line(POINT, _result())
    assert line.startswith(PAPER_LINE)
    assert re.fullmatch(r"\d+\.\d\d \|", line.removeprefix(PAPER_LINE))


@pytest.mark.skipif(not ARTIFACT_LOGS.is_dir(), reason="the authors' logs are not here")
def test_lines_have_the_shape_of_the_authors_logs() -> None:
    ours = {
        iteration_line(POINT, _result()),
        world_line(POINT),
        vocabulary_line(POINT),
        parameters_line(0, 5948837888),
    }
    log = next(ARTIFACT_LOGS.glob("*prefetch0*.log"))
    theirs = {_shape(line) for line in log.read_text().splitlines()}
    assert {_shape(line) for line in ours} <= theirs
    assert vocabulary_line(POINT) in log.read_text()
    assert parameters_line(0, MODEL.num_parameters()) in log.read_text()


def _shape(line: str) -> str:
    return re.sub(r"\d+", "9", re.sub(r" +(?=\d)", " ", line))


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_printed(loss: float) -> None:
    line = iteration_line(POINT, _result(loss=loss, skipped=True))
    assert f"| lm loss: {loss} |" in line
    assert "number of skipped iterations:   1 " in line
    assert f"number of nan iterations:   {int(math.isnan(loss))} " in line


def test_the_authors_parser_finds_one_time_in_a_timer_line() -> None:
    line = timer_line("interval-time", 9.649179458618164)
    assert re.findall(r"<TIMER:interval-time,([\d\.]+)>", line) == ["9.649179458618164"]


def test_padding_of_the_vocabulary_depends_on_the_tensor_parallel_degree() -> None:
    assert vocabulary_line(POINT).endswith("with 47 dummy tokens (new size: 50304)")
    two = POINT.model_copy(update={"tp": 2})
    assert vocabulary_line(two).endswith("with 175 dummy tokens (new size: 50432)")


def test_a_line_comes_after_what_python_holds_back() -> None:
    code = "from launch.trainer import log; print('before'); log.write_line('after')"
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=buffered,
        capture_output=True,
        check=True,
    )
    assert result.stdout == b"before\nafter\n"


def test_operations_follow_from_the_real_number_of_parameters() -> None:
    model, _ = default_study().load_model("7B")
    plain = Point(model=model, activation_checkpointing=False)
    tokens = 2048
    expected = (6 * 5_948_837_888 + 12 * 32 * 4096 * 2048) * tokens
    assert flops_per_iteration(plain) == expected
    recomputed = Point(model=model, global_batch_size=3)
    assert flops_per_iteration(recomputed) == pytest.approx(expected * 3 * 4 / 3)


def test_printed_lines_stay_whole_beside_another_ranks_unbuffered_python() -> None:
    # A pipe in packet mode keeps what each write brought apart.
    reader, writer = os.pipe2(os.O_DIRECT)
    code = (
        "from launch.trainer import log; log.write_only_whole_lines(); print('one'); print('two')"
    )
    subprocess.run(
        [sys.executable, "-u", "-c", code],
        stdout=writer,
        cwd=ROOT,
        check=True,
    )
    os.close(writer)
    assert [os.read(reader, 4096) for _ in range(3)] == [b"one\n", b"two\n", b""]
    os.close(reader)


def test_an_evaluation_is_told_in_megatrons_words() -> None:
    line = evaluation_line(20, 2.0)
    assert line.startswith(" validation loss at iteration 20 | lm loss value: 2.000000E+00 | ")
    assert line.endswith(" | lm loss PPL: 7.389056E+00 |")
    assert "lm loss PPL: 4.851652E+08" in evaluation_line(1, 1000.0)
    assert "lm loss value: nan | lm loss PPL: nan |" in evaluation_line(1, math.nan)


def test_a_checkpoint_is_told_in_megatrons_words() -> None:
    line = checkpoint_line(5, Path("/r/checkpoints/iteration-000005"))
    words = "  successfully saved checkpoint at iteration       5 to "
    assert line == f"{words}/r/checkpoints/iteration-000005"


def test_an_fp16_models_loss_scale_is_printed() -> None:
    assert "| loss scale: 65536.0 |" in iteration_line(POINT, _result(loss_scale=65536.0))
