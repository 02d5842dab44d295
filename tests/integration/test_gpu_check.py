"""`gpu-check` for real, in its small form: the pieces that take seconds, and a second call."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
CHEAP = ("smoke", "tests", "mappings")


def make_wheel(folder):
    """A wheel of a package that no machine has, in a folder like that of wheelhouse.sh."""
    folder.mkdir()
    info = "not_on_any_machine-1.0.dist-info"
    with zipfile.ZipFile(folder / "not_on_any_machine-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("not_on_any_machine.py", "")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: not-on-any-machine\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return folder


def gpu_check(tmp_path, *arguments):
    flags = ("--device", "cpu", "--folder", str(tmp_path / "results"))
    flags += ("--wheels", str(tmp_path / "wheels"), "--out", str(tmp_path / "out"))
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", *arguments, *flags],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_cheap_pieces_run_without_a_gpu_and_are_done_then(tmp_path):
    make_wheel(tmp_path / "wheels")
    done = gpu_check(tmp_path, *CHEAP)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    pieces = {piece["name"]: piece for piece in summary["pieces"]}
    assert {name: piece["status"] for name, piece in pieces.items()} == dict.fromkeys(
        ("facts", "install", "build", *CHEAP), "ok"
    )
    assert summary["small"]
    assert pieces["install"]["lines"] == ["1 packages installed"]
    assert (tmp_path / "results" / "built" / "site" / "not_on_any_machine.py").is_file()
    assert pieces["smoke"]["lines"][-1] == "12 comparisons with stock, 0 differ"
    assert "just in time: equal" in pieces["smoke"]["lines"][0]
    assert len(pieces["mappings"]["lines"]) == 5
    again = gpu_check(tmp_path, *CHEAP)
    assert again.returncode == 0, again.stdout + again.stderr
    for name in ("install", "build", *CHEAP):
        assert f"{name}: done before" in again.stderr
