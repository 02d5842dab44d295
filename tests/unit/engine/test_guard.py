"""Which DeepSpeed is taken, which is refused, and what is said of it."""

import importlib
import re
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


@pytest.mark.parametrize("label", ["", "+0123abc"])
def test_the_installed_release_is_taken_in_silence_whatever_its_build(monkeypatch, said, label):
    is_version(monkeypatch, deepspeed.__version__ + label)
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
@pytest.mark.parametrize(
    ("edited", "refused", "taken"), [("stages 1 and 2", [1, 2], [3]), ("stage 3", [3], [1, 2])]
)
def test_stages_whose_methods_are_known_are_taken_and_the_others_refused(
    monkeypatch, said, version, edited, refused, taken
):
    is_version(monkeypatch, version)
    edit_a_method(monkeypatch, edited)
    method = f"{CLASSES[edited].partition(':')[2]}.step"
    install()
    try:
        for stage in taken:
            read_config(stage)
        for stage in refused:
            read_config(stage, enabled=False)
            with pytest.raises(UnsupportedDeepSpeedError) as caught:
                read_config(stage)
            start = f"DeepSpeed {version} at zero_optimization.stage = {stage}: "
            assert str(caught.value).startswith(start)
            assert method in str(caught.value)
            way_out = f"set the stage to {' or '.join(map(str, taken))}, install one of"
            assert way_out in str(caught.value)
    finally:
        uninstall()
    (text,) = said
    head, *lines = text.splitlines()
    assert head.startswith(f"deep_optimizer_states: DeepSpeed {version} ")
    one, three = ("refused" if numbers == refused else "taken" for numbers in ([1, 2], [3]))
    what = {
        "refused": f"refused: other code in {method}",
        "taken": f"taken: nothing differs from {guard.NEWEST}",
    }
    assert [line.strip() for line in lines] == [
        f"ZeRO stages 1 and 2 are {what[one]}",
        f"ZeRO stage 3 is {what[three]}",
    ]


@OTHERWISE
@pytest.mark.parametrize("edited", [["every stage"], ["stage 3", "stages 1 and 2"]])
def test_where_no_stage_is_left_installing_is_refused_with_a_line_for_each(
    monkeypatch, said, version, edited
):
    is_version(monkeypatch, version)
    for of in edited:
        edit_a_method(monkeypatch, of)
    with pytest.raises(UnsupportedDeepSpeedError) as caught:
        install()
    head, one, three, way_out = str(caught.value).splitlines()
    assert head.startswith(f"DeepSpeed {version} ")
    own = {"stages 1 and 2": "DeepSpeedZeroOptimizer", "stage 3": "DeepSpeedZeroOptimizer_Stage3"}
    classes = own if len(edited) > 1 else dict.fromkeys(own, "DeepSpeedCPUAdam")
    other = {stages: f"refused: other code in {name}.step" for stages, name in classes.items()}
    assert one.strip() == f"ZeRO stages 1 and 2 are {other['stages 1 and 2']}"
    assert three.strip() == f"ZeRO stage 3 is {other['stage 3']}"
    assert "allow_unverified=True" in way_out
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
    (line,) = (line for line in text.splitlines() if line.strip().startswith("ZeRO stage 3 "))
    assert "Stage3.step" in line
    assert "BITS MAY NOT BE STOCK'S" in line


@pytest.mark.parametrize("has_known_methods", [True, False])
@pytest.mark.parametrize("version", ["0.17.1", "0.19.4", "0.18.9.post1"])
def test_an_older_release_that_was_never_checked_is_refused(
    monkeypatch, version, has_known_methods
):
    is_version(monkeypatch, version)
    if has_known_methods:
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


@pytest.mark.parametrize("method", ["unscale_and_clip_grads", "partition_grads"])
def test_a_changed_method_is_named_below_a_decorator_too(monkeypatch, method):
    def other(self, *given):
        """Another DeepSpeed's."""

    other = instrument_w_nvtx(other) if method == "partition_grads" else other
    monkeypatch.setattr(DeepSpeedZeroOptimizer_Stage3, method, other)
    assert f"DeepSpeedZeroOptimizer_Stage3.{method};" in guard.check_deepspeed()[3]


def test_a_missing_method_is_named(monkeypatch):
    monkeypatch.setitem(guard.FINGERPRINTS, STAGE3, {"no_such_method": "0" * 12})
    assert "no_such_method" in guard.check_deepspeed()[3]


def test_the_table_of_the_newest_release_is_empty(monkeypatch):
    assert guard.table_of_installed() == ""
    edit_a_method(monkeypatch)
    table = tomllib.loads(guard.table_of_installed())[deepspeed.__version__]
    assert list(table[STAGE3]) == ["step"]


def test_the_package_asks_for_no_release_older_than_the_oldest_that_is_supported():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (asked,) = (text.removeprefix("deepspeed") for text in wanted if text.startswith("deepspeed"))
    allowed = SpecifierSet(asked)
    assert all(version in allowed for version in guard.CHECKED_VERSIONS)
    assert "0.18.8" not in allowed


@pytest.mark.parametrize("document", ["plugin.md", "settings.md"])
def test_documents_name_the_releases_that_are_supported(document):
    text = re.sub(r"\s+", " ", (ROOT / "docs" / document).read_text())
    assert ", ".join(guard.CHECKED_VERSIONS[:-1]) + f" and {guard.NEWEST}" in text
