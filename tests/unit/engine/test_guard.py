"""Which DeepSpeed is taken, which is refused, and what is said of it."""

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import deepspeed
import pytest
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import instrument_w_nvtx, logger
from packaging.specifiers import SpecifierSet

from deep_optimizer_states import install, uninstall
from deep_optimizer_states.adapter import guard
from deep_optimizer_states.errors import ConfigError, UnsupportedDeepSpeedError

ROOT = Path(__file__).resolve().parents[3]
STAGE3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"


@pytest.fixture
def said(monkeypatch):
    """What the guard says, line by line."""
    lines = []
    monkeypatch.setattr(logger, "warning", lines.append)
    return lines


def read_config(stage, enabled=True):
    """What ``deepspeed.initialize`` does with the config of an engine at this stage."""
    from deepspeed.runtime.config import DeepSpeedConfig

    offload = {"device": "cpu"}
    return DeepSpeedConfig(
        {
            "train_batch_size": 1,
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage, "offload_optimizer": offload},
            "deep_optimizer_states": {"enabled": enabled},
        }
    )


def is_version(monkeypatch, version):
    monkeypatch.setattr(deepspeed, "__version__", version)


CLASSES = {
    "stage 3": STAGE3,
    "stages 1 and 2": "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer",
    "every stage": "deepspeed.ops.adam:DeepSpeedCPUAdam",
}
"""One that only some stages rely on, and one of all."""


def edit_a_method(monkeypatch, of="stage 3"):
    module, name = CLASSES[of].split(":")

    def step(self, closure=None):
        """Another DeepSpeed's."""

    monkeypatch.setattr(getattr(importlib.import_module(module), name), "step", step)


def test_the_installed_release_is_taken_in_silence_whatever_its_build(monkeypatch, said):
    guard.check_deepspeed()
    is_version(monkeypatch, f"{deepspeed.__version__}+0123abc")
    guard.check_deepspeed()
    assert not said


@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_a_newer_release_with_the_same_methods_is_taken_with_one_line_of_one_rank(
    monkeypatch, said, local_rank
):
    is_version(monkeypatch, "0.99.0")
    monkeypatch.setattr(guard, "changed_methods", lambda version: {})
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    guard.check_deepspeed()
    line = f"DeepSpeed 0.99.0 has the methods of {guard.NEWEST}, the newest that was"
    assert [line in text for text in said] == [True] * (local_rank == "0")


# The installed release, once it is edited, is held to the same rule as a newer one.
OTHERWISE = pytest.mark.parametrize("version", ["0.20.0", deepspeed.__version__])


@OTHERWISE
@pytest.mark.parametrize("edited", CLASSES)
def test_a_method_that_is_not_known_is_refused_by_its_name(monkeypatch, said, version, edited):
    is_version(monkeypatch, version)
    edit_a_method(monkeypatch, edited)
    with pytest.raises(UnsupportedDeepSpeedError) as caught:
        install()
    assert str(caught.value).startswith(f"DeepSpeed {version} ")
    method = f"{CLASSES[edited].partition(':')[2]}.step"
    assert f"other code in {method}; install one of" in str(caught.value)
    assert "allow_unverified=True" in str(caught.value)
    assert not said


@pytest.mark.parametrize(
    ("how", "version"),
    [
        ("an argument", "0.99.0"),
        ("the environment", "0.19.2"),
        ("an argument", deepspeed.__version__),
    ],
)
def test_what_is_not_verified_is_taken_with_a_warning_where_that_is_allowed(
    monkeypatch, said, version, how
):
    is_version(monkeypatch, version)
    edit_a_method(monkeypatch)
    if how == "the environment":
        monkeypatch.setenv(guard.ALLOW_UNVERIFIED, "1")
    try:
        install(allow_unverified=how == "an argument")
        read_config(3)
    finally:
        uninstall()
    (text,) = said
    assert f"DeepSpeed {version} " in text
    assert "Stage3.step" in text
    assert "BITS MAY NOT BE STOCK'S" in text


@pytest.mark.parametrize("version", ["0.17.1", "0.19.4", "0.18.9.post1"])
def test_an_older_release_that_was_never_checked_is_refused_whatever_its_methods(
    monkeypatch, version
):
    is_version(monkeypatch, version)
    monkeypatch.setattr(guard, "changed_methods", lambda version: {})
    with pytest.raises(UnsupportedDeepSpeedError) as caught:
        install()
    for text in (f"DeepSpeed {version} was never checked", *guard.CHECKED_VERSIONS):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        # The installed one's code under an older one's number is not what was released.
        (next(iter(guard.OLDER)), f"what was released as {next(iter(guard.OLDER))}"),
        ("unknown", "version is 'unknown', which is no release"),
    ],
)
def test_a_number_that_is_not_that_of_its_code_is_refused(monkeypatch, version, words):
    is_version(monkeypatch, version)
    with pytest.raises(UnsupportedDeepSpeedError, match=words):
        guard.check_deepspeed()


def test_a_wrong_switch_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv(guard.ALLOW_UNVERIFIED, "yes")
    with pytest.raises(ConfigError, match="ALLOW_UNVERIFIED = 'yes': set it to 1, or to 0"):
        guard.check_deepspeed()


def test_a_changed_method_below_a_decorator_and_a_missing_one_are_named(monkeypatch):
    @instrument_w_nvtx
    def other(self, *given):
        """Another DeepSpeed's."""

    monkeypatch.setattr(DeepSpeedZeroOptimizer_Stage3, "partition_grads", other)
    monkeypatch.setitem(guard.FINGERPRINTS, CLASSES["every stage"], {"no_such_method": "0" * 12})
    with pytest.raises(UnsupportedDeepSpeedError, match="no_such_method") as caught:
        guard.check_deepspeed()
    assert "Optimizer_Stage3.partition_grads" in str(caught.value)


@pytest.mark.parametrize(("system", "name"), [("Windows", "Windows"), ("Darwin", "macOS")])
def test_another_system_than_linux_is_named_in_a_line(system, name):
    """In a process of its own, without the signals that Windows lacks."""
    code = f"import platform, signal; platform.system = lambda: {system!r}\n"
    code += "del signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2\n"
    code += "import deep_optimizer_states; deep_optimizer_states.install(allow_unverified=True)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "src", capture_output=True, text=True, check=False
    )
    line = f"deep_optimizer_states needs Linux, and this is {name}: "
    assert f"UnsupportedDeepSpeedError: {line}" in done.stderr.splitlines()[-1]


def test_the_table_of_the_newest_release_is_empty(monkeypatch):
    assert guard.table_of_installed() == ""
    edit_a_method(monkeypatch)
    table = tomllib.loads(guard.table_of_installed())[deepspeed.__version__]
    assert list(table[STAGE3]) == ["step"]


def test_the_package_asks_for_no_older_release_than_the_supported_ones():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (asked,) = (text.removeprefix("deepspeed") for text in wanted if text.startswith("deepspeed"))
    allowed = SpecifierSet(asked)
    assert all(version in allowed for version in guard.CHECKED_VERSIONS)
    others = {"0.18.8", *(f"0.19.{number}" for number in range(8))} - {*guard.CHECKED_VERSIONS}
    assert len(others) == 6
    assert not any(version in allowed for version in others)
    assert "0.20.0" in allowed


def test_the_plugins_page_names_the_releases_that_are_supported():
    text = re.sub(r"\s+", " ", (ROOT / "docs" / "plugin.md").read_text())
    assert ", ".join(guard.CHECKED_VERSIONS[:-1]) + f" and {guard.NEWEST}" in text
