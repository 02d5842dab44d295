import shlex

import pytest

from configs.errors import ConfigError
from launch.config_n_run import FLAGS, build_parser, point_from_flags

SEVEN = shlex.split("-m 7 -H 4096 -F 11008 -N 32 -L 32 -U 2048 -S 4 -K 10")


def point(*words):
    return point_from_flags(vars(build_parser().read([*SEVEN, *words])))


def test_the_papers_sample_command_gives_the_papers_log_name():
    words = shlex.split("-T 1 -M 1 -B 1 -R 1 -G 10000000 -P 1 -D 1 -A 1 -O 2")
    assert point(*words).log_name == (
        "log-7B-tp1-dp1-l32-h4096-a32-sl2048-gbs1-mbs1-ratio1-subg10000000"
        "-prefetch1-flush_async1-opt_gaps2.log"
    )
    assert point(*words).model.num_parameters() == 5_948_837_888


def test_every_flag_lands_in_its_field():
    words = shlex.split(
        "-T 2 -M 4 -B 48 -R 0.8 -G 5000 -P 1 -D 3 -A 1 -O 5 -h 0.2 --seed 7 --device cpu"
    )
    got = point(*words)
    assert (got.tp, got.micro_batch_size, got.global_batch_size, got.dp) == (2, 4, 48, 3)
    assert (got.offload_ratio, got.subgroup_numel, got.iterations) == (0.8, 5000, 10)
    assert (got.engine, got.stride, got.seed, got.device) == ("stride", 5, 7, "cpu")
    assert got.value("hog_share") == 0.2
    model = got.model
    assert (model.name, model.hidden, model.ffn, model.layers) == ("7B", 4096, 11008, 32)
    assert (model.heads, model.seq_length, model.kv_heads) == (32, 2048, 4)
    assert (model.vocab_size, model.padded_vocab_size()) == (50257, 50304)


def test_flags_left_out_take_the_papers_defaults():
    got = point()
    assert (got.engine, got.stride, got.subgroup_numel) == ("stock", 0, 1_000_000_000)
    assert (got.tp, got.dp, got.micro_batch_size, got.global_batch_size) == (1, 1, 1, 1)


def test_the_gap_is_ignored_without_prefetch():
    assert point("-A", "1", "-O", "5").engine == "all-host"
    assert point("-P", "0", "-O", "5").engine == "stock"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-H", "x"], r"hidden' = 'x'"),
        (["-K", "0"], r"iterations' = '0'"),
        (["-R", "1.5"], r"offload_ratio' = '1.5'"),
        (["-S", "5"], r"heads 32 is not a multiple of kv_heads 5"),
        (["-D", "2"], r"global_batch_size 1 is not a multiple .* dp 2"),
        (["-P", "2"], r"-P 2 .*is no engine"),
        # The hybrid update always flushes gradients asynchronously, and its log's name says so.
        (["-P", "1", "-A", "0"], r"-P 1 -A 0 .*is no engine; .*; stride: -P 1 -A 1"),
        (["-A", "yes"], r"-A yes .*is no engine"),
        (["-P", "1", "-O", "0"], r"stride must be at least 1"),
        (["-m", "../x"], r"-m '../x': give billions"),
        (["-Z", "1"], r"unknown option '-Z'"),
        (["-O"], r"-O: expected one argument"),
    ],
)
def test_a_bad_value_is_named(words, message):
    with pytest.raises(ConfigError, match=message) as caught:
        point(*words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("letter", [flag.letter for flag in FLAGS if flag.default is None])
def test_a_missing_flag_is_named(letter):
    at = SEVEN.index(f"-{letter}")
    with pytest.raises(ConfigError, match=f"^-{letter} is missing"):
        point_from_flags(vars(build_parser().read(SEVEN[:at] + SEVEN[at + 2 :])))
