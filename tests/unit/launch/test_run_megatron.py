import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import json, os, sys
from deepspeed.compression.compress import init_compression
from torchvision.datasets import VisionDataset
import torchvision.transforms, megatron
assert issubclass(type("D", (VisionDataset,), {}), object)
print(json.dumps({
    "argv": sys.argv, "name": __name__, "megatron": megatron.__file__,
    "plugin": "deep_optimizer_states" in sys.modules,
    "local_size": os.environ.get("LOCAL_SIZE"),
}))
sys.exit(int(os.environ.get("ENDS_WITH", "0")))
"""


@pytest.fixture
def checkout(tmp_path):
    """A folder like a checkout, and packages that stand for slow ones."""
    folder = tmp_path / "it's a checkout"
    (folder / "megatron").mkdir(parents=True)
    (folder / "megatron" / "__init__.py").touch()
    (folder / "pretrain_gpt.py").write_text(SCRIPT)
    packages = tmp_path / "packages"
    for name in ("deepspeed", "deep_optimizer_states", "megatron"):
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").touch()
    plugin = "import sys\ndef install():\n    print('installed', file=sys.stderr)\n"
    (packages / "deep_optimizer_states" / "__init__.py").write_text(plugin)
    return folder, packages


def run(checkout, *flags, **environment):
    folder, packages = checkout
    command = [
        sys.executable,
        str(ROOT / "launch" / "backends" / "run_megatron.py"),
        str(folder),
        *flags,
    ]
    env = {**os.environ, "PYTHONPATH": str(packages), **environment}
    if "LOCAL_RANK" not in environment:
        env.pop("LOCAL_RANK", None)
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_the_script_runs_as_its_own_program(checkout):
    done = run(checkout, "--lr", "1e-3", "a b")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["argv"] == [str(checkout[0] / "pretrain_gpt.py"), "--lr", "1e-3", "a b"]
    assert said["name"] == "__main__"
    assert Path(said["megatron"]).parent.parent == checkout[0]
    assert not said["plugin"]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_plugin_is_installed_where_the_config_asks_for_it(checkout, tmp_path, enabled):
    config = tmp_path / "ds config.json"
    config.write_text(json.dumps({"deep_optimizer_states": {"enabled": enabled}}))
    done = run(checkout, "--deepspeed_config", str(config))
    assert json.loads(done.stdout)["plugin"] is enabled
    assert done.stderr == ("installed\n" if enabled else "")


def test_the_launchers_variables_become_what_the_script_and_deepspeed_read(checkout):
    said = json.loads(run(checkout, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2").stdout)
    assert (said["argv"][1:], said["local_size"]) == (["--local_rank=1"], "2")
    given = run(checkout, "--local-rank=0", LOCAL_RANK="1", ENDS_WITH="3")
    assert json.loads(given.stdout)["argv"][1:] == ["--local-rank=0"]
    assert given.returncode == 3
