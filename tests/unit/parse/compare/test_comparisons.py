from types import SimpleNamespace

import pytest
from programs import parse_logs as parse
from rows import rows

from configs.study import default_study
from parse.compare import compare_points, comparison_columns, differences
from parse.run import label_runs, read_run, read_sweep

SLOW, FAST = (9.0, 0.4, 0.41, 0.42, 0.43), (9.0, 0.2, 0.205, 0.21, 0.215)
GPUS = {"gpus": [{"name": "Test GPU", "driver": "1", "memory": "80 GB"}]}


@pytest.fixture
def gpu_sweep(sweep_writer):
    """Writes stock and stride, three repeats each, on a GPU; ``changes`` by engine and repeat."""
    sweep_writer.device = "Test GPU"

    def write(repeats=(1, 2, 3), **changes):
        runs = []
        for repeat in repeats:
            for engine, stride, seconds in (("stock", 0, SLOW), ("stride", 2, FAST)):
                fields = {"repeat": repeat, "seconds": seconds, "provenance": GPUS}
                fields |= changes.get(engine, {}) | changes.get(f"{engine}{repeat}", {})
                runs.append((engine, stride, fields))
        return sweep_writer.write_runs(runs)

    return write


def compared(folder):
    runs = read_sweep(folder)
    label_runs(runs)
    return compare_points(runs, 1)


def test_a_speed_up_over_paired_repeats(gpu_sweep):
    (item,) = compared(gpu_sweep())
    assert (item.equality, item.withheld) == ("equal", "")
    ratio = item.ratios["iteration"]
    assert ratio.paired
    assert ratio.ratio == item.speedup("iteration") == pytest.approx(2.0)
    assert ratio.low <= 2.0 <= ratio.high
    assert len(item.ours.finished) == 3


@pytest.mark.parametrize("failed", [("stock2",), ("stock2", "stride3")])
def test_repeats_that_are_not_the_same_are_not_paired(gpu_sweep, failed):
    (item,) = compared(gpu_sweep(**{name: {"status": "failed"} for name in failed}))
    assert not item.ratios["iteration"].paired
    assert len(item.reference.finished) == 2
    assert len(item.ours.finished) == 4 - len(failed)


@pytest.mark.parametrize(
    ("changes", "equality", "why"),
    [
        ({"stride2": {"digest": "bb"}}, "differs",
         "repeat 2: the pair differs: the losses agree, the final weights and optimizer state"),
        ({"stride3": {"status": "timeout", "cause": "10 s"}}, "not compared",
         "repeat 3: run timeout (10 s)"),
        ({"stock": {"status": "failed"}}, "not compared", "stock run failed"),
        ({"stride": {"provenance": GPUS | {"git": {"commit": "abd", "dirty": False}}}}, "equal",
         "commit differs (abd, abc with changes)"),
        ({"stride2": {"provenance": GPUS | {"git": {"commit": "abc", "dirty": True,
                                                    "changes_sha256": "f" * 64}}}}, "equal",
         "commit differs (abc with changes, abc with changes ffffffff)"),
        ({"stock2": {"provenance": {"gpus": [{"name": "Other", "driver": "1"}]}}}, "equal",
         "GPU differs (Test GPU (driver 1), Other (driver 1))"),
        ({"stride": {"provenance": GPUS | {"versions": {"deepspeed": "0.19.8"}}}}, "equal",
         "deepspeed differs (0.19.8, not known)"),
        ({"stride": {"point": {"subgroup_numel": 2_000_000}}}, "equal",
         "stock has another subgroup_numel (1000000 for 2000000)"),
        ({"stock": {"point": {"seed": 2}}}, "not compared", "no stock run of this point"),
        ({"stride": {"losses": (9.0, 8.0, 8.0, 8.0, 8.0)}}, "differs", "is frozen at 8.0"),
    ],
)  # fmt: skip
def test_a_speed_up_is_withheld_with_its_reason(gpu_sweep, changes, equality, why):
    (item,) = compared(gpu_sweep(**changes))
    assert item.equality == equality
    assert why in item.withheld
    assert item.speedup("iteration") is None


def test_a_cpu_is_never_faster(sweep_writer):
    items = compared(sweep_writer.write())
    assert [(i.equality, i.withheld) for i in items] == [("equal", "measured on a CPU")] * 2


def test_the_table_has_a_row_a_phase(gpu_sweep, tmp_path, capsys):
    changes = {"stride": {"digest": "bb"}}
    assert parse([str(gpu_sweep(**changes)), "--out", str(tmp_path / "t")]) == 0
    table = rows(tmp_path / "t" / "comparisons.csv")
    assert list(table[0]) == list(comparison_columns(default_study()))
    assert [row["phase"] for row in table] == ["iteration", "forward", "backward", "update"]
    first = table[0]
    assert (first["engine"], first["stride"], first["repeats"]) == ("stride", "2", "3")
    assert (first["label"], first["reference_label"]) == ("tiny stride 2", "tiny stock")
    assert (first["paired"], first["equality"], first["speedup"]) == ("yes", "differs", "")
    assert (first["reference_ms"], first["ours_ms"], first["iterations"]) == (
        "415.0",
        "207.5",
        "12",
    )
    assert float(first["ratio_low"]) <= 2 <= float(first["ratio_high"])
    assert "differs" in first["withheld"]


NAME = "log-7B-tp1-dp1-l2-h4-a2-sl64-gbs2-mbs1-ratio1-subg100-prefetch{}-flush_async{}-opt_gaps{}"
LONE = {"stock": NAME.format(0, 0, 0), "stride": NAME.format(1, 1, 2)}
PACES = {
    name: tuple(s + 0.01 * i for i in range(10)) for name, s in (("stock", 0.2), ("stride", 0.1))
}
SHORT, LONG = (9.0, 8.5, 8.25, 8.125, 8.0), tuple(9.5 - 0.1 * i for i in range(10))


@pytest.fixture
def lone_logs(write_log):
    """Compares lone logs, each given as its folder, its engine and its losses."""

    def write(*logs):
        paths = [
            write_log(f"{at}/{LONE[name]}.log", losses=losses, seconds=PACES[name][: len(losses)])
            for at, name, losses in logs
        ]
        runs = [read_run(path) for path in paths]
        label_runs(runs)
        return compare_points(runs, 1), runs

    return write


def test_a_log_is_paired_with_one_of_as_many_iterations(lone_logs):
    logs = ("a", "stock", SHORT), ("b", "stock", LONG), ("b", "stride", LONG)
    (item,), runs = lone_logs(*logs)
    assert (item.equality, item.withheld) == ("equal", "")
    assert item.pairs[0].reference is runs[1]
    assert [len(point.runs) for point in (item.reference, item.ours)] == [1, 1]
    assert [run.label for run in runs] == ["7B stock", "7B stock #2", "7B stride 2"]


def test_two_copies_of_a_log_are_no_speed_up(lone_logs, write_log):
    _, (run, _) = lone_logs(("a", "stock", LONG), ("a", "stride", LONG))
    copy = run.log.path.with_name(f"{LONE['stride']}.log")
    copy.write_bytes(run.log.path.read_bytes().replace(b"\n", b"\r\n"))
    runs = [read_run(run.log.path), read_run(copy)]
    label_runs(runs)
    (item,) = compare_points(runs, 1)
    assert f"{copy} says the same as {run.log.path}, line by line" in item.withheld


def test_logs_whose_names_agree_and_whose_texts_do_not_are_no_speed_up(lone_logs):
    (item,), (stock, stride) = lone_logs(("a", "stock", LONG), ("a", "stride", LONG))
    assert item.withheld == ""
    for old, new, why in (
        (
            "world size: 1, data-parallel-size: 1",
            "world size: 4",
            "number of ranks differs (1 and 4)",
        ),
        ("actual seqlen:    64", "actual seqlen:    32", "no stock run of this point"),
        ("lm loss: 9.000000E+00", "lm loss: 9.0x0000E+00", "the loss in line 31 of"),
    ):
        kept = stride.log.path.read_text()
        stride.log.path.write_text(kept.replace(old, new))
        runs = [read_run(run.log.path) for run in (stock, stride)]
        stride.log.path.write_text(kept)
        label_runs(runs)
        (item,) = compare_points(runs, 1)
        assert why in item.withheld


def test_a_pair_of_other_lengths_is_told_and_has_no_speed_up(lone_logs):
    (item,), _ = lone_logs(("a", "stock", LONG), ("b", "stride", LONG[:7]))
    assert item.equality == "equal"
    assert "stock has another number of iterations (10 for 7)" in item.withheld


def test_a_sweeps_own_reference_goes_before_those_of_others(lone_logs):
    other = tuple(loss + 0.25 for loss in LONG)
    logs = [("a", "stock", other), ("b", "stock", LONG), ("b", "stride", LONG)]
    (item,), runs = lone_logs(*logs)
    assert (item.equality, item.withheld) == ("equal", "")
    assert item.reference.runs == [runs[1]]
    (item,), runs = lone_logs(*logs[:1], logs[2])
    assert item.equality == "differs"
    assert item.reference.runs == [runs[0]]


def test_repeats_of_two_sweeps_are_paired_each_in_its_own(gpu_sweep, sweep_writer, tmp_path):
    folders, lower = [], tuple(loss - 0.5 for loss in SHORT)
    for name, losses in (("b", lower), ("a", SHORT)):
        sweep_writer.folder = tmp_path / name
        folders.append(gpu_sweep((1, 2), stock={"losses": losses}, stride={"losses": losses}))
    every = [run for folder in folders for run in read_sweep(folder)]
    engines = [[run for run in every if run.engine == name] for name in ("stock", "stride")]
    runs = [*engines[0], *reversed(engines[1])]
    label_runs(runs)
    (item,) = compare_points(runs, 1)
    assert (item.equality, item.withheld) == ("equal", "")
    assert item.ratios["iteration"].paired
    assert {(p.run.sweep_dir, p.run.repeat) for p in item.pairs} == {
        (p.reference.sweep_dir, p.reference.repeat) for p in item.pairs
    }
    assert len(item.pairs) == 4


def run_of(commit, code=None):
    kept = {"git": {"commit": commit, "dirty": False}}
    if code is not None:
        kept["code"] = {"sha256": code, "files": {}}
    log = SimpleNamespace(device=None, metrics=None)
    return SimpleNamespace(provenance=kept, log=log, hardware="", gpus=[])


@pytest.mark.parametrize(
    ("runs", "texts"),
    [
        ([run_of("abc", "1"), run_of("abd", "1")], []),
        ([run_of("abc", "1"), run_of("abc", "2")], ["code differs (1, 2)"]),
        ([run_of("abc"), run_of("abd")], ["commit differs (abc, abd)"]),
        (
            [run_of("abc", "1"), run_of("abd")],
            ["code differs (1, not known)", "commit differs (abc, abd)"],
        ),
    ],
)
def test_the_code_that_runs_counts_and_the_commit_only_where_it_is_not_known(runs, texts):
    assert differences(runs) == texts
