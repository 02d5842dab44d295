"""Keys of DeepSpeed's JSON that nobody reads: a study that has one never starts."""

import json

import pytest

from configs.errors import ConfigError
from configs.study import load_study, study_names
from launch import cli, sweep
from launch.backends import OWN_TRAINER
from launch.backends.own import read_user_json
from launch.ds_keys import check_study

STUDY = """
extends = "interleaved"
title = "mine"
[engines.mine]
title = "mine"
fields = {{ stride = {{ default = 2 }} }}
ds_config = {}
"""


@pytest.fixture
def make(tmp_path):
    """``make(ds_config, more)`` -> folder of a study with an engine that has it."""

    def write(ds_config, more=""):
        folder = tmp_path / "own"
        folder.mkdir(exist_ok=True)
        (folder / "study.toml").write_text(STUDY.format(ds_config) + more)
        return folder

    return write


WRONG = {
    "a typo": ("{ gradient_cliping = 0.5 }", "gradient_cliping = 0.5: .*'gradient_clipping'"),
    "in ZeRO's block": (
        "{ zero_optimization = { overlap_com = true } }",
        r"zero_optimization\.overlap_com = True: .*'zero_optimization\.overlap_comm'",
    ),
    "in a block of it": (
        "{ zero_optimization = { offload_optimizer = { pin_memry = true } } }",
        r"offload_optimizer\.pin_memry = True: .*'zero_optimization\.offload_optimizer\.pin_memo",
    ),
    "nothing is near": ("{ quux = 1 }", "quux = 1: no release .* lost: leave it out"),
    "in the plugin's": (
        '{ deep_optimizer_states = { enabled = true, polcy = "dynamic" } }',
        r'"deep_optimizer_states\.polcy": did you mean "policy"',
    ),
    "in the plugin's, beside a field of the point": (
        '{ deep_optimizer_states = { policy = "stride", strid = "{stride}" } }',
        r'"deep_optimizer_states\.strid": did you mean "stride"',
    ),
    "a value of the plugin's": (
        '{ deep_optimizer_states = { policy = "dynamo" } }',
        r"\"deep_optimizer_states\.policy\" = 'dynamo'",
    ),
    "a key of an earlier release of the plugin": (
        '{ deep_optimizer_states = { machine = "h100" } }',
        r"\"deep_optimizer_states\.machine\" = 'h100': leave it out",
    ),
    "in the compression's": (
        "{ optimus_cc = { grad_comp_rnk = 4 } }",
        r"optimus_cc\.grad_comp_rnk = 4: .*'optimus_cc\.grad_comp_rank'",
    ),
}


@pytest.mark.parametrize(("ds_config", "words"), WRONG.values(), ids=WRONG)
def test_a_study_with_a_key_that_nobody_reads_is_refused(make, ds_config, words):
    """The setting was lost, and the engine that it was to make passed as equal to stock."""
    with pytest.raises(ConfigError, match=f"study 'own', engine 'mine': .*{words}") as refused:
        sweep.main(["--study", str(make(ds_config)), "--dry-run"])
    assert "\n" not in str(refused.value)


def test_what_all_engines_have_is_checked_too(make):
    folder = make("{}", "[ds_config]\nsteps_per_prin = 1\n")
    with pytest.raises(ConfigError, match="study 'own': ds_config: steps_per_prin = 1"):
        cli.study_in(["--study", str(folder)])


@pytest.mark.parametrize(
    "ds_config",
    [
        "{ gradient_clipping = 0.5, _comment = 'mine' }",
        "{ zero_optimization = { allgather_size = 1, stage3_max_live_parameters = 9 } }",
        "{ zero_optimization = { offload_optimizer = { prefetch_optimizer = 1 } } }",
        "{ compression_training = { a = 1 }, optimizer = { params = { fused = true } } }",
        '{ deep_optimizer_states = { policy = "stride", stride = "{stride}" } }',
    ],
)
def test_what_some_release_or_the_plugin_reads_is_let_through(make, ds_config):
    check_study(load_study(make(ds_config)))


def test_shipped_studies_have_no_such_key():
    for name in study_names():
        check_study(load_study(name))


def test_a_value_that_a_field_gives_is_a_reason_not_to_start(make):
    """Of a block with fields of the point, the values are known once there is a point."""
    study = load_study(
        make('{ deep_optimizer_states = { policy = "strid", stride = "{stride}" } }')
    )
    check_study(study)
    [reason] = OWN_TRAINER.refuse(study.make_point({"model": "tiny", "engine": "mine"}))
    assert reason.startswith("engine 'mine': \"deep_optimizer_states.policy\" = 'strid'")


def test_a_file_of_the_users_own_is_checked_as_a_study_is(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"overlap_com": "auto"}}))
    with pytest.raises(ConfigError, match=r"ds\.json: zero_optimization\.overlap_com = 'auto': no"):
        read_user_json(path)
