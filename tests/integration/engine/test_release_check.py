"""A DeepSpeed that is newer than all that are known, as a process meets it that calls install().

The newer release is the installed one with another version and one method edited.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

STAGE3 = "deepspeed.runtime.zero.stage3"
VERSION = "deepspeed.git_version_info_installed"
LINE = "                    total_norm += param_norm**2\n"
"""Of the gradient norm, which the plugin computes by itself."""

FINDER = """
import importlib.abc, importlib.util, sys

class Edited(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        place = {places!r}.get(name)
        return place and importlib.util.spec_from_file_location(name, place)

sys.meta_path.insert(0, Edited())
"""


def source_of(module):
    return Path(importlib.util.find_spec(module).origin).read_text()


@pytest.fixture
def install(tmp_path):
    """Call ``install()`` in a rank of a job under DeepSpeed 0.99.0, with one line of it edited."""

    def run(line, **variables):
        source = source_of(STAGE3)
        assert source.count(LINE) == 1
        edited, version = tmp_path / "stage3.py", tmp_path / "version.py"
        edited.write_text(source.replace(LINE, line))
        version.write_text(source_of(VERSION) + "\nversion = '0.99.0'\n")
        places = {STAGE3: str(edited), VERSION: str(version)}
        (tmp_path / "sitecustomize.py").write_text(FINDER.format(places=places))
        job = {"RANK": "3", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "no.such.host"}
        return subprocess.run(
            [
                sys.executable,
                "-W",
                "ignore",
                "-c",
                "import deep_optimizer_states as plugin\nplugin.install()\nprint('installed')",
            ],
            env={
                **os.environ,
                **job,
                "MASTER_PORT": "1",
                "PYTHONPATH": str(tmp_path),
                "XDG_CACHE_HOME": str(tmp_path / "cache"),
                **variables,
            },
            capture_output=True,
            text=True,
        )

    return run


def test_a_newer_release_with_stocks_bits_is_taken_after_one_trial(install):
    first = install(LINE + "                    # another comment\n")
    assert first.stdout.endswith("installed\n"), first.stdout + first.stderr
    assert "DeepSpeed 0.99.0 is not known. A toy model is trained" in first.stdout
    assert "DeepSpeed 0.99.0: all bits were stock's" in first.stdout
    second = install(LINE + "                    # another comment\n")
    assert second.stdout.endswith("installed\n")
    assert "toy model" not in second.stdout


def test_a_newer_release_with_other_bits_is_refused_with_what_differed(install):
    refused = install(LINE.replace("+= ", "+= 2 * "))
    assert refused.returncode == 1
    for text in (
        "UnsupportedDeepSpeedError: DeepSpeed 0.99.0 is newer than",
        "DeepSpeedZeroOptimizer_Stage3.complete_grad_norm_calculation_for_cpu_offload",
        "bits were not stock's: bf16, policy stride 2: losses, norms, ",
        "allow_unverified=True",
    ):
        assert text in refused.stderr
    taken = install(LINE.replace("+= ", "+= 2 * "), DEEP_OPTIMIZER_STATES_ALLOW_UNVERIFIED="1")
    assert taken.stdout.endswith("installed\n")
    assert "complete_grad_norm_calculation_for_cpu_offload. allow_unverified is set" in taken.stdout
