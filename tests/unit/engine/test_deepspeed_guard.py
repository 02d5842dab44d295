"""Which DeepSpeed is taken, which is refused, and what is said of it."""

import re
import tomllib
from pathlib import Path

import deepspeed
import pytest
from deepspeed.utils import logger
from packaging.specifiers import SpecifierSet

from deep_optimizer_states import deepspeed_guard as guard, install, release_check, uninstall
from deep_optimizer_states.errors import ConfigError, UnsupportedDeepSpeedError

ROOT = Path(__file__).resolve().parents[3]
STAGE3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"


@pytest.fixture
def said(monkeypatch):
    """What the guard says, line by line."""
    lines = []
    monkeypatch.setattr(logger, "warning", lines.append)
    return lines


@pytest.fixture
def trials(monkeypatch):
    """Releases of which a trial was asked for; every one passes."""
    asked = []
    monkeypatch.setattr(release_check, "check_release", lambda *words: asked.append(words))
    return asked


def is_version(monkeypatch, version):
    monkeypatch.setattr(deepspeed, "__version__", version)


def edit_a_method(monkeypatch):
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    def step(self, closure=None):
        """Another DeepSpeed's."""

    monkeypatch.setattr(DeepSpeedZeroOptimizer_Stage3, "step", step)


def test_the_installed_release_is_taken_in_silence(said, trials):
    guard.check_deepspeed()
    assert not said
    assert not trials


def test_the_label_of_a_build_says_nothing(monkeypatch, said, trials):
    is_version(monkeypatch, f"{deepspeed.__version__}+0123abc")
    guard.check_deepspeed()
    assert not said
    assert not trials


def test_a_newer_release_with_the_same_methods_is_taken_with_one_line(monkeypatch, said, trials):
    is_version(monkeypatch, "0.99.0")
    monkeypatch.setattr(guard, "changed_methods", lambda version: [])
    guard.check_deepspeed()
    (line,) = said
    assert f"DeepSpeed 0.99.0 has the methods of {guard.NEWEST}, the newest that was" in line
    assert not trials


def test_of_the_ranks_of_a_machine_one_speaks(monkeypatch, said, trials):
    is_version(monkeypatch, "0.99.0")
    monkeypatch.setattr(guard, "changed_methods", lambda version: [])
    monkeypatch.setenv("LOCAL_RANK", "1")
    guard.check_deepspeed()
    assert not said


def test_of_a_newer_release_with_other_methods_a_trial_decides(monkeypatch, said, trials):
    is_version(monkeypatch, "0.99.0")
    edit_a_method(monkeypatch)
    guard.check_deepspeed()
    ((version, problem, way_out),) = trials
    assert version == "0.99.0"
    assert "Stage3.step" in problem
    assert f"newer than {guard.NEWEST}" in problem
    assert "allow_unverified=True" in way_out

    def refuse(*words):
        raise UnsupportedDeepSpeedError("other bits")

    monkeypatch.setattr(release_check, "check_release", refuse)
    with pytest.raises(UnsupportedDeepSpeedError, match="other bits"):
        install()


@pytest.mark.parametrize("how", ["an argument", "the environment"])
@pytest.mark.parametrize("version", ["0.99.0", "0.19.2", "0.17.1", deepspeed.__version__])
def test_what_is_not_verified_is_taken_with_a_warning_where_that_is_allowed(
    monkeypatch, said, trials, version, how
):
    is_version(monkeypatch, version)
    edit_a_method(monkeypatch)
    if how == "the environment":
        monkeypatch.setenv(guard.ALLOW_UNVERIFIED, "1")
    try:
        install(allow_unverified=how == "an argument")
    finally:
        uninstall()
    (line,) = said
    assert f"DeepSpeed {version} " in line
    assert "Stage3.step" in line
    assert "BITS MAY NOT BE STOCK'S" in line
    assert not trials


@pytest.mark.parametrize("version", ["0.17.1", "0.19.0", "0.19.4", "0.18.9.post1"])
def test_an_older_release_that_was_never_checked_is_refused(monkeypatch, trials, version):
    is_version(monkeypatch, version)
    with pytest.raises(UnsupportedDeepSpeedError) as caught:
        install()
    for text in (f"DeepSpeed {version} was never checked", *guard.CHECKED_VERSIONS):
        assert text in str(caught.value)
    assert not trials


def test_an_older_release_is_refused_whatever_its_methods(monkeypatch):
    is_version(monkeypatch, "0.19.4")
    monkeypatch.setattr(guard, "changed_methods", lambda version: [])
    with pytest.raises(UnsupportedDeepSpeedError, match=r"0\.19\.4 was never checked"):
        guard.check_deepspeed()


def test_a_known_release_that_was_edited_is_refused_without_a_trial(monkeypatch, trials):
    edit_a_method(monkeypatch)
    with pytest.raises(
        UnsupportedDeepSpeedError, match=r"what was released as .* in .*Stage3\.step,"
    ):
        guard.check_deepspeed()
    assert not trials


def test_each_known_release_is_compared_with_its_own_methods(monkeypatch):
    """The installed one's code under an older one's number is not what was released."""
    older = next(iter(guard.OLDER))
    is_version(monkeypatch, older)
    with pytest.raises(UnsupportedDeepSpeedError, match=f"what was released as {older}"):
        guard.check_deepspeed()


def test_a_version_that_is_none_is_refused(monkeypatch):
    is_version(monkeypatch, "unknown")
    with pytest.raises(
        UnsupportedDeepSpeedError, match="version is 'unknown', which is no release"
    ):
        guard.check_deepspeed()


def test_a_wrong_switch_in_the_environment_is_named(monkeypatch):
    monkeypatch.setenv(guard.ALLOW_UNVERIFIED, "yes")
    with pytest.raises(ConfigError, match="ALLOW_UNVERIFIED = 'yes': set it to 1, or to 0"):
        guard.check_deepspeed()


def test_what_older_releases_have_otherwise_is_otherwise_and_of_methods_that_are_watched():
    for version in guard.OLDER:
        for path, methods in guard.OLDER[version].items():
            for method, own in methods.items():
                assert guard.FINGERPRINTS[path][method] != own, (version, method)


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


@pytest.mark.parametrize(
    ("version", "is_lost"),
    [("0.15.1", False), ("0.15.2", True), ("0.18.9", True), ("0.18.9+0a", True), ("0.19.0", False)],
)
def test_releases_whose_first_stages_lose_gradients(version, is_lost):
    assert guard.LOST_GRADIENTS.concerns(version) == is_lost
