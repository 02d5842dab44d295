"""The two shell scripts: what they start, from anywhere, and what they return."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from configs.schema import MODEL_FIELDS
from configs.study import default_study
from launch.listing import listing
from launch.sweep import build_parser

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["checkout", "my 'own' checkout"])
def checkout(request, tmp_path):
    """A copy of the scripts with a Makefile of its own; its python says what it was asked."""
    root = tmp_path / request.param
    root.mkdir()
    for script in ("master-script.sh", "config-n-run.sh"):
        shutil.copy(ROOT / script, root)
    (root / "Makefile").write_text("setup:\n\t@touch was-set-up\n")
    return root


def add_python(root, body):
    python = root / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/usr/bin/env bash\n{body}\n")
    python.chmod(0o755)


def bash(script, *arguments, cwd=ROOT, **options):
    command = ["bash", str(script), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, **options)
    return done.returncode, done.stdout, done.stderr


def test_help_needs_nothing_and_names_every_option(checkout):
    code, out, err = bash(checkout / "master-script.sh", "--sweep", "x", "--help")
    assert (code, err) == (0, "")
    assert not (checkout / "was-set-up").exists()
    hidden = {"--trainer-module"}
    study = default_study()
    fields = {*study.point_type.model_fields, *MODEL_FIELDS} - {"device", "data_prefix"}
    known = build_parser(study)._option_string_actions
    options = {name for name in known if name.startswith("--")}
    options -= {f"--{name.replace('_', '-')}" for name in fields}
    assert [name for name in options - hidden if name not in out] == []
    (example,) = re.findall(r"--engines .* as in ([\w,:=-]+)", out)
    assert set(example.split(",")) <= study.engines.keys()


def test_the_main_job_is_set_up_and_gets_its_arguments_unchanged(checkout, tmp_path):
    add_python(checkout, 'printf "%s\\n" "$PYTHONPATH" "$PWD" "$@"; exit 7')
    words = ["--results-dir", "a b", "$HOME;'\""]
    code, out, _ = bash(checkout / "master-script.sh", *words, cwd=tmp_path)
    assert code == 7
    assert (checkout / "was-set-up").exists()
    lines = out.splitlines()
    assert lines[0].split(":")[0] == str(checkout)
    assert lines[1:] == [str(tmp_path), "-P", "-m", "launch.sweep", *words]


def test_signals_reach_the_main_job_itself(checkout):
    add_python(checkout, "echo $$")
    process = subprocess.Popen(
        ["bash", str(checkout / "master-script.sh")], stdout=subprocess.PIPE, text=True
    )
    out, _ = process.communicate()
    assert out == f"{process.pid}\n"  # the script has become the main job


@pytest.mark.parametrize("option", ["--dry-run", "--dry_run"])
def test_who_only_looks_is_told_that_setup_comes_first_and_none_is_started(checkout, option):
    code, out, err = bash(checkout / "master-script.sh", "--sweep", "stride", option)
    assert (code, out) == (2, "")
    assert err == (
        f"error: {option.replace('_', '-')} needs the packages: run `make setup` in {checkout} "
        "first (minutes, once)\n"
    )
    assert not (checkout / "was-set-up").exists()
    add_python(checkout, 'printf "%s\\n" "$@"')
    (checkout / ".venv" / ".ready").touch()
    code, out, _ = bash(checkout / "master-script.sh", option)
    assert (code, out.splitlines()) == (0, ["-P", "-m", "launch.sweep", option])
    assert not (checkout / "was-set-up").exists()


def test_studies_are_listed_by_the_standard_library_alone(tmp_path):
    """In a copy without an environment, called from a folder with a `launch` of its own."""
    root = tmp_path / "my 'own' clone"
    for part in ("master-script.sh", "launch/__init__.py", "launch/listing.py", "configs"):
        (root / part).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, root / part)
    (tmp_path / "launch.py").write_text("raise SystemExit('of the caller')")
    # A Python without any package is one that finds none.
    (tmp_path / "bare").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    (tmp_path / "bare").chmod(0o755)
    env = {**os.environ, "PYTHON": str(tmp_path / "bare")}

    def listed(*words):
        return bash(root / "master-script.sh", "--list", *words, cwd=tmp_path, env=env)

    code, out, err = listed()
    assert (code, err) == (0, "")
    assert f"{out[:-1]}" == listing(None)
    for words in (["--study", "peers"], ["--study=peers", "--all"]):
        assert listed(*words) == (0, f"{listing('peers')}\n", "")
    code, out, err = listed("--study", "zero-lader")
    assert (code, out) == (2, "")
    assert "did you mean 'zero-ladder'?" in err
    assert not (root / ".venv").exists()


def test_a_failed_setup_stops_the_main_job(checkout):
    add_python(checkout, "echo started")
    (checkout / "Makefile").write_text("setup:\n\t@exit 1\n")
    code, out, _ = bash(checkout / "master-script.sh")
    assert code != 0
    assert "started" not in out


def test_a_single_point_needs_the_environment_and_passes_its_flags(checkout, tmp_path):
    code, _, err = bash(checkout / "config-n-run.sh", "-m", "7", cwd=tmp_path)
    assert code == 2
    assert "make setup" in err
    add_python(checkout, 'printf "%s\\n" "$@"')
    code, out, _ = bash(checkout / "config-n-run.sh", "-m", "7", "-R", "0.8 ", cwd=tmp_path)
    assert out.splitlines() == ["-P", "-m", "launch.config_n_run", "-m", "7", "-R", "0.8 "]


def test_the_papers_flags_give_the_papers_log_from_any_folder(checkout, tmp_path):
    add_python(checkout, f'PYTHONPATH={shlex.quote(str(ROOT))} exec {sys.executable} "$@"')
    flags = shlex.split("-m 7 -H 4096 -F 11008 -N 32 -L 32 -U 2048 -S 4 -K 10 -P 1 -A 1 -O 2")
    code, out, err = bash(checkout / "config-n-run.sh", *flags, "--dry-run", cwd=tmp_path)
    assert (code, err) == (0, "")
    assert "log-7B-tp1-dp1-l32-h4096-a32-sl2048-gbs1-mbs1-ratio1-subg1000000000-prefetch1" in out
