"""requirements/wheelhouse.sh with a pip that downloads nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "requirements" / "wheelhouse.sh"
LINES = (ROOT / "requirements" / "run.txt").read_text().splitlines()
PINS = [line for line in LINES if not line.startswith("#") and ";" not in line]
MEGATRON = [line.split("; ") for line in LINES if line.startswith("megatron-core==")]
FAKE_PYTHON = """#!/usr/bin/env bash
if [ "$1 $2" != "-m pip" ]; then exec {python} "$@"; fi
printf '%s\\n' "$*" >>"{log}"
while [ $# -gt 0 ]; do
  case $1 in
    wheel) echo "DS_BUILD_OPS=$DS_BUILD_OPS" >>"{log}" ;;
    -w) touch "$2/deepspeed-0.19.8-py3-none-any.whl" ;;
    -d) folder=$2 ;;
    --find-links) cp "$2"/*+there-*.whl "$folder" 2>/dev/null; found=$2 ;;
    -r) cat "$2" >>"{wanted}"; ls "$found" >>"{log}" ;;
  esac
  shift
done
[ -z "${{folder:-}}" ] || {{ cp "$found"/*+there-*.whl "$folder" 2>/dev/null || true; }}
"""


@pytest.fixture
def wheelhouse(tmp_path):
    """Runs the script; returns what pip was told, what it was to download, and the folder."""
    log, wanted, python = (tmp_path / name for name in ("log", "wanted", "python"))
    python.write_text(FAKE_PYTHON.format(python=sys.executable, log=log, wanted=wanted))
    python.chmod(0o755)

    def run(*arguments):
        subprocess.run(
            ["bash", SCRIPT, tmp_path / "wheels", *arguments],
            env={**os.environ, "PYTHON": str(python)},
            check=True,
            capture_output=True,
        )
        names = sorted(path.name for path in (tmp_path / "wheels").iterdir())
        return log.read_text(), wanted.read_text().splitlines(), names

    return run


def test_everything_pinned_is_fetched_for_the_other_machines_python(wheelhouse):
    told, wanted, names = wheelhouse("--python", "3.13")
    assert "--only-binary=:all: --python-version 3.13" in told
    assert "--platform manylinux_2_28_x86_64" in told
    assert {line for line in PINS if not line.startswith("deepspeed==")} < set(wanted)
    # Where there is no wheel one is made, since only wheels are downloaded.
    built = {line.split()[-1].partition("==")[0] for line in told.splitlines() if " wheel " in line}
    assert built == {"deepspeed", "rouge-score", "sqlitedict", "word2number"}
    # Small, and the other machine is as a rule one with GPUs.
    assert any(line.startswith("nvidia-ml-py==") for line in wanted)
    assert any(line.startswith("setuptools>=") for line in wanted)
    # The stand-in for torch was there for pip to find, and does not stay behind.
    assert "torch==2.13.0+there" in wanted
    assert "torch-2.13.0+there-py3-none-any.whl" in told
    assert names == ["deepspeed-0.19.8-py3-none-any.whl"]


@pytest.mark.parametrize(("python", "condition"), [("3.11", "<"), ("3.12", ">=")])
def test_of_pins_that_differ_by_python_those_of_the_other_machine_are_fetched(
    wheelhouse, python, condition
):
    """Whatever Python runs the script."""
    _, wanted, _ = wheelhouse("--lean", "--python", python)
    (meant,) = (pin for pin, marker in MEGATRON if f" {condition} " in marker)
    assert [line for line in wanted if line.startswith("megatron-core")] == [meant]


def test_deepspeed_is_built_without_its_ops(wheelhouse):
    told, _, _ = wheelhouse()
    (pin,) = (line for line in PINS if line.startswith("deepspeed=="))
    assert told.index("DS_BUILD_OPS=0") < told.index("download")
    assert pin in told.splitlines()[0]


def test_the_lean_form_leaves_out_what_a_machine_with_torch_has(wheelhouse):
    told, wanted, _ = wheelhouse("--lean")
    names = {line.partition("==")[0] for line in wanted if "+there" not in line}
    assert names == {
        *("megatron-core", "pydantic", "charset-normalizer", "tokenizers"),
        *("pytest", "pytest-timeout", "hypothesis", "tiktoken"),
    }
    assert {line for line in wanted if line in PINS} == {
        line for line in PINS if line.partition("==")[0] in names
    }
    stand_ins = {line.partition("==")[0] for line in wanted if "+there" in line}
    assert stand_ins == {"torch", "numpy", "huggingface-hub"}
    # A name in a wheel's own name has no dash, or pip does not find it.
    found = {line.partition("-")[0] for line in told.splitlines() if "+there-" in line}
    assert found == {"torch", "numpy", "huggingface_hub"}


def test_torch_itself_comes_along_when_asked_for(wheelhouse):
    _, wanted, _ = wheelhouse("--torch")
    assert "torch==2.13.0" in wanted
    assert not any("+there" in line for line in wanted)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give the folder to fill"),
        (["d", "--python", "3.9"], "--python 3.9: give 3.11, 3.12 or 3.13"),
        (["d", "e"], "two folders, d and e; give one"),
        (["d", "--torch", "--lean"], "exclude each other"),
        (["d", "--fast"], "unknown option --fast; known: --python, --torch, --lean"),
    ],
)
def test_wrong_arguments_are_said_in_a_line(tmp_path, arguments, said):
    done = subprocess.run(
        ["bash", SCRIPT, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
