"""Run the plugin and the trainers with every Python, DeepSpeed and megatron-core that is supported.

``nox -l`` lists the sessions. ``make compat`` runs all but those of other people's programs and
tests, which takes hours. Some of them:
``nox -s "equality(3.12-0.18.9)"``, ``nox -p 3.11 -k equality``. Each session has an environment of
its own in ``.nox`` and keeps it. A Python that is not on ``PATH`` fails its sessions, since a
release is made from a full run alone. docs/install.md names the last full run.
"""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from pathlib import Path

import nox

nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True

(TORCH,) = re.findall(r"\$\{TORCH_VERSION:-([\d.]+)\}", Path("requirements/setup.sh").read_text())
(NEWEST_DEEPSPEED,) = re.findall(
    r"^deepspeed==(.+)", Path("requirements/run.txt").read_text(), re.M
)
OLDER_DEEPSPEED = tomllib.loads(
    Path("src/deep_optimizer_states/adapter/deepspeed_releases.toml").read_text()
)
DEEPSPEED = [*OLDER_DEEPSPEED, NEWEST_DEEPSPEED]
MEGATRON = {"3.11": ["0.16.1"], "3.12": ["0.16.1", "0.19.2"], "3.13": ["0.16.1", "0.19.2"]}
"""Python -> releases of megatron-core that are published for it."""
PYTHONS = list(MEGATRON)
"""Pythons of the harness. The plugin's wheel takes those of pyproject.toml."""
TORCHES = ["2.7.0", "2.15.0"]
"""The oldest torch that pyproject.toml allows, and the newest that was run."""
PLUGIN_TORCHES = {"3.14": ["2.10.0", TORCHES[-1]]}
"""Python -> its oldest and newest torch, where they are others."""
PLUGIN_PYTHONS = nox.project.python_versions(nox.project.load_toml("pyproject.toml"))
SOURCES = tomllib.loads(Path("third_party/versions.toml").read_text())
TRAINER_TESTS = [
    "tests/integration/test_trainer.py",
    "tests/integration/test_trainer_model.py",
    "tests/integration/test_megatron_equality.py",
    "tests/integration/test_pipeline_trainer.py",
    "tests/integration/optimus_cc",
]
PROGRAMS = {
    "llamafactory": ["llamafactory"],
    "axolotl": ["axolotl", "deepspeed==0.18.9"],  # the newest that axolotl takes
    "ms-swift": ["ms-swift"],
    "trl": ["trl"],
    "transformers": ["transformers", "accelerate"],
    "accelerate": ["accelerate", "transformers"],
    "lightning": ["lightning", "transformers"],
}
"""Session -> what it installs, in the newest release, beside DeepSpeed."""
LEFT_OUT = ["flash-attn", "torchaudio", "torchvision", "xformers"]
"""Made for GPUs, or for one release of torch."""


@nox.session
@nox.parametrize(
    "python,deepspeed", [nox.param(p, r, id=f"{p}-{r}") for p in PYTHONS for r in DEEPSPEED]
)
def equality(session: nox.Session, deepspeed: str) -> None:
    """Compare every feature with stock DeepSpeed, bit by bit; on two ranks with one Python."""
    set_up(session, {"deepspeed": deepspeed})
    ranks = "1,2" if session.python == PYTHONS[0] else "1"
    test(session, "-s", "tests/integration/engine/test_release.py", RELEASE_RANKS=ranks)


@nox.session
@nox.parametrize(
    "python,torch",
    [
        nox.param(python, torch, id=f"{python}-{torch}")
        for python in (PYTHONS[0], *PLUGIN_TORCHES)
        for torch in PLUGIN_TORCHES.get(python, TORCHES)
    ],
)
def torches(session: nox.Session, torch: str) -> None:
    """Compare every feature with stock DeepSpeed under the oldest and the newest torch."""
    set_up(session, {"torch": torch})
    test(session, "-s", "tests/integration/engine/test_release.py", RELEASE_RANKS="1,2")


@nox.session
@nox.parametrize(
    "python,torch",
    [
        nox.param(python, torch, id=f"{python}-{torch}")
        for python in PLUGIN_PYTHONS
        for torch in PLUGIN_TORCHES.get(python, TORCHES)
    ],
)
def wheel(session: nox.Session, torch: str) -> None:
    """Install the wheel by its file alone, and train by the lines of its README."""
    folder, program = session.create_tmp(), Path("tests/integration/readme_program.py").resolve()
    command = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation")
    session.run(*command, "-q", "-w", folder, ".", external=True)
    (built,) = Path(folder).glob("*.whl")
    releases = Path(folder, "releases.txt")
    releases.write_text(f"torch=={torch}\ndeepspeed=={NEWEST_DEEPSPEED}\n")
    session.install("--constraint", str(releases), str(built))
    session.install("--force-reinstall", "--no-deps", str(built))  # of the same version each time
    session.env["TORCH_EXTENSIONS_DIR"] = str(Path(session.virtualenv.location, "torch_extensions"))
    session.chdir(folder)
    session.run("python", "-W", "ignore", str(program))


@nox.session(python=PYTHONS[0])
def release(session: nox.Session) -> None:
    """Build what a package index takes into ``dist``, and check it; uploads nothing."""
    session.install("build", "twine")
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", "dist", silent=True)
    session.run("python", "-m", "twine", "check", "--strict", *map(str, Path("dist").iterdir()))


@nox.session
@nox.parametrize(
    "python,megatron", [nox.param(p, r, id=f"{p}-{r}") for p in PYTHONS for r in MEGATRON[p]]
)
def trainers(session: nox.Session, megatron: str) -> None:
    """Run the tests of the trainers on megatron-core, with the newest DeepSpeed."""
    set_up(session, {"megatron-core": megatron})
    test(session, "-m", "not exhaustive", *TRAINER_TESTS)


def program(session: nox.Session) -> None:
    """Train with a real program on a CPU, stock beside the plugin; writes docs/programs.csv."""
    wanted = [f"torch=={TORCH}", f"deepspeed=={NEWEST_DEEPSPEED}", *PROGRAMS[session.name]]
    pins = {word.partition("==")[0]: word for word in wanted}
    unwanted = [f"{name}; sys_platform == 'none'" for name in LEFT_OUT]
    overrides = Path(session.create_tmp(), "overrides.txt")
    overrides.write_text("\n".join([*(pin for pin in pins.values() if "==" in pin), *unwanted]))
    session.env["TORCH_EXTENSIONS_DIR"] = str(Path(session.virtualenv.location, "torch_extensions"))
    session.install("uv")  # pip does not resolve axolotl's requirements in a quarter of an hour
    install = ["uv", "pip", "install", "--overrides", str(overrides)]
    install += ["--no-build-isolation-package", "deepspeed"]  # its setup imports torch
    session.run_install(
        *install, pins["torch"], "numpy", "setuptools>=77", "wheel", "ninja", "pydantic"
    )
    session.run_install(*install, pins["deepspeed"], env={"DS_BUILD_OPS": "0"})
    session.run_install(*install, "--upgrade-package", session.name, *pins.values())
    session.run_install(*install, "--no-deps", "-e", ".")
    session.run("python", "-W", "ignore", "-m", "deep_optimizer_states.build")
    session.run("python", "tests/programs", session.name, env={"PYTHONPATH": "tests/support"})


for name in PROGRAMS:
    nox.session(python=PYTHONS[0], name=name, default=False)(program)


@nox.session(python=PYTHONS[0], default=False)
def families(session: nox.Session) -> None:
    """Ask for advice on every model family that the newest transformers builds from its config."""
    set_up(session, {})
    session.install("--upgrade", "transformers")
    test(session, "-s", "tests/unit/predict/test_families.py")


@nox.session(name="study-pages", python=PYTHONS[0], default=False)
def study_pages(session: nox.Session) -> None:
    """Run every command of docs/studies that needs no GPU (an hour)."""
    set_up(session, {})
    test(session, "-m", "exhaustive", "tests/integration/test_study_pages.py")


# Needs GitHub, and hours; `make compat` leaves it out.
@nox.session(name="deepspeed-tests", python=PYTHONS[0], default=False)
@nox.parametrize(
    "release", [nox.param(r, id=r) for r in DEEPSPEED if f"deepspeed-tests-{r}" in SOURCES]
)
def deepspeed_tests(session: nox.Session, release: str) -> None:
    """Run DeepSpeed's own unit tests under stock and the plugin; writes a report."""
    set_up(session, {"deepspeed": release})
    session.install("pytest<8.4")  # in later ones DeepSpeed's fixtures are none
    source = f"deepspeed-tests-{release}"
    session.run("python", "third_party/fetch.py", source)
    work = Path(session.virtualenv.location, "deepspeed-tests")
    suite = ("tests/deepspeed_suite/suite.py", f"third_party/src/{source}", f"--work={work}")
    session.run("python", *suite, *session.posargs, env={"PYTHONWARNINGS": "ignore"})


def set_up(session: nox.Session, releases: dict[str, str]) -> None:
    """Install what requirements/setup.sh installs, with other releases of some packages."""
    files = ("requirements/run.txt", "requirements/dev.txt")
    lines = session.run("python", "requirements/pins.py", *files, silent=True)
    pins = {"torch": TORCH} | dict(line.split("==") for line in str(lines).split()) | releases
    if session.python not in MEGATRON:
        del pins["megatron-core"]
    torch, numpy, deepspeed = (f"{name}=={pins[name]}" for name in ("torch", "numpy", "deepspeed"))
    install_deepspeed(session, torch, numpy, deepspeed)
    session.install(*(f"{name}=={release}" for name, release in pins.items()))
    session.install("--no-build-isolation", "--no-deps", "-e", ".")
    session.run("python", "-W", "ignore", "-m", "deep_optimizer_states.build")


def install_deepspeed(session: nox.Session, torch: str, numpy: str, deepspeed: str) -> None:
    """Install torch, then DeepSpeed, which is published as source and whose setup imports torch."""
    session.install(torch, numpy, "setuptools>=77", "wheel")
    session.install("--no-build-isolation", deepspeed, env={"DS_BUILD_OPS": "0"})
    session.env["TORCH_EXTENSIONS_DIR"] = str(Path(session.virtualenv.location, "torch_extensions"))


def test(session: nox.Session, *words: str, **variables: str) -> None:
    """Run tests in a session's environment; what follows ``--`` goes to pytest as well."""
    options = ("-q", "-p", "no:cacheprovider", *session.posargs)
    variables |= {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    session.run("python", "-m", "pytest", *options, *words, env=variables)
