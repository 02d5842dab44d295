"""The package alone: built as a wheel and installed where nothing of the checkout can be imported.

Its environment is empty but for the wheel and a path to the site-packages in which the running
environment keeps torch and DeepSpeed.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("installed_worker.py")
KERNELS = Path(os.environ["TORCH_EXTENSIONS_DIR"])

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of what the package is made of, without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignored)
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    command = [sys.executable, "-m", "pip", "wheel", *flags, "-w", str(folder), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The interpreter of an environment that has the wheel and what it depends on."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    origins = [find_spec(name).origin for name in ("torch", "deepspeed")]
    paths = {str(Path(origin).parents[1]) for origin in origins}
    (packages / "dependencies.pth").write_text("\n".join(sorted(paths)))
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def run(installed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    # Kernels are built ahead; a copy, so that the running environment's stay as they are.
    built = shutil.copytree(KERNELS, folder / "kernels")
    environment |= {"OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": str(built)}

    def run(*words):
        done = subprocess.run(
            [str(installed), "-W", "ignore", *map(str, words)],
            cwd=folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    return run


def test_nothing_of_the_harness_is_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    packages = {top for top in tops if not top.endswith(".dist-info")}
    assert packages == {"deep_optimizer_states", "optimus_cc"}
    assert "deep_optimizer_states/predict/models.toml" in names
    assert "deep_optimizer_states/site_hook/sitecustomize.py" in names
    assert "sitecustomize.py" not in names  # every Python of the environment would import it
    own = [name for name in names if name.startswith("deep_optimizer_states/")]
    assert not [name for name in own if "fit" in Path(name).stem or "simplex" in name]


def test_nothing_of_the_checkout_can_be_imported(run):
    code = "import sys, importlib.util as u; print(*filter(None, sys.path), sep='\\n')\n"
    code += "for name in ('launch', 'configs', 'parse', 'plots', 'dataset', 'benchmarks'):\n"
    code += "    assert u.find_spec(name) is None, name\n"
    code += "print(u.find_spec('deep_optimizer_states').origin)"
    *paths, origin = run("-c", code).splitlines()
    assert not {str(ROOT), str(ROOT / "src")} & set(paths)
    assert Path(origin).parents[1].name == "site-packages"
    assert not Path(origin).is_relative_to(ROOT)


def test_the_compression_needs_torch_alone(run):
    code = "import sys, optimus_cc, optimus_cc.pipelining\nprint(optimus_cc.__file__)\n"
    code += "print(*{name.partition('.')[0] for name in sys.modules})"
    origin, loaded = run("-c", code).splitlines()
    assert not Path(origin).is_relative_to(ROOT)
    assert "torch" in loaded.split()
    assert not {"megatron", "deepspeed", "deep_optimizer_states", "pydantic"} & set(loaded.split())


def test_plan_knows_its_models(run):
    out = run("-m", "deep_optimizer_states", "plan", "--model", "20B", "--machine", "h200x1")
    assert out.startswith("20B (15.33e9 parameters) with engine ours on h200x1")
    assert "policy auto:" in out


def test_calibrate_writes_a_profile_that_plan_reads(run, tmp_path):
    profile = tmp_path / "machine.toml"
    words = ["--device", "cpu", "--threads", "1", "-o", profile]
    run("-m", "deep_optimizer_states", "calibrate", *words)
    out = run("-m", "deep_optimizer_states", "plan", "--model", "tiny", "--machine", profile)
    assert "with engine ours on machine" in out


def test_a_training_step_is_bitwise_that_of_stock(run):
    report = json.loads(run(WORKER).splitlines()[-1])
    assert report["checkout"] == []
    assert report["plugin"].endswith("/site-packages/deep_optimizer_states/__init__.py")
    assert not report["plugin"].startswith(str(ROOT))
    stock = report["stock"]
    assert stock.pop("optimizer").startswith("deepspeed.")
    for policy in ("all-host", "stride"):
        assert report[policy].pop("optimizer").startswith("deep_optimizer_states.")
        assert report[policy] == stock
