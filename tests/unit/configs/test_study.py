import json

import pytest

from configs.errors import ConfigError
from configs.naming import Namer, flat
from configs.study import default_study, load_study, study_from, study_names
from configs.sweep import load_sweep, make_sweep, sweep_names

STUDY = """
title = "buckets"
reference = "plain"
small_model = "small"
default_sweep = "buckets"

[gate]
kind = "close"
quantity = "loss"
tolerance = 1e-3

[fields.bucket_numel]
default = 600_000
minimum = 1
title = "bucket"
is_count = true
in_pairs = "free"

[fields.depth]
title = "depth"
only_some_engines = true

[fields.way]
type = "str"
choices = ["slow", "quick"]
default = "slow"
title = "way"

[ds_config.zero_optimization]
reduce_bucket_size = "{bucket_numel}"

[engines.plain]
title = "plain"

[engines.overlapped]
title = "overlapped"
aliases = ["ov"]
fields = { depth = { default = 2, minimum = 1, below = 9 } }
ds_config = { zero_optimization = { overlap_comm = "{depth}" } }

[figures.bucket]
kind = "swept"
title = "time against the bucket"
x = "bucket_numel"
y = ["iteration_ms"]
"""
COMPANION = """[companions.beside]
field = "depth"
name = "it"
module = "it"
arguments = ["--depth={dept}", "--device={device}"]
[figures.bucket]"""
MODEL = """
name = "small"
hidden = 8
ffn = 16
layers = 1
heads = 2
kv_heads = 2
vocab_size = 64
"""


@pytest.fixture
def make(tmp_path):
    def make(text=STUDY, name="own"):
        folder = tmp_path / name
        (folder / "models").mkdir(parents=True)
        (folder / "models" / "small.toml").write_text(MODEL)
        (folder / "study.toml").write_text(text)
        return folder

    return make


def test_a_study_says_what_a_point_may_have(make):
    study = load_study(make())
    point = study.make_point({"model": "small", "engine": "OV", "bucket_numel": "1_000"})
    found = (point.engine, point.value("bucket_numel"), point.value("depth"))
    assert found == ("overlapped", 1000, 2)
    with pytest.raises(ConfigError, match="unknown field 'stride'"):
        study.make_point({"model": "small", "stride": 2})
    with pytest.raises(ConfigError, match="depth must be below 9 for engine 'overlapped'"):
        study.make_point({"model": "small", "engine": "overlapped", "depth": 9})
    with pytest.raises(ConfigError, match=r"way.*fast.*slow.*quick"):
        study.make_point({"model": "small", "way": "fast"})
    with pytest.raises(ConfigError, match="depth 3 has no meaning for engine 'plain'"):
        study.make_point({"model": "small", "depth": 3})


def test_a_point_of_a_study_has_a_log_name_with_its_fields(make):
    study = load_study(make(STUDY.replace('title = "depth"', 'title = "depth"\nlog = "depth"')))
    point = study.make_point({"model": "small", "engine": "overlapped", "depth": 4})
    assert point.log_name.endswith("-engine_overlapped-depth4.log")


def test_a_study_survives_its_travel(make):
    for study in (load_study(make()), *map(load_study, study_names())):
        back = study_from(json.loads(study.as_json()), "run.json")
        assert back == study
        table = {"model": json.loads(MODEL_JSON), "engine": next(iter(study.engines))}
        point = study.make_point(table)
        assert back.point_type(**point.model_dump()) == point


MODEL_JSON = '{"name": "m", "hidden": 8, "ffn": 16, "layers": 1, "heads": 2, "kv_heads": 2}'


@pytest.mark.parametrize(
    ("load", "guess"),
    [
        (lambda: load_study("nosuch"), ""),
        (lambda: load_study("zero-lader"), "did you mean 'zero-ladder'? "),
        (lambda: load_sweep("nosuch"), ""),
        (lambda: default_study().make_point({"model": "tiny", "engine": "nosuch"}), ""),
        (lambda: default_study().load_model("7"), "did you mean '7B'? "),
    ],
)
def test_a_guess_is_made_only_where_a_name_is_near(load, guess):
    with pytest.raises(ConfigError) as caught:
        load()
    assert f": {guess}known: " in str(caught.value)
    assert ("did you mean" in str(caught.value)) == bool(guess)


def test_a_result_is_a_title_or_a_row_and_sweeps_name_them(make):
    size = '{ title = "size", unit = "GiB", better = "lower" }'
    rows = f'[results]\nloss = "how well"\nsize_gib = {size}\n'
    study = load_study(make(STUDY.replace("[fields.bucket_numel]", rows + "[fields.bucket_numel]")))
    assert (study.results["loss"].title, study.results["loss"].better) == ("how well", "")
    assert study.results["size_gib"].unit == "GiB"
    with pytest.raises(ConfigError, match="better"):
        load_study(
            make(
                STUDY.replace(
                    "[fields.b", f"{rows}x = {{ title = 'x', better = 'up' }}\n[fields.b"
                ),
                "other",
            )
        )
    table = {"name": "s", "engines": [{"engine": "plain"}], "results": ["size"]}
    with pytest.raises(ConfigError, match="unknown result 'size': did you mean 'size_gib'"):
        make_sweep(table, study)
    assert make_sweep({**table, "results": ["loss"]}, study).results == ("loss",)


@pytest.mark.parametrize("name", study_names())
def test_every_shipped_study_says_what_it_argues_with(name):
    study = load_study(name)
    argued = [row for row in study.results.values() if row.better]
    assert argued
    assert all(row.title for row in argued)


def test_what_is_no_study_is_refused_with_its_source():
    with pytest.raises(ConfigError, match=r"run\.json: .*not a study"):
        study_from({"name": "x"}, "run.json")


def test_a_study_takes_over_what_it_extends(make):
    make(name="base")
    text = 'extends = "base"\ntitle = "more"\n[engines.overlapped]\ntitle = "as before"\n'
    study = load_study(make(text, name="more"))
    assert list(study.engines) == ["plain", "overlapped"]
    changed = study.engines["overlapped"]
    assert (changed.title, changed.aliases) == ("as before", ("ov",))
    assert (study.reference, study.name, study.gate.tolerance) == ("plain", "more", 1e-3)
    assert study.model_names() == ["small"]
    shipped = load_study(make('extends = "interleaved"\ntitle = "t"\n', name="mine"))
    assert list(shipped.engines) == list(default_study().engines)
    assert sweep_names(shipped) == sweep_names()
    assert load_sweep("basic", shipped).study is shipped
    assert not shipped.is_default


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('reference = "plain"', 'reference = "plane"'), "'plane': did you mean 'plain'"),
        (("tolerance = 1e-3\n", ""), "gate.*tolerance goes with kind 'close'"),
        (('kind = "close"', 'kind = "exact"'), "'gate.kind' = 'exact'"),
        (("default = 600_000", "default = 0.5"), r"fields\.bucket_numel'?: default 0\.5 is no int"),
        (('default = "slow"', 'default = "slo"'), "default 'slo' is none of slow, quick"),
        (("[fields.bucket_numel]", "[fields.iterations]"), "'iterations' is one of every point"),
        (("{bucket_numel}", "{bucket}"), "ds_config: unknown field 'bucket': .*'bucket_numel'"),
        (("{depth}", "{dpeth}"), "engine 'overlapped': unknown field 'dpeth': .*'depth'"),
        (('x = "bucket_numel"', 'x = "buckets"'), "figure 'bucket': unknown field 'buckets'"),
        (('aliases = ["ov"]', 'aliases = ["Plain"]'), "'plain' and 'overlapped' share a name"),
        (('aliases = ["ov"]', 'needs = ["deepspeed>>1"]'), "'deepspeed>>1': .*give gpu, two-ranks"),
        (
            ('aliases = ["ov"]', 'equals = "plan"'),
            "equals: unknown engine 'plan': did you mean 'pl",
        ),
        (("[figures.bucket]", COMPANION), "companion 'beside': unknown field 'dept': .*'depth'"),
        (("fields = { depth", "fields = { dept"), "unknown field of the study 'dept'"),
        (('aliases = ["ov"]', 'alias = ["ov"]'), r"unknown field 'engines\.overlapped\.alias'$"),
        (('small_model = "small"', 'smal_model = "small"'), "'smal_model': did you mean 'small_mo"),
        (("[gate]", "gate"), "not valid TOML"),
    ],
)
def test_a_wrong_study_names_file_field_value_and_remedy(make, change, message):
    assert change[0] in STUDY
    folder = make(STUDY.replace(*change))
    with pytest.raises(ConfigError, match=message) as refused:
        load_study(folder)
    assert "study.toml" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_study_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown study .interleavd.: did you mean .inter"):
        load_study("interleavd")
    with pytest.raises(ConfigError, match=r"or give a folder with a study\.toml"):
        load_study(tmp_path)


BASIC = load_sweep("basic")


def engines(words, sweep=BASIC):
    chosen, added = sweep.with_engines(words)
    points = chosen.points("tiny")
    return [" ".join(point.name.split()[1:]) for point in points], added


def test_the_default_sweep_has_the_plugin_as_it_is_by_default_where_that_is_more_than_all_host():
    """Without a GPU, in the small form, policy auto is all-host."""
    paper = ["stock", "all-host", "stride"]
    named = [[str(p.engine) for p in s.points("tiny")] for s in (BASIC, BASIC.small())]
    assert named == [["stock", "auto", "all-host", "stride"], paper]


STRIDES = load_sweep("stride")


@pytest.mark.parametrize(
    ("words", "sweep", "names", "added"),
    [
        ("stock,dynamic,AUTO", BASIC, ["stock", "dynamic", "auto just-in-time"], ""),
        ("dynamic,v", BASIC, ["dynamic", "stock"], ""),
        ("dynamic", BASIC, ["stock", "dynamic"], "stock"),
        ("stock,stride", BASIC, ["stock", "stride 2"], ""),
        ("v,h", STRIDES, ["stock", *(f"stride {n}" for n in (2, 3, 4, 5, 6, 8, 10))], ""),
    ],
)
def test_engines_that_are_asked_for_replace_those_of_a_sweep(words, sweep, names, added):
    """One that the sweep lists keeps its fields; the reference is added, and that is said."""
    assert engines(words, sweep) == (names, added)
    with pytest.raises(ConfigError, match="unknown engine 'dynamc': did you mean 'dynamic'"):
        engines(f"{words},dynamc", sweep)


def test_an_engine_may_limit_a_field_that_all_have():
    point = default_study().make_point({"model": "tiny", "engine": "resident"})
    assert point.value("offload_ratio") == 0.5
    assert Namer(default_study()).engine(flat(point)) == "ratio"
    with pytest.raises(ConfigError, match="offload_ratio must be below 1 for engine 'ratio'"):
        default_study().make_point({"model": "tiny", "engine": "ratio", "offload_ratio": 1})
