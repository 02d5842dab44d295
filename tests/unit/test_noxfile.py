"""The sessions of `make compat` are those of every version that is supported."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from deep_optimizer_states.adapter.guard import CHECKED_VERSIONS

ROOT = Path(__file__).resolve().parents[2]


def sessions():
    pytest.importorskip("nox")
    command = [sys.executable, "-m", "nox", "-l", "--json"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [{**session, **session["call_spec"]} for session in json.loads(listed.stdout)]


def test_sessions_cover_every_supported_version():
    found = sessions()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if "Python ::" in line]
    wheels = [each for each in found if each["name"] == "wheel"]
    assert [*dict.fromkeys(each["python"] for each in wheels)] == named
    asked = [each for each in map(Requirement, project["dependencies"]) if each.name == "torch"]
    for python in named:
        run = [each["torch"] for each in wheels if each["python"] == python]
        (wanted,) = [each for each in asked if each.marker.evaluate({"python_version": python})]
        assert str(wanted.specifier) == f">={run[0].removesuffix('.0')}"
    *harness, newest = named
    assert newest == "3.14"  # megatron-core is not published for it
    compared = [(each["python"], each["deepspeed"]) for each in found if "deepspeed" in each]
    assert compared == [(python, release) for python in harness for release in CHECKED_VERSIONS]
    trained = [(each["python"], each["megatron"]) for each in found if "megatron" in each]
    assert [*dict.fromkeys(python for python, _ in trained)] == harness
    # What set-up installs for a Python is among what is run with it.
    for python in harness:
        pins = [sys.executable, "requirements/pins.py", "--python", python, "requirements/run.txt"]
        lines = subprocess.run(pins, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        pinned = dict(line.split("==") for line in lines.split())
        assert (python, pinned["megatron-core"]) in trained


def test_every_file_of_tests_that_a_session_names_is_there():
    paths = re.findall(r'"(tests/[^"]+)"', (ROOT / "noxfile.py").read_text())
    assert len(paths) == 13
    assert [path for path in paths if not (ROOT / path).exists()] == []
