import contextlib
import json
import shlex

from hypothesis import given, settings, strategies as st

from configs.errors import ConfigError
from configs.study import default_study, make_point
from launch.config_n_run import build_parser, point_from_flags
from launch.ds_json import deepspeed_config

STUDY = default_study()
MIN_TILE_FRACTION = STUDY.load_model("tiny")[0]


@st.composite
def points(draw):
    engine = draw(st.sampled_from(list(STUDY.engines)))
    largest = STUDY.engines[engine].fields.get("offload_ratio")
    micro, dp, accumulation = (draw(st.integers(1, 8)) for _ in range(3))
    lr = draw(st.floats(1e-8, 10.0))
    return STUDY.point_type(
        model=MIN_TILE_FRACTION,
        engine=engine,
        stride=draw(st.integers(1, 50)) if engine == "stride" else 0,
        offload_ratio=draw(st.floats(0, 1, exclude_max=largest is not None)),
        subgroup_numel=draw(st.integers(1, 10**12)),
        tp=draw(st.sampled_from([1, 2, 4])),
        dp=dp,
        micro_batch_size=micro,
        global_batch_size=micro * dp * accumulation,
        iterations=draw(st.integers(1, 10**6)),
        lr=lr,
        min_lr=lr * draw(st.floats(0, 1)),
        clip_grad=draw(st.floats(0, 1e6)),
    )


@given(points())
def test_a_point_survives_json(point):
    assert make_point(json.loads(json.dumps(point.model_dump(mode="json")))) == point


@given(points())
def test_a_point_survives_the_command_line(point):
    fields = {k: str(v) for k, v in point.model_dump(exclude={"model"}).items()}
    assert make_point(STUDY.overlaid({"model": "tiny"}, fields)) == point


PAPERS = shlex.split("-m 7 -H 64 -F 128 -N 2 -L 2 -U 32 -S 2 -K 1")


def from_flags(*knobs):
    words = [word for pair in zip("PAO", knobs, strict=True) for word in (f"-{pair[0]}", pair[1])]
    return point_from_flags(vars(build_parser().read([*PAPERS, *map(str, words)])))


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 9))
def test_knobs_are_an_engine_or_a_config_error(prefetch, flush_async, gaps):
    # The hybrid update has asynchronous gradients, so that the pair of 1 and 0 names no engine.
    engines = {(0, 0): "stock", (0, 1): "all-host", (1, 1): "stride"}
    allowed = (prefetch, flush_async) in engines and (gaps >= 1 or not prefetch)
    try:
        point = from_flags(prefetch, flush_async, gaps)
    except ConfigError:
        assert not allowed
    else:
        assert allowed
        assert point.engine == engines[prefetch, flush_async]
        assert point.stride == (gaps if prefetch else 0)


@given(points())
def test_deepspeeds_json_adds_up(point):
    config = deepspeed_config(point)
    samples = config["train_micro_batch_size_per_gpu"] * point.dp * point.accumulation
    assert config["train_batch_size"] == samples
    assert json.loads(json.dumps(config, allow_nan=False)) == config
    assert ("deep_optimizer_states" in config) == (point.engine != "stock")


@settings(max_examples=40)
@given(st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.text()))
def test_any_table_is_a_point_or_a_config_error(table):
    for fields in (table, {"model": "tiny", **table}):
        with contextlib.suppress(ConfigError):
            make_point(fields)
