"""The examples run as they stand: what a user copies trains, under the plugin."""

import json
import re
from pathlib import Path

import pytest
from ranks import run_ranks

from configs.files import ROOT

EXAMPLES = ROOT / "examples"
STEPS = 4
OURS = "optimizer: InterleavedZeroOptimizer"
PROGRAM = Path(__file__).with_name("example_program.py")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
trains = pytest.mark.exhaustive
"""`make test` trains the same in the framework's own test, and the notebook."""


def run(*words, num_ranks=1):
    """What an example prints that is run as the ranks of a job, of which each must have updated."""
    printed = run_ranks(
        PROGRAM, *words, num_ranks=num_ranks, PYTHONWARNINGS="ignore", CUDA_VISIBLE_DEVICES=""
    )
    output = "".join(printed)
    counts = re.findall(r"tiles updated: (\[.*\])", output)
    assert len(counts) == num_ranks
    for tiles in map(json.loads, counts):
        assert tiles, "the plugin updated nothing"
        assert min(tiles) > 0
    return output


@trains
def test_lightning_with_two_ranks():
    output = run("examples.imdb_lightning", "--tiny", "--max-steps", STEPS, num_ranks=2)
    for words in (OURS, "synthetic reviews", r"test_accuracy: [01]\."):
        assert re.search(words, output), words


@trains
def test_hugging_faces_trainer_shows_its_auto_values():
    output = run("examples.hf_trainer", "--tiny", "--max-steps", STEPS, num_ranks=2)
    assert OURS in output
    lines = [line for line in output.splitlines() if line.startswith("auto ")]
    found = dict(line.removeprefix("auto ").split(" = ") for line in lines)
    assert found["train_micro_batch_size_per_gpu"] == "16"
    assert found["gradient_accumulation_steps"] == "2"
    assert found["train_batch_size"] == str(16 * 2 * 2)
    assert found["gradient_clipping"] == "1.0"
    # Hidden size squared, and nine tenths of it.
    assert found["zero_optimization.reduce_bucket_size"] == str(64 * 64)
    assert found["zero_optimization.stage3_prefetch_bucket_size"] == str(int(0.9 * 64 * 64))
    assert len(found) == 8
    assert "auto" not in found.values()


def code_of(notebook):
    """The notebook as a program: its cells of code, one after the other."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return "\n\n".join(code) + "\n"


def test_the_notebook_runs(tmp_path):
    program = tmp_path / "imdb_lightning_notebook.py"
    program.write_text(code_of(EXAMPLES / "imdb_lightning.ipynb"), encoding="utf-8")
    output = run(program)
    assert OURS in output
    assert "padding has id 1" in output
    assert "test_accuracy" in output


@pytest.mark.parametrize("name", ["imdb_lightning.py", "hf_trainer.py", "imdb_lightning.ipynb"])
def test_the_plugin_is_one_line_before_the_trainer_is_made(name):
    path = EXAMPLES / name
    code = code_of(path) if path.suffix == ".ipynb" else path.read_text(encoding="utf-8")
    assert code.count("deep_optimizer_states.install()") == 1
    trainer = "TrainingArguments(\n" if name.startswith("hf") else "pl.Trainer(\n"
    assert code.index("deep_optimizer_states.install()") < code.index(f"{trainer}")


def test_notebooks_are_kept_without_output():
    cells = json.loads((EXAMPLES / "imdb_lightning.ipynb").read_text())["cells"]
    assert all(not cell.get("outputs") for cell in cells)
