"""requirements/setup.sh with a Python, a pip and a uv that only talk; nothing is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = """#!/usr/bin/env bash
log() { echo "$*" >>"$WORK/log"; }
case "$*" in
  *"-m venv "*) mkdir -p "$3/bin" && touch "$3/pyvenv.cfg" && cp "$0" "$3/bin/python" ;;
  *version_info*) exit "${PYTHON_CODE:-0}" ;;
  -V) echo "Python 3.10.2" ;;
  *purelib*) echo "${0%/bin/python}" ;;
  *getsitepackages*) echo "$WORK/theirs" ;;
  *uv_command.py*) [ -z "$REFUSED" ] || { echo "$REFUSED" >&2; exit 1; }; printf '%s\\0' "$2" ;;
  *pins.py\\ --differing*) printf "$DIFFERING" ;;
  *pins.py*) echo "ninja==1.0" ;;
  *"-m pip"*--target*) log "pip ${@: -1}"
    [ -z "$NO_UV" ] || exit 1
    mkdir -p "$WORK/venv/uv/bin" && cp "$WORK/uv" "$WORK/venv/uv/bin" ;;
  *"-m pip"*) shift 4; exec "$WORK/uv" "as pip: $@" ;;
  *.build)
    log "build MAX_JOBS=$MAX_JOBS"
    mkdir -p "$TORCH_EXTENSIONS_DIR/op" && touch "$TORCH_EXTENSIONS_DIR/op/lock"
    echo >"$WORK/builds" # until an installer reads it
    [ -z "$BUILD_HANGS" ] || exec cat "$WORK/never"
    rm "$TORCH_EXTENSIONS_DIR/op/lock"
    echo "[WARNING] Setting accelerator to CPU. If you have a GPU"
    echo "c++ says this"; exit "${BUILD_CODE:-0}" ;;
  *"import deepspeed"*) log import ;;
esac
"""
UV = """#!/usr/bin/env bash
case "$*" in
  --version) exit 1 ;;
  *"-r "*) cat "${@: -1}" >"$WORK/wanted"; [ -z "$BUILDS" ] || read -r <"$WORK/builds"
    eval "$WHEN_RUN" ;;
esac
echo "uv DS_BUILD_OPS=$DS_BUILD_OPS $*" >>"$WORK/log"
"""


@pytest.fixture
def setup(tmp_path):
    """Runs set-up; its exit code, what it said and what was called, a line each."""
    for name, text in (("python", PYTHON), ("uv", UV)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for name in ("builds", "never"):
        os.mkfifo(tmp_path / name)

    def run(*part, root=ROOT, **variables):
        (tmp_path / "log").write_text("")
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PIP_")},
            "PYTHON": str(tmp_path / "python"),
            "TORCH_EXTENSIONS_DIR": str(tmp_path / "venv" / "ops"),
            "WORK": str(tmp_path),
            # An installer goes on when the compilers are at work, and they when it does.
            "BUILDS": "" if part else "yes",
            **variables,
        }
        command = ["bash", str(root / "requirements" / "setup.sh"), str(tmp_path / "venv"), *part]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.stdout == ""
        return done.returncode, done.stderr, (tmp_path / "log").read_text().splitlines()

    return run


def pins(*names):
    lines = "".join((ROOT / "requirements" / f"{name}.txt").read_text() for name in names)
    return [line for line in lines.splitlines() if not line.startswith("#")]


def test_ops_are_compiled_while_what_the_main_job_needs_is_installed(setup, tmp_path):
    code, said, calls = setup(MAX_JOBS="3")
    assert code == 0, said
    assert said.endswith("setup: ready\n")
    assert "c++ says this" in said
    assert "Setting accelerator" not in said
    build = next(call for call in calls if call.startswith("build"))
    assert build == "build MAX_JOBS=3"
    uv, torch, deepspeed, packages, ours, first = (call for call in calls if call != build)
    assert uv == f"pip {pins('uv')[0]}"
    assert "torch==2.13.0" in torch
    assert {"numpy==", "ninja=="} < {f"{word.partition('==')[0]}==" for word in torch.split()}
    assert "DS_BUILD_OPS=0" in deepspeed
    assert "--no-build-isolation" in deepspeed
    assert " -r " in packages
    assert ours.endswith("requirements/..")
    assert first == "import"
    assert (tmp_path / "wanted").read_text().splitlines() == pins("run")
    assert not (tmp_path / "venv" / ".unfinished").exists()


def test_there_are_no_more_compilers_than_cores(setup):
    _, _, calls = setup()
    cores = subprocess.run(["nproc"], capture_output=True, text=True, check=True).stdout.strip()
    assert f"build MAX_JOBS={cores}" in calls


def test_the_tests_packages_come_on_top_and_compile_nothing(setup, tmp_path):
    setup()
    code, said, calls = setup("tests")
    assert code == 0, said
    assert not [call for call in calls if "torch==" in call or call.startswith("build")]
    # Together, so that none of them replaces what the harness runs with.
    assert (tmp_path / "wanted").read_text().splitlines() == pins("run", "dev")


def test_a_folder_with_other_files_is_left_alone(setup, tmp_path):
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "thesis.txt").write_text("mine")
    code, said, calls = setup()
    assert code == 1
    assert "is no environment of Python: remove them, or name another folder" in said
    assert not [call for call in calls if "install" in call]
    assert [path.name for path in (tmp_path / "venv").iterdir()] == ["thesis.txt"]


def test_the_tests_packages_without_an_environment_bring_it(setup):
    code, said, calls = setup(
        "tests", BUILDS="", WHEN_RUN='grep -q pytest "$WORK/wanted" || read -r <"$WORK/builds"'
    )
    assert code == 0, said
    assert len([call for call in calls if " -r " in call]) == 2


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"NO_UV": "yes"}, f"{pins('uv')[0]} is not to be had"),
        ({"REFUSED": "pip is configured with x"}, "pip is configured with x"),
        ({"INSTALLER": "pip"}, "INSTALLER=pip"),
        ({"USE_OWN_TORCH": "1"}, "uv does not see what"),
    ],
)
def test_pip_installs_where_uv_cannot_and_says_why(setup, variables, why):
    code, said, calls = setup(**variables)
    assert code == 0, said
    assert f"setup: pip installs, since {why}" in said
    installs = [call for call in calls if call.startswith("uv")]
    assert installs
    assert all("as pip: " in call for call in installs)


def test_of_an_own_torch_and_its_packages_only_what_lacks_is_installed(setup, tmp_path):
    code, said, calls = setup(USE_OWN_TORCH="1", DIFFERING="numpy==2.0")
    assert code == 0, said
    assert "torch==" not in "".join(calls)
    assert (tmp_path / "wanted").read_text() == "ninja==1.0\n"
    assert (tmp_path / "venv" / "own.pth").read_text() == f"{tmp_path / 'theirs'}\n"


def test_wheels_of_a_folder_alone(setup, tmp_path):
    code, said, _ = setup(WHEELHOUSE=str(tmp_path / "wheels"))
    assert code == 1
    assert said == f"setup: WHEELHOUSE={tmp_path / 'wheels'} is not a folder\n"
    (tmp_path / "wheels").mkdir()
    code, said, calls = setup(WHEELHOUSE=str(tmp_path / "wheels"))
    assert code == 0, said
    installs = [call for call in calls if call.startswith("uv")]
    assert all(f"--no-index --find-links {tmp_path / 'wheels'}" in call for call in installs)


def test_a_build_that_fails_is_shown_and_ends_set_up(setup, tmp_path):
    code, said, _ = setup(BUILD_CODE="4")
    assert code == 1
    assert "c++ says this" in said
    assert said.endswith("setup: the ops could not be compiled, see above\n")
    # Packages are there: the next call goes on with them.
    assert not (tmp_path / "venv" / ".unfinished").exists()


def test_an_installer_that_fails_ends_set_up_and_the_build(setup, tmp_path):
    code, said, _ = setup(WHEN_RUN="echo no such package >&2; exit 3", BUILD_HANGS="yes")
    assert code == 1
    assert said.endswith("no such package\nsetup: the packages could not be installed, see above\n")
    assert not (tmp_path / "venv" / "ops" / "op" / "lock").exists()


def test_versions_that_are_not_the_pins_end_set_up(setup):
    code, said, _ = setup(DIFFERING="numpy==2.4.6\\nscipy==1.17.1")
    assert code == 1
    assert "setup: not installed as pinned: numpy==2.4.6, scipy==1.17.1\n" in said


@pytest.mark.parametrize("cut", ["kill -TERM $PPID", "kill -9 $$"])
def test_a_set_up_that_is_cut_off_is_made_anew(setup, tmp_path, cut):
    code, _, _ = setup(WHEN_RUN=cut, BUILD_HANGS="yes")
    assert code > 128
    venv = tmp_path / "venv"
    assert (venv / ".unfinished").exists()
    assert not (venv / "ops" / "op" / "lock").exists()
    (venv / "half-a-package").touch()
    nested = venv / "python-3.12" / "pyvenv.cfg"
    nested.parent.mkdir()
    nested.touch()
    code, said, _ = setup()
    assert code == 0, said
    assert f"the last set-up of {venv} was cut off: it begins anew" in said
    assert not (venv / "half-a-package").exists()
    assert not (venv / ".unfinished").exists()
    assert nested.exists()


def test_an_environment_may_come_after_one_inside_it(setup, tmp_path):
    nested = tmp_path / "venv" / "python-3.12" / "pyvenv.cfg"
    nested.parent.mkdir(parents=True)
    nested.touch()
    code, said, _ = setup()
    assert code == 0, said
    assert nested.exists()


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"CXX": "no-such-c++"}, "no C++ compiler (no-such-c++); DeepSpeed's CPUAdam and our"),
        ({"PYTHON_CODE": "1"}, "is Python 3.10.2; Python 3.11 to 3.13 is needed"),
    ],
)
def test_what_lacks_is_one_line_before_anything_is_made(setup, tmp_path, variables, line):
    code, said, calls = setup(**variables)
    assert (code, said.count("\n"), calls) == (1, 1, [])
    assert line in said
    assert not (tmp_path / "venv").exists()


def test_a_path_with_blanks_is_refused(setup, tmp_path):
    shutil.copytree(ROOT / "requirements", tmp_path / "my checkout" / "requirements")
    code, said, calls = setup(root=tmp_path / "my checkout")
    assert (code, calls) == (1, [])
    assert f"setup: the path '{tmp_path / 'my checkout'}' holds a character" in said


def test_make_takes_no_environment_for_whole_that_was_cut_off(tmp_path):
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")

    def planned(target):
        command = ["make", "-n", target]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout

    venv = tmp_path / ".venv"
    venv.mkdir()
    assert planned("test").count("setup.sh .venv") == 2
    (venv / ".ready").touch()
    assert "setup.sh" not in planned("setup")
    assert planned("test").count("setup.sh .venv tests") == 1
    (venv / ".ready-tests").touch()
    assert "setup.sh" not in planned("test")
    (venv / ".unfinished").touch()
    assert planned("setup").count("setup.sh .venv") == 1
    assert planned("test").count("setup.sh .venv") == 2


def test_make_keeps_compiled_python_whatever_the_shell_says():
    """No installer compiles it: every process would for seconds."""
    command = ["make", "--eval", "show: ; @env", "show"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "\nPATH=" in done.stdout
    assert "PYTHONDONTWRITEBYTECODE" not in done.stdout


def test_pins_that_this_environment_does_not_have_in_their_version_are_named(tmp_path):
    wanted = tmp_path / "wanted.txt"
    wanted.write_text(
        "# Pinned\npytest==0.1\nno-such-package==1\nno-such-package==2; python_version < '3'\n"
    )

    def named(option):
        command = [sys.executable, str(ROOT / "requirements" / "pins.py"), option, str(wanted)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    assert named("--differing") == ["pytest==0.1", "no-such-package==1"]
    assert named("--lacking") == ["no-such-package==1"]
