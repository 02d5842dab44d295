"""The commands of docs/studies run, and the paper's page tells what simulations give today."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from study_pages import PAGES, ROOT, block_commands

from configs.cli import run_command
from launch import sweep

NOT_HERE = re.compile(r"# .*\b(GPU|root)\b")
"""Comment of a command that needs what few machines have."""
COMMANDS = [
    (page.stem, command)
    for page in PAGES
    for command in block_commands(page.read_text())
    if not NOT_HERE.search(command)
]
SCRIPTS = {"master-script.sh": "launch.sweep", "config-n-run.sh": "launch.config_n_run"}
DS_CONFIG = '{"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_comm": true}}'
MODEL_CONFIG = (
    '{"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,'
    ' "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024}'
)
pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files that the pages speak of."""
    path = tmp_path_factory.mktemp("reader")
    (path / "ds_config.json").write_text(DS_CONFIG)
    (path / "config.json").write_text(MODEL_CONFIG)
    (log,) = (ROOT / "tests/golden/parse").glob("*.log")
    shutil.copy(log, path / "train.log")
    return path


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_a_command_runs(page, command, folder):
    """As a reader gives it; exit code 1 is a gate or an illness, and no error is printed."""
    words = shlex.split(command, comments=True)
    if words[0] == "bash":
        words = ["python", "-m", SCRIPTS[words[1]], *words[2:]]
    if words[2].startswith("launch."):
        words += ["--results-dir", str(folder / "results" / page)]
    (folder / "ds_config.fixed.json").unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, *words[1:]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "src")))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    assert "error:" not in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout


def test_the_papers_page_tells_what_is_simulated_today(capsys):
    text = (ROOT / "docs/studies/paper.md").read_text()
    rows = re.findall(
        r"^\| `([a-z-]+)` \|.*\| ([\d.]+(?: to [\d.]+)?;? .*) \|$", text, re.MULTILINE
    )
    assert len(rows) == 11
    told = {name: re.sub(r" \(20B\)|; no `stride` in it", "", cell) for name, cell in rows}
    assert told == {name: simulated(name, capsys) for name in told}


def simulated(name, capsys):
    """Ratios of stock's iterations to those of all-host and of stride, and to stride's updates."""
    words = ["--simulate", "--machine", "h100x4", "--sweep", name, "--dry-run"]
    assert run_command(lambda: sweep.main(words)) == 0
    line = r"\] (.*) (stock|all-host|stride \d+)(.*): simulated (\d+) ms \(.* (\d+)\),"
    points = re.findall(line, capsys.readouterr().out)
    stock = {(p[0], p[2]): (int(p[3]), int(p[4])) for p in points if p[1] == "stock"}
    cells = []
    for engine, at in (("all-host", 0), ("stride", 0), ("stride", 1)):
        ratios = [
            stock[model, rest][at] / int(times[at])
            for model, found, rest, *times in points
            if found.startswith(engine) and (model, rest) in stock
        ]
        ends = [f"{end:.2f}" for end in (min(ratios), max(ratios))] if ratios else []
        cells += [" to ".join(dict.fromkeys(ends))] if ends else []
    return "; ".join(cells)
