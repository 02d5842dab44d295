"""Building the compiled ops ahead."""

import os
import subprocess
import time
from pathlib import Path

import deepspeed.ops.adam
import pytest

from deep_optimizer_states import build
from deep_optimizer_states.core.kernels import host


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            PermissionError(13, "Permission denied", "/shared/cpu_adam/lock"),
            "cannot be loaded from /shared/cpu_adam/lock: Permission denied; name a folder",
        ),
        (RuntimeError("no ninja"), "did not build (no ninja); it needs a C++ compiler"),
    ],
)
def test_the_cause_is_named_when_deepspeeds_op_cannot_be_had(
    monkeypatch, capsys, tmp_path, error, words
):
    def fail(_parameters):
        raise error

    monkeypatch.setattr(build, "check_deepspeed", lambda: None)
    monkeypatch.setattr(host, "build", lambda: tmp_path / "ours" / "host_adam.so")
    (tmp_path / "ours").mkdir()
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "lock").touch()
    monkeypatch.setattr(deepspeed.ops.adam, "DeepSpeedCPUAdam", fail)
    assert build.main() == 1
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in said[:2]] == ["op 1 of 2", "op 2 of 2"]
    assert said[2].startswith(f"{tmp_path}/cpu_adam/lock: cpu_adam has been locked for ")
    assert words in said[3]


def test_an_old_lock_is_named_and_not_waited_for(monkeypatch, capsys, tmp_path):
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    os.utime(lock, (time.time() - 5400,) * 2)
    monkeypatch.setattr(build, "check_deepspeed", lambda: None)
    monkeypatch.setattr(host, "build", lambda: tmp_path / "ours" / "host_adam.so")
    assert build.main() == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"{lock}: cpu_adam has been locked for 90 min, ")
    assert said.endswith(f": rm {lock}")
    assert lock.exists()


FEWER_HEADERS = "-isystem {folder} -g -c a.cpp -g0"
ALL_HEADERS = "-g -c a.cpp -g0"
VERSION = "-v -g0"


@pytest.mark.parametrize(
    ("cxx", "refused", "told"),
    [
        (None, "none", [FEWER_HEADERS, VERSION]),
        (None, "-isystem", [FEWER_HEADERS, ALL_HEADERS, VERSION]),
        ("c++", "none", ["-g -c a.cpp", "-v"]),
    ],
)
def test_headers_and_debug_information_are_left_out_unless_the_user_names_a_compiler(
    monkeypatch, tmp_path, capfd, cxx, refused, told
):
    seen = []

    def compile_op(_parameters):
        subprocess.run(["c++", "-g", "-c", "a.cpp"], check=True)
        subprocess.run(["c++", "-v"], check=True)  # torch asks which compiler it is
        seen.extend(path for path in ours.rglob("*.h"))
        raise RuntimeError("no more is asked")

    compiler, ours = tmp_path / "the compiler" / "c++", tmp_path / "ours"
    ours.mkdir()
    compiler.parent.mkdir()
    compiler.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/told\necho "by $0" >&2\n'
        f'[ "$1" != {refused} ] || {{ echo "lacks a header" >&2; exit 1; }}\n'
    )
    compiler.chmod(0o755)
    path = f"{compiler.parent}:{os.environ['PATH']}"
    monkeypatch.setenv("PATH", path)
    monkeypatch.delenv("CXX", raising=False)
    if cxx:
        monkeypatch.setenv("CXX", cxx)
    monkeypatch.setattr(build, "check_deepspeed", lambda: None)
    monkeypatch.setattr(host, "build", lambda: ours / "host_adam.so")
    monkeypatch.setattr(deepspeed.ops.adam, "DeepSpeedCPUAdam", compile_op)
    assert build.main() == 1
    said = (tmp_path / "told").read_text().splitlines()
    headers = said[0].split()[1] if seen else ""
    assert said == [line.format(folder=headers) for line in told]
    assert seen == ([] if cxx else [Path(headers, "torch", "extension.h")])
    errors = capfd.readouterr().err
    assert "lacks a header" not in errors
    assert f"by {compiler}" in errors  # what torch looks for in the answer
    assert os.environ["PATH"] == path
    assert list(ours.iterdir()) == []
