"""Run the plugin and the trainers with every Python, DeepSpeed and megatron-core that is supported.

``nox -l`` lists the sessions and ``make compat`` runs them all, which takes hours. Some of them:
``nox -s "equality(3.12-0.18.9)"``, ``nox -p 3.11 -k equality``. Each session has an environment of
its own in ``.nox`` and keeps it. A Python that is not on ``PATH`` fails its sessions, since a
release is made from a full run alone. docs/compatibility.md names the last full run.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import nox

nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True

(TORCH,) = re.findall(r"\$\{TORCH_VERSION:-([\d.]+)\}", Path("requirements/setup.sh").read_text())
PYTHONS = nox.project.python_versions(nox.project.load_toml("pyproject.toml"))
(NEWEST_DEEPSPEED,) = re.findall(
    r"^deepspeed==(.+)", Path("requirements/run.txt").read_text(), re.M
)
OLDER_DEEPSPEED = tomllib.loads(
    Path("src/deep_optimizer_states/adapter/deepspeed_releases.toml").read_text()
)
DEEPSPEED = [*OLDER_DEEPSPEED, NEWEST_DEEPSPEED]
MEGATRON = {"3.11": ["0.16.1"], "3.12": ["0.16.1", "0.19.2"], "3.13": ["0.16.1", "0.19.2"]}
"""Python -> releases of megatron-core that are published for it."""
SOURCES = tomllib.loads(Path("third_party/versions.toml").read_text())
TRAINER_TESTS = [
    "tests/integration/test_trainer.py",
    "tests/integration/test_trainer_model.py",
    "tests/integration/test_megatron_equality.py",
    "tests/integration/test_pipeline_trainer.py",
    "tests/integration/optimus_cc",
]


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
    "python,megatron", [nox.param(p, r, id=f"{p}-{r}") for p in PYTHONS for r in MEGATRON[p]]
)
def trainers(session: nox.Session, megatron: str) -> None:
    """Run the tests of the trainers on megatron-core, with the newest DeepSpeed."""
    set_up(session, {"megatron-core": megatron})
    test(session, "-m", "not exhaustive", *TRAINER_TESTS)


# Needs GitHub, and hours; `make compat` leaves it out.
@nox.session(name="deepspeed-tests", python=PYTHONS[0], default=False)
@nox.parametrize(
    "release", [nox.param(r, id=r) for r in DEEPSPEED if f"deepspeed-tests-{r}" in SOURCES]
)
def deepspeed_tests(session: nox.Session, release: str) -> None:
    """Run DeepSpeed's own unit tests under stock and the plugin; writes docs/deepspeed-tests.md."""
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
    pins = dict(line.split("==") for line in str(lines).split()) | releases
    session.install(f"torch=={TORCH}", f"numpy=={pins['numpy']}", "setuptools>=77", "wheel")
    # DeepSpeed is published as source, and its setup imports torch.
    deepspeed = f"deepspeed=={pins['deepspeed']}"
    session.install("--no-build-isolation", deepspeed, env={"DS_BUILD_OPS": "0"})
    session.install(*(f"{name}=={release}" for name, release in pins.items()))
    session.install("--no-build-isolation", "--no-deps", "-e", ".")
    session.env["TORCH_EXTENSIONS_DIR"] = str(Path(session.virtualenv.location, "torch_extensions"))
    session.run("python", "-W", "ignore", "-m", "deep_optimizer_states.build")


def test(session: nox.Session, *words: str, **variables: str) -> None:
    """Run tests in a session's environment; what follows ``--`` goes to pytest as well."""
    options = ("-q", "-p", "no:cacheprovider", *session.posargs)
    variables |= {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    session.run("python", "-m", "pytest", *options, *words, env=variables)
