"""Set-up says what it is at; Python and pip are stand-ins, nothing is installed."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/usr/bin/env bash
beat() { [ -z "$SLOW" ] || until grep -q "still building $1 (" "$SAID"; do sleep 0.05; done; }
case "$*" in
  *"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *purelib*) echo "${0%/bin/python}" ;;
  *"-m pip"*"-r "*wanted.txt)
    grep -o '^[a-z0-9-]*==[^;]*' "${@: -1}" | sed 's/^/Collecting /' ;
    echo "Installing collected packages: a, b" ;;
  *"-m pip"*deepspeed==*)
    echo "  Building wheel for deepspeed (pyproject.toml): started"; beat deepspeed ;;
  *"-m pip"*) for word; do echo "Collecting $word"; done; exit "${PIP_CODE:-0}" ;;
  *.build) echo "op 1 of 2: one" >&2; beat ops; echo "[1/2] c++ -o x"; exit "$BUILD_CODE" ;;
esac
"""


@pytest.fixture
def setup(tmp_path):
    """Runs set-up with a Python that only talks; its exit code and what it said."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(0o755)

    said = tmp_path / "said"

    def run(slow="", build_code="0", **more):
        environment = {
            **os.environ,
            "PYTHON": str(python),
            "TORCH_EXTENSIONS_DIR": str(tmp_path / "ops"),
            "SLOW": slow,
            "SAID": str(said),
            "BUILD_CODE": build_code,
            "SETUP_BEAT_S": "0.2",
            **more,
        }
        command = ["bash", str(ROOT / "requirements" / "setup.sh"), str(tmp_path / "venv")]
        with said.open("w") as file:
            done = subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=file)
        return done.returncode, said.read_text().splitlines()

    return run


def test_every_package_and_every_op_is_said(setup):
    code, said = setup()
    assert code == 0
    assert said[-1] == "setup: ready"
    text = "\n".join(said)
    wanted = re.findall(
        r"^([\w.-]+==[\w.]+)", (ROOT / "requirements" / "run.txt").read_text(), re.M
    )
    for name in (*wanted, "torch==", "op 1 of 2: one", "[1/2] c++ -o x", "building deepspeed"):
        assert name in text, name
    assert all(line.startswith("setup: ") for line in said)


def test_a_long_step_says_that_it_still_works(setup):
    """The stand-ins end a step when it was said, and never before."""
    code, _ = setup(slow="yes")
    assert code == 0


@pytest.mark.parametrize("more", [{"PIP_CODE": "3"}, {"build_code": "4"}])
def test_a_step_that_fails_still_ends_set_up(setup, more):
    code, said = setup(**more)
    assert code in (3, 4)
    assert "setup: ready" not in said
