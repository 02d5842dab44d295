"""The artifact's options, and which of them are refused."""

import argparse

import pytest
import torch

from optimus_cc import Settings, SettingsError, Traffic, add_arguments, from_arguments
from optimus_cc.embedding import Place, group_ranks
from optimus_cc.peers import FourBit, TorchPowerSgd
from optimus_cc.selective import PowerSgd, compressor
from optimus_cc.traffic import Kind

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


def test_other_methods_and_statistics_are_options_too():
    words = "--inter_grad_comp --inter_grad_comp_method fp8 --grad_comp --grad_comp_method 4bit"
    found = parse(words)
    assert (found.inter_grad_comp_method, found.grad_comp_method) == ("fp8", "4bit")
    for name in ("--check_orth_error", "--check-orth-error", "--check_orth_error_acti"):
        assert parse(f"--inter_grad_comp {name}").check_orth_error
    assert not found.check_orth_error


def test_the_defaults_compress_nothing_and_are_the_readmes():
    settings = parse("")
    assert settings == Settings()
    assert not settings.compresses_message(in_epilogue=True)
    assert not settings.compresses_gradients_of(0)
    assert (settings.inter_grad_comp_rank, settings.grad_comp_rank) == (12, 128)
    assert settings.grad_comp_warm_up == 0.1
    assert (settings.inter_grad_comp_method, settings.grad_comp_method) == (
        "low-rank",
        "power-sgd",
    )


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


def test_a_rank_must_be_a_whole_number():
    with pytest.raises(SettingsError, match=r"inter_grad_comp_rank = 1\.5"):
        Settings(inter_grad_comp_rank=1.5)
    with pytest.raises(SettingsError, match="grad_comp_rank = True"):
        Settings(grad_comp_rank=True)


def test_settings_are_checked_against_the_pipeline():
    with pytest.raises(SettingsError, match="selective_grad_comp_way = 3: the pipeline has 2"):
        parse("--grad_comp --selective_grad_comp --selective_grad_comp_way 3").check_stages(2)
    with pytest.raises(SettingsError, match="a pipeline of 1 stage sends no activation"):
        parse("--inter_grad_comp").check_stages(1)
    parse("--grad_comp --selective_grad_comp --selective_grad_comp_way 2").check_stages(2)


def test_selection_takes_the_first_stages():
    selected = parse("--grad_comp --selective_grad_comp --selective_grad_comp_way 2")
    assert [selected.compresses_gradients_of(stage) for stage in range(4)] == [1, 1, 0, 0]
    everywhere = parse("--grad_comp")
    assert all(everywhere.compresses_gradients_of(stage) for stage in range(4))


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
    ("shape", "taken"), [((24, 16), True), ((4, 4), False), ((24,), False), ((2, 24, 16), False)]
)
def test_matrices_alone_are_compressed_and_only_where_that_is_smaller(shape, taken):
    power_sgd = PowerSgd(Settings(grad_comp=True, grad_comp_rank=3), None, Traffic())
    assert power_sgd.takes(torch.zeros(shape)) is taken


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
    with pytest.raises(TypeError, match=r"dtype = torch.float16"):
        found.average([torch.zeros(24, 16, dtype=torch.float16)])


def grid(stages, replicas, shards):
    """Places as megatron-core numbers ranks: shards first, then replicas, then stages."""
    return [
        Place(shard, replica, stage in (0, stages - 1))
        for stage in range(stages)
        for replica in range(replicas)
        for shard in range(shards)
    ]


def test_a_fused_group_is_of_one_shard_over_both_stages_and_all_replicas():
    places = grid(stages=3, replicas=2, shards=2)
    assert group_ranks(places, fused=True) == [[0, 2, 8, 10], [1, 3, 9, 11]]
    assert group_ranks(places, fused=False) == [[0, 8], [2, 10], [1, 9], [3, 11]]


def test_one_stage_has_both_uses_of_the_embedding():
    assert group_ranks(grid(1, 2, 1), fused=True) == [[0, 1]]


@pytest.mark.parametrize(("num_ranks", "expected"), [(1, 0), (2, 400), (4, 600)])
def test_an_all_reduce_is_counted_as_a_ring(num_ranks, expected):
    traffic = Traffic()
    traffic.all_reduce(Kind.GRADIENTS, torch.zeros(100), num_ranks)
    assert traffic.sent[Kind.GRADIENTS].sent_bytes == expected
    traffic.reset()
    assert traffic.sent[Kind.GRADIENTS].sent_bytes == 0
