import re

import pytest
from hypothesis import given, strategies as st

from configs.errors import ConfigError
from configs.files import read_toml
from configs.schema import Model, batch_problem
from configs.study import default_study, make_point
from parse.log_name import settings_from_name

STUDY = default_study()
PUBLISHED = {
    "7B": 5_948_837_888,
    "8.3B": 9.14e9,
    "10B": 9.92e9,
    "13B": 11.32e9,
    "20B": 15.33e9,
    "30B": 27.87e9,
}


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_parameter_counts_are_the_published_ones(name, published):
    parameters = STUDY.load_model(name)[0].num_parameters()
    assert parameters == published or round(parameters / 1e9, 2) == published / 1e9


def test_the_papers_ten_models_and_tiny_are_there():
    papers = ["1.3B", "3B", "7B", "8.3B", "10B", "13B", "20B", "30B", "40B", "70B"]
    assert STUDY.model_names() == ["tiny", *papers]
    assert all(make_point({"model": name}).accumulation >= 1 for name in STUDY.model_names())


@pytest.mark.parametrize("path", sorted(STUDY.files("points").values()), ids=str)
def test_every_shipped_point_is_valid(path):
    assert make_point(read_toml(path)).num_ranks >= 1


def test_a_log_name_tells_stages_and_links_apart():
    fields = {"model": "tiny", "dp": 4, "global_batch_size": 8}
    plain, staged = (
        make_point({**fields, **more}).log_name
        for more in ({}, {"pp": 2, "tp": 2, "link_mbit": 20})
    )
    assert "-tp1-dp4-l" in plain
    assert "-link" not in plain
    assert "-tp2-pp2-dp4-l" in staged
    assert "-mbs2-link20-" in staged
    found = settings_from_name(staged)
    assert (found["pp"], found["tp"], found["dp"], found["link_mbit"]) == (2, 2, 4, 20)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "field 'model' is missing"),
        ({"model": "7"}, "unknown model '7': did you mean '7B'"),
        ({"model": 7}, "unknown model '7': did you mean '7B'"),
        ({"model": "tiny", "strid": 2}, "unknown field 'strid': did you mean 'stride'"),
        ({"model": "tiny", "iterations": 0}, "'iterations' = 0: .*greater than 0"),
        ({"model": "tiny", "lr": float("inf")}, "'lr' = inf"),
        ({"model": "tiny", "offload_ratio": 1.1}, "'offload_ratio' = 1.1"),
        ({"model": "tiny", "engine": "fast"}, "unknown engine 'fast': .*stride"),
        ({"model": "tiny", "engine": "stride"}, "stride must be at least 1"),
        ({"model": "tiny", "stride": 2}, "stride 2 has no meaning for engine 'stock'"),
        ({"model": "tiny", "dp": 3}, "global_batch_size 4 is not a multiple .* dp 3"),
        ({"model": "tiny", "tp": 3}, "heads 8 cannot be split over tp 3"),
        ({"model": "tiny", "min_lr": 1.0}, "min_lr 1.0 is above lr"),
        ({"model": "tiny", "split": "all"}, "'split' = 'all'"),
        ({"model": "tiny", "accumulation": "x"}, "'accumulation' = 'x': .* integer"),
        ({"model": "tiny", "accumulation": 0}, "'accumulation' = 0: .*greater than 0"),
        ({"model": {"name": "a", "hidden": 8}}, "field 'model.ffn' is missing"),
        ({"model": {"name": "a/b", "hidden": 8}}, "'model.name' = 'a/b'"),
        ({"model": {"nam": "a"}}, r"unknown field 'model\.nam': did you mean 'name'\?$"),
        ({"model": "tiny", "dtype": "fp8"}, "'dtype' = 'fp8': .*'bf16', 'fp16' or 'fp32'"),
        ({"model": "tiny", "zero_stage": 4}, "'zero_stage' = 4"),
        ({"model": "tiny", "eval_interval": -1}, "'eval_interval' = -1"),
    ],
)
def test_a_wrong_point_says_what_is_wrong_in_one_line(table, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_point(table, source="here")
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path):
    path = tmp_path / "bad.toml"
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_toml(path)
    for content in (b"a = ", b"\xff"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="not valid TOML"):
            read_toml(path)


def test_a_byte_order_mark_is_read_over(tmp_path):
    path = tmp_path / "s.toml"
    path.write_bytes(b"\xef\xbb\xbfa = 1\n")
    assert read_toml(path) == {"a": 1}


def test_tensor_parallel_ranks_pad_the_vocabulary_further():
    model = STUDY.load_model("7B")[0]
    assert [model.padded_vocab_size(tp) for tp in (1, 2, 8)] == [50304, 50432, 51200]


def test_gpt2s_parameters_are_the_published_ones():
    fields = {"name": "g", "hidden": 768, "ffn": 3072, "layers": 12, "heads": 12, "kv_heads": 12}
    model = Model(**fields, seq_length=1024, architecture="gpt2")
    padding = (model.padded_vocab_size() - model.vocab_size) * model.hidden
    assert model.num_parameters() - padding == 124_439_808


@pytest.mark.parametrize(
    ("layers", "pp", "expected"),
    [
        (24, 4, (6, 6, 6, 6)),
        (7, 4, (2, 2, 2, 1)),
        (6, 4, (1, 2, 2, 1)),
        (52, 8, (6, 7, 7, 7, 7, 6, 6, 6)),
        (3, 1, (3,)),
    ],
)
def test_layers_of_stages_are_all_layers_and_the_last_stage_has_no_more(layers, pp, expected):
    sizes = dict.fromkeys(("hidden", "ffn", "heads", "kv_heads", "seq_length", "vocab_size"), 8)
    model = Model(name="m", layers=layers, **sizes)
    assert model.layers_of_stages(pp) == expected
    assert sum(expected) == layers


@given(*[st.integers(1, 64)] * 3)
def test_every_batch_that_is_offered_fits(batch, micro, dp):
    problem = batch_problem(8 * batch, micro, dp)
    assert bool(problem) == bool(8 * batch % (micro * dp))
    offered = re.findall(r"(\d+) \(accumulation (\d+)\)", problem)
    assert bool(offered) == bool(problem)
    assert all(int(total) == micro * dp * int(steps) > 0 for total, steps in offered)
