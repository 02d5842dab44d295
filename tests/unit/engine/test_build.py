"""Building the compiled ops ahead."""

import os
import time

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
    monkeypatch.setattr(host, "build", lambda: tmp_path / "deep_optimizer_states" / "host_adam.so")
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
    monkeypatch.setattr(host, "build", lambda: tmp_path / "deep_optimizer_states" / "host_adam.so")
    assert build.main() == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"{lock}: cpu_adam has been locked for 90 min, ")
    assert said.endswith(f": rm {lock}")
    assert lock.exists()
