"""The package alone: built as a wheel and installed where nothing of the checkout can be imported.

Its environment is empty but for the wheel and a path to the site-packages in which the running
environment keeps torch and DeepSpeed.
"""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from deep_optimizer_states.__main__ import REQUIRED
from deep_optimizer_states.adapter import guard as deepspeed_guard

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("frameworks") / "unaware_program.py"
CHECKOUT = ("launch", "configs", "parse", "plots", "dataset", "benchmarks")
KERNELS = Path(os.environ["TORCH_EXTENSIONS_DIR"])

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of what the package is made of, without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "LICENSE"):
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
    environment["CUDA_VISIBLE_DEVICES"] = ""

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


def test_an_index_page_says_what_the_wheel_is_and_links_nothing_that_it_lacks(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        about = email.message_from_bytes(archive.read(name))
    assert "ZeRO stages 1, 2 and 3" in about["Summary"]
    needed = (re.match(r"[\w-]+", text)[0] for text in about.get_all("Requires-Dist"))
    assert tuple(dict.fromkeys(needed)) == REQUIRED  # torch stands there once for each Python
    text = about.get_payload(decode=True).decode()
    assert "deep_optimizer_states.install()" in text
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links
    assert all(link.startswith("https://") for link in links)
    releases = ", ".join(deepspeed_guard.CHECKED_VERSIONS[1:-1]) + f" and {deepspeed_guard.NEWEST}"
    assert f"{deepspeed_guard.CHECKED_VERSIONS[0]} (stage 3 alone), {releases}" in (
        text.replace("\n", " ")
    )


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory):
    """What starts a program of an environment that has the wheel and none of its dependencies."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install"]
    flags = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *flags, str(wheel)], check=True, capture_output=True, text=True)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def start(program, *words):
        return subprocess.run(
            [str(folder / "bin" / program), *words],
            cwd=folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip

    return start


OF_THE_MODULE = ("python", "-m", "deep_optimizer_states")
COMMAND = pytest.mark.parametrize("command", [OF_THE_MODULE, ("deep-optimizer-states",)])


@COMMAND
def test_without_its_dependencies_help_is_given_and_a_line_names_what_is_missing(bare, command):
    done = bare(*command, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: python -m deep_optimizer_states COMMAND")
    (line,) = done.stderr.splitlines()
    assert ": torch deepspeed pydantic numpy psutil; give `pip install torch deepspeed" in line


@COMMAND
def test_the_version_is_the_wheels(bare, wheel, command):
    assert bare(*command, "--version").stdout == (
        f"deep-optimizer-states {wheel.name.split('-')[1]}\n"
    )


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["plan", "--model", "20B", "--machine", "h200x1"], "pydantic"),
        (["calibrate"], "psutil"),
    ],
)
def test_a_command_that_lacks_a_package_names_it_in_a_line(bare, words, missing):
    done = bare(*OF_THE_MODULE, *words)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].endswith(f": {missing}; give `pip install {missing}`")


def test_a_command_that_needs_no_package_works_without_any(bare):
    assert bare(*OF_THE_MODULE, "run", "echo", "run").stdout == "run\n"


def test_the_compression_needs_torch_alone(run):
    code = "import sys, optimus_cc, optimus_cc.pipelining\nprint(optimus_cc.__file__)\n"
    code += "print(*{name.partition('.')[0] for name in sys.modules})"
    origin, loaded = run("-c", code).splitlines()
    assert not Path(origin).is_relative_to(ROOT)
    assert "torch" in loaded.split()
    assert not {"megatron", "deepspeed", "deep_optimizer_states", "pydantic"} & set(loaded.split())


def test_calibrate_writes_a_profile_that_plan_reads_beside_its_models(run, tmp_path):
    profile = tmp_path / "machine.toml"
    run("-m", "deep_optimizer_states", "calibrate", "-o", profile)
    out = run("-m", "deep_optimizer_states", "plan", "--model", "tiny", "--machine", profile)
    assert "with engine plugin on machine" in out


def test_a_program_that_does_not_know_the_plugin_trains_with_the_installed_one(
    run, installed, tmp_path
):
    code = "import deep_optimizer_states, importlib.util as found\n"
    code += f"print(deep_optimizer_states.__file__, *map(found.find_spec, {CHECKOUT!r}))"
    origin, *others = run("-c", code).split()
    assert origin.endswith("/site-packages/deep_optimizer_states/__init__.py")
    assert not Path(origin).is_relative_to(ROOT)
    assert set(others) == {"None"}
    launcher = (installed, "-m", "torch.distributed.run", "--standalone")
    run("-m", "deep_optimizer_states", "run", *launcher, PROGRAM, tmp_path)
    assert json.loads((tmp_path / "told.0.json").read_text()) == "InterleavedZeroOptimizer"
