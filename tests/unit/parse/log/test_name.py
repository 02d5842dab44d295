import pytest

from parse.log import settings_from_name

NAME = (
    "log-8.3B-tp2-dp4-l72-h3072-a32-sl2048-gbs8-mbs1-ratio{ratio}-subg100000000"
    "-prefetch{prefetch}{rest}.log"
)


def test_every_setting_of_a_name():
    name = NAME.format(ratio="0.8", prefetch=1, rest="-flush_async1-opt_gaps5")
    assert settings_from_name(name) == {
        "model": "8.3B", "tp": 2, "dp": 4, "num_layers": 72, "hidden": 3072, "heads": 32,
        "seq_length": 2048, "global_batch_size": 8, "micro_batch_size": 1, "offload_ratio": 0.8,
        "subgroup_numel": 100_000_000, "prefetch": 1, "flush_async": 1, "opt_gaps": 5,
        "engine": "hybrid", "stride": 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("prefetch", "rest", "engine", "stride"),
    [
        (0, "-flush_async0-opt_gaps0", "vanilla", 0),
        (0, "-flush_async0-opt_gaps5", "vanilla", 0),
        (0, "-flush_async1-opt_gaps5", "async-gradients", 0),
        (0, "", "vanilla", 0),
        (1, "", "hybrid", None),
    ],
)
def test_engine_and_stride_follow_from_the_knobs(prefetch, rest, engine, stride):
    settings = settings_from_name(NAME.format(ratio=1, prefetch=prefetch, rest=rest))
    assert settings["engine"] == engine
    assert settings.get("stride") == stride


def test_a_name_of_another_form_says_nothing():
    assert settings_from_name("train.log") == {}
    assert settings_from_name("log-7B-tp1.log") == {"model": "7B"}


@pytest.mark.parametrize("engine", ["dynamic", "super-offload", "auto_2", "zen-tp9-x"])
def test_an_engine_at_the_end_counts_and_unknown_parts_do_not(engine):
    name = NAME.format(ratio="0.5", prefetch=1, rest="").replace("-prefetch1", "-hog0.5-zz7")
    settings = settings_from_name(name.replace(".log", f"-engine_{engine}.log"))
    assert settings == {
        "model": "8.3B", "tp": 2, "dp": 4, "num_layers": 72, "hidden": 3072, "heads": 32,
        "seq_length": 2048, "global_batch_size": 8, "micro_batch_size": 1, "offload_ratio": 0.5,
        "subgroup_numel": 100_000_000, "engine": engine,
    }  # fmt: skip


def test_unknown_parts_change_nothing():
    name = NAME.format(ratio="1", prefetch=0, rest="-flush_async0-opt_gaps0")
    more = name.replace("-subg", "-dtypebf16-x-y1.5-subg").replace(".log", "-new9.log")
    assert settings_from_name(more) == settings_from_name(name)
