import pytest

from parse.log import read_log

RANKS = [
    " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 700",
    " > number of parameters on (tensor, pipeline) model parallel rank (1, 0): 701",
]
WORLD = (
    "using world size: 4, data-parallel-size: 2, sequence-parallel size: 1, tensor-model-parallel"
    " size: 2, pipeline-model-parallel size: 1 "
)


@pytest.mark.parametrize(
    ("head", "parameters"),
    [
        ([WORLD, *RANKS], 1401),
        (RANKS, 1401),
        ([WORLD, RANKS[0]], None),
        ([WORLD, RANKS[0], RANKS[1].replace("701", "7x1")], None),
        ([*RANKS, RANKS[0].replace("700", "800")], None),
        ([RANKS[0], RANKS[1].replace("(1,", "(8,")], None),
        (["using world size: 1, data-parallel-size: 1", RANKS[0]], 700),
    ],
)
def test_parameters_are_of_the_whole_model_or_missing(write_log, head, parameters):
    log = read_log(write_log(head=head))
    assert log.parameters == parameters
    assert any("parameters" in note for note in log.notes) is (parameters is None)


def test_a_log_that_ends_in_its_setup_may_lack_a_rank(write_log):
    cut = [read_log(write_log(text="".join(f"{line}\n" for line in head)))
           for head in ([RANKS[0]], [WORLD, *RANKS])]  # fmt: skip
    assert [log.parameters for log in cut] == [None, 1401]


@pytest.mark.parametrize(
    ("line", "ranks"),
    [(WORLD, 4), (WORLD[:18], None)],
)
def test_a_world_size_fits_its_parts(write_log, line, ranks):
    assert read_log(write_log(head=[line])).world_size == ranks


def test_the_zero_config_tells_what_the_name_does_not(write_log):
    line = (
        "[2031] [INFO] [config.py:1000:print]   zero_config .................. stage=3"
        " offload_optimizer=Config(device='cpu', ratio=0.8) sub_group_size=5000 x=1"
    )
    settings = read_log(write_log("run.log", head=[line])).settings
    assert settings == {"subgroup_numel": 5000, "offload_ratio": 0.8, "global_batch_size": 2}
    named = "log-7B-tp1-dp1-l2-h4-a2-sl64-gbs2-mbs1-ratio0.5-subg100-prefetch0.log"
    settings = read_log(write_log(named, head=[line])).settings
    assert (settings["subgroup_numel"], settings["offload_ratio"]) == (100, 0.5)


def test_two_batch_sizes_are_said(write_log):
    head = ["  global_batch_size ............................... 9"]
    log = read_log(write_log("run.log", head=head))
    assert log.settings["global_batch_size"] == 9
    assert "two global batch sizes" in log.notes[0]
