"""The artifact's options, and which of them are refused."""

import argparse

import pytest
import torch

from optimus_cc import Settings, SettingsError, Traffic, add_arguments, from_arguments
from optimus_cc.gradients import Place, group_ranks
from optimus_cc.selective import FourBit, PowerSgd, TorchPowerSgd, compressor

README = """--inter_grad_comp --inter_grad_comp_rank 12 --inter_grad_comp_epilogue_only
--use_error_feedback --emb_comm_opt --grad_comp --grad_comp_rank 128 --grad_comp_warm_up 0.1
--selective_grad_comp --selective_grad_comp_way 3"""


def parse(words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return from_arguments(parser.parse_args(words.split()))


def test_the_artifacts_options_are_accepted_as_they_are():
    assert parse(README) == Settings(
        inter_grad_comp=True,
        inter_grad_comp_rank=12,
        inter_grad_comp_epilogue_only=True,
        use_error_feedback=True,
        emb_comm_opt=True,
        grad_comp=True,
        grad_comp_rank=128,
        grad_comp_warm_up=0.1,
        selective_grad_comp=True,
        selective_grad_comp_way=3,
    )
    words = "--inter_grad_comp --inter_grad_comp_method fp8 --check_orth_error"
    found = parse(f"{words} --grad_comp --grad_comp_method 4bit")
    assert (found.inter_grad_comp_method, found.grad_comp_method) == ("fp8", "4bit")
    assert found.check_orth_error
    assert parse("--inter_grad_comp --check_orth_error_acti").check_orth_error


def test_the_defaults_compress_nothing_and_are_the_readmes():
    settings = parse("")
    assert settings == Settings()
    assert not settings.compresses_message(in_epilogue=True)
    assert not settings.compresses_gradients_of(0)
    assert (settings.inter_grad_comp_rank, settings.grad_comp_rank) == (12, 128)
    assert settings.grad_comp_warm_up == 0.1
    assert settings.inter_grad_comp_method == "low-rank"
    assert settings.grad_comp_method == "power-sgd"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--inter_grad_comp --inter_grad_comp_rank 0", "inter_grad_comp_rank = 0: must be"),
        ("--grad_comp --grad_comp_rank -1", "grad_comp_rank = -1: must be"),
        ("--grad_comp --grad_comp_warm_up 1.0", "grad_comp_warm_up = 1.0: must be a share"),
        ("--grad_comp --grad_comp_warm_up nan", "grad_comp_warm_up = nan: must be a share"),
        ("--inter_grad_comp_epilogue_only", "no effect without --inter_grad_comp; add it"),
        ("--selective_grad_comp", "no effect without --grad_comp; add it"),
        ("--use_error_feedback", "no effect without --inter_grad_comp or --grad_comp"),
        ("--grad_comp --selective_grad_comp_way 0", "selective_grad_comp_way = 0: must be"),
        (
            "--inter_grad_comp --inter_grad_comp_method fp4",
            "inter_grad_comp_method = 'fp4': must be one of low-rank, hadamard-4bit, fp8",
        ),
        (
            "--grad_comp --grad_comp_method signs",
            "grad_comp_method = 'signs': must be one of power-sgd, torch-power-sgd, 4bit",
        ),
        ("--inter_grad_comp_method fp8", "= 'fp8': has no effect without --inter_grad_comp; add"),
        ("--grad_comp_method 4bit", "= '4bit': has no effect without --grad_comp; add it"),
        ("--grad_comp --check_orth_error", "= True: has no effect without --inter_grad_comp; add"),
    ],
)
def test_what_is_wrong_is_named(words, message):
    with pytest.raises(SettingsError, match=message):
        parse(words)


@pytest.mark.parametrize("wrong", [{"inter_grad_comp_rank": 1.5}, {"grad_comp_rank": True}])
def test_a_rank_must_be_a_whole_number(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(SettingsError, match=f"{name} = {value}: must be a whole number"):
        Settings(**wrong)


def test_settings_are_checked_against_the_pipeline():
    with pytest.raises(SettingsError, match="selective_grad_comp_way = 3: the pipeline has 2"):
        parse("--grad_comp --selective_grad_comp --selective_grad_comp_way 3").check_stages(2)
    with pytest.raises(SettingsError, match="a pipeline of 1 stage sends no activation"):
        parse("--inter_grad_comp").check_stages(1)
    parse("--grad_comp --selective_grad_comp --selective_grad_comp_way 2").check_stages(2)


@pytest.mark.parametrize(
    ("words", "stages"),
    [("", [1, 1, 1]), ("--selective_grad_comp --selective_grad_comp_way 2", [1, 1, 0])],
)
def test_selection_takes_the_first_stages(words, stages):
    settings = parse(f"--grad_comp {words}")
    assert [settings.compresses_gradients_of(stage) for stage in range(3)] == stages


@pytest.mark.parametrize(
    ("share", "iterations", "expected"),
    [(0.1, 300, 30), (0.0, 300, 0), (0.29, 100, 29), (0.1, 9, 0)],
)
def test_the_warm_up_is_a_share_of_all_iterations(share, iterations, expected):
    assert Settings(grad_comp_warm_up=share).warm_up_iterations(iterations) == expected


def test_a_training_without_iterations_is_refused():
    with pytest.raises(SettingsError, match="num_iterations = 0"):
        Settings().warm_up_iterations(0)


@pytest.mark.parametrize(
    ("method", "made", "small_is_taken"),
    [("power-sgd", PowerSgd, False), ("torch-power-sgd", TorchPowerSgd, False),
     ("4bit", FourBit, True)],
)  # fmt: skip
def test_a_method_is_the_compressor_of_its_name(method, made, small_is_taken):
    """Small matrices are worth four bits, and not a pair of rank three; vectors never are."""
    settings = Settings(grad_comp=True, grad_comp_rank=3, grad_comp_method=method)
    found = compressor(settings, None, Traffic())
    assert isinstance(found, made)
    assert found.takes(torch.zeros(24, 16))
    assert found.takes(torch.zeros(4, 4)) is small_is_taken
    assert not found.takes(torch.zeros(24))
    assert not found.takes(torch.zeros(2, 24, 16))
    with pytest.raises(TypeError, match=r"dtype = torch.float16"):
        found.average([torch.zeros(24, 16, dtype=torch.float16)])


@pytest.mark.parametrize(
    ("stages", "fused", "groups"),
    [
        (3, True, [[0, 2, 8, 10], [1, 3, 9, 11]]),
        (3, False, [[0, 8], [2, 10], [1, 9], [3, 11]]),
        (1, True, [[0, 2], [1, 3]]),
    ],
)
def test_a_fused_group_is_of_one_shard_over_both_stages_and_all_replicas(stages, fused, groups):
    """Two replicas of two shards, as megatron-core numbers ranks: shards first, stages last."""
    places = [
        Place(shard, replica, stage in (0, stages - 1))
        for stage in range(stages)
        for replica in range(2)
        for shard in range(2)
    ]
    assert group_ranks(places, fused) == groups
