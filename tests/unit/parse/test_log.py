"""What is read of a log, sound and damaged; tests/golden/parse has a log of every form."""

import json
import math
from pathlib import Path

import pytest

from parse.log import read_lines, read_log, read_usable_log
from parse.log_name import settings_from_name
from parse.records import LogError

ROOT = Path(__file__).resolve().parents[3]
FORMS = ROOT / "tests" / "golden" / "parse" / "forms"
AUTHORS = ROOT / ".." / "shared" / "data" / "logs"


def seconds(log):
    return [record.iteration_s for record in log.iterations]


def numbers(log):
    return [record.iteration for record in log.iterations]


def updates(log):
    return [record.update_ms for record in log.iterations]


def losses(log):
    return [record.loss for record in log.iterations]


def reasons(log):
    return [reject.reason for reject in log.rejects]


@pytest.fixture
def read(write_log):
    """Reads a recipe with texts replaced, or a text."""

    def read(*replaced, text=None, **recipe):
        path = write_log(text=text, **recipe)
        found = path.read_text()
        for old, new in replaced:
            assert old in found, old
            found = found.replace(old, new)
        path.write_text(found)
        return read_log(path)

    return read


def form(name):
    return (FORMS / f"{name}.log").read_bytes().decode().replace("\r", "\n").splitlines()


# Lines of a file


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_every_kind_of_line_end_ends_a_line(tmp_path, end):
    path = tmp_path / "a.log"
    path.write_bytes(end.join([b"x", b"\x1b[1;32malpha\x1b[0m=1", b"", b"\xff last"]))
    found = list(read_lines(path))
    assert [line.number for line in found] == [1, 2, 3, 4]
    assert [line.text for line in found] == ["x", " alpha =1", "", "\ufffd last"]
    assert [line.cut for line in found] == [False] * 3 + [True]


def test_a_line_longer_than_any_is_cut_off_and_the_next_one_read(read):
    log = read(("| lm loss: 8.25", "z" * 70_000 + "| lm loss: 8.25"))
    assert (numbers(log), reasons(log)) == ([1, 2, 4, 5], ["cut off"])


def test_unusable_logs_say_why(write_log, tmp_path, recipe):
    (tmp_path / "utf-16.log").write_bytes(recipe().text().encode("utf-16"))
    (tmp_path / "noise.log").write_bytes(bytes(range(256)) * 40)
    cases = {
        tmp_path / "absent.log": "no such file",
        tmp_path: "is a folder",
        tmp_path / "utf-16.log": "UTF-16 text; convert it to UTF-8",
        tmp_path / "noise.log": "not a training log",
        write_log("empty.log", text=""): "is empty",
        write_log("poem.log", text="roses are red\n"): "not a training log",
        write_log("cut.log", text=recipe().text()[:200]): "no complete iteration",
    }
    for path, reason in cases.items():
        with pytest.raises(LogError, match=reason):
            read_usable_log(path)


# Iterations


@pytest.mark.parametrize(
    "replaced",
    [
        ("[Rank 0]", "[2024-01-02 03:04:05,678] [INFO] [f.py:96:g] [Rank 0]"),
        ("\n", "\nnode-7: "),
        ("\n", "\n 40%|####      | 2/5 [00:01<00:02]"),
        ("\n", "\r 40%|####      | 2/5 [00:01<00:02]\r\x1b[32m"),
        ("fwd", "forward"),
        ("bwd", "backward"),
    ],
)
def test_prefixes_bars_colours_and_old_names_change_nothing(read, replaced):
    assert read(replaced).iterations == read().iterations


def test_of_the_timers_of_all_ranks_the_printing_ranks_counts(read, recipe):
    four = {"ranks": 4, "head": ["using world size: 4, data-parallel-size: 4"]}
    expected = [recipe().time(i) for i in range(5)]
    assert seconds(read(**four)) == seconds(read((">\n<TIMER", "><TIMER"), **four)) == expected
    # Without it, what the iteration line says.
    lost = read((f"<TIMER:interval-time,{expected[2]!r}>", ""), **four)
    assert seconds(lost) == [*expected[:2], float(f"{expected[2]:.6f}"), *expected[3:]]
    damaged = read(("time,0.1>", "time,0.1x>"))
    assert seconds(damaged) == expected
    assert reasons(damaged) == ["an interval timer that cannot be read"]


def test_the_mean_of_an_interval_is_an_iterations_time(read, recipe):
    line = recipe((9.0,), (5.0,), batch=2).iteration_line(0).replace("(ms): 5000.0", "(ms): 500.0")
    lines = [line.replace("samples:            2", f"samples: {n}") for n in (20, 40, 60)]
    log = read(text="\n".join(lines) + "\n")
    assert (numbers(log), seconds(log)) == ([10, 20, 30], [0.5, 0.5, 0.5])


def test_a_loss_left_out_is_nan_unless_the_loss_scaler_skipped(read):
    found = losses(read(losses=(9.0, None, math.nan, math.inf)))
    assert [str(loss) for loss in found] == ["9.0", "nan", "nan", "inf"]
    two = ("samples:            4", "skipped iterations:   0", "skipped iterations:   1")
    lines = read(losses=(9.0, None)).path.read_text().splitlines()
    lines = [line.replace(*two[1:]) if two[0] in line else line for line in lines]
    assert losses(read(text="\n".join(lines) + "\n")) == [9.0, None]


DAMAGED = {
    "a field": ("| lm loss: 8.25", "| lm loss: 8.2X"),
    "no value": ("| lm loss: 8.25", "| lm loss: |8.25"),
    "a label": ("| lm loss: 8.25", "| lm lXss: 8.25"),
    "two fields": ("| lm loss: 8.25", "x lm loss: 8.25"),
    "no label": ("| lm loss: 8.25", "| lm loss; 8.25"),
    "zeros": ("samples:            6", "samples: \0\0\0\0"),
    "a timer inside": ("lm loss: 8.25", "lm loss: 8<TIMER:interval-time,0.1>.25"),
    "two lines": ("lm loss: 8.25", "time (ms) lm loss: 8.25"),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_iteration_line_is_left_out_and_moves_nothing(read, damage):
    log = read(damage)
    assert (numbers(log), losses(log)) == ([1, 2, 4, 5], [9.0, 8.5, 8.125, 8.0])
    assert updates(log) == [30.75, 31.75, 33.75, 34.75]
    assert {reject.line for reject in log.rejects} == {16}
    assert log.notes == ["iterations missing: 3"]


def test_a_damaged_timer_line_leaves_only_its_own_times_out(read):
    log = read(("step: 31.75", "step: 31x75"))
    assert updates(log) == [30.75, None, 32.75, 33.75, 34.75]
    assert losses(log) == [9.0, 8.5, 8.25, 8.125, 8.0]
    assert reasons(log) == ["a timer line whose 'step' cannot be read"]


def test_timers_of_a_lost_iteration_are_not_the_next_ones(read, recipe):
    log = read((recipe().iteration_line(2) + "\n", ""))
    lines = [line for line in log.path.read_text().splitlines() if "fwd: 13" not in line]
    log = read(text="\n".join(lines) + "\n")
    assert (numbers(log), updates(log)) == ([1, 2, 4, 5], [30.75, 31.75, None, 34.75])


def test_a_number_that_does_not_rise_is_left_out_or_starts_a_new_run(read, recipe):
    line = recipe().iteration_line(1)
    log = read((line, f"{line}\n{line}"))
    assert losses(log) == [9.0, 8.5, 8.25, 8.125, 8.0]
    assert reasons(log) == ["an iteration number that does not rise"]
    log = read(text=recipe().text() + recipe(losses=(7.0, 6.0)).text())
    assert (losses(log), updates(log)) == ([7.0, 6.0], [30.75, 31.75])
    assert "starts anew" in log.notes[0]
    resumed = ["using world size: 1, x", *recipe(losses=(9.0, 8.5, 7.5, 7.25)).block(2)]
    log = read(text=recipe().text() + "\n".join(resumed) + "\n")
    assert losses(log) == [7.5]


def test_a_line_without_any_number_is_no_first_iteration(read):
    line = form("bigscience")[0]
    lost = line.replace("iteration    13910/  953674 |", "").replace("global batch", "batch")
    log = read(text=lost + "\n")
    assert log.iterations == []
    assert "an iteration whose number is lost" in reasons(log)


@pytest.mark.parametrize("lost", [[], ["step=2,"], ["step=1,", "step=3,"], [" step="]])
def test_timers_alone_are_numbered_by_what_is_left_of_the_progress(read, lost):
    lines = [x for x in form("deepspeed_old") if not any(part in x for part in lost)]
    log = read(text="\n".join(lines) + "\n")
    assert dict(zip(numbers(log), updates(log), strict=True)) == {
        1: 40.02, 2: 40.03, 3: 40.04, 4: 40.05,
    }  # fmt: skip
    damaged = read((" step=2,", " stXp=2,"), text="\n".join(form("deepspeed_old")) + "\n")
    assert numbers(damaged) == [1, 2, 3, 4]
    assert reasons(damaged) == ["a progress line that cannot be read"]


@pytest.mark.parametrize("name", ["deepspeed_0_19", "megatron_deepspeed"])
def test_of_two_lines_run_together_nothing_counts(read, name):
    marks = ("time (ms", "step=", "Max_MA", "CPU V", "elapsed")
    lines = [line for line in form(name) if any(mark in line for mark in marks)]
    for at in range(len(lines) - 1):
        log = read(text="\n".join([*lines[:at], lines[at] + "x" + lines[at + 1]]) + "\n")
        assert at + 1 in [reject.line for reject in log.rejects]
        assert "two lines run together" in reasons(log)


@pytest.mark.skipif(not AUTHORS.is_dir(), reason="the authors' logs are not here")
def test_every_log_of_the_authors_is_read_whole():
    logs = [read_log(path) for path in sorted(AUTHORS.rglob("*.log"))]
    assert len(logs) >= 17
    for log in logs:
        expected = 5 if "TP-motivation" in str(log.path) else 10
        assert (len(log.iterations), log.rejects, log.notes) == (expected, [], [])
        assert all(r.iteration_s and r.update_ms and r.printed["tflops"] for r in log.iterations)
        assert None not in losses(log)


# The run as a whole

RANKS = [
    f" > number of parameters on (tensor, pipeline) model parallel rank ({rank}, 0): {700 + rank}"
    for rank in (0, 1)
]
WORLD = (
    "using world size: 4, data-parallel-size: 2, sequence-parallel size: 1, tensor-model-parallel"
    " size: 2, pipeline-model-parallel size: 1 "
)


@pytest.mark.parametrize(
    ("head", "parameters"),
    [
        ([WORLD, *RANKS], 1401),
        ([*RANKS, RANKS[0]], 1401),
        ([WORLD, RANKS[0]], None),
        ([WORLD, RANKS[0], RANKS[1].replace("701", "7x1")], None),
        ([RANKS[0], RANKS[1].replace("(1,", "(8,")], None),
        (["using world size: 1, data-parallel-size: 1", RANKS[0]], 700),
    ],
)
def test_parameters_are_of_the_whole_model_or_missing(read, head, parameters):
    log = read(head=head)
    assert log.parameters == parameters
    assert any("parameters" in note for note in log.notes) is (parameters is None)


@pytest.mark.parametrize(
    ("head", "name", "ranks"),
    [
        (["  world_size ........ 9"], "log-7B-tp2-dp3-l1-h1-a1-sl1-gbs1-mbs1-ratio1-subg1.log", 6),
        (["x dist_world_size=4"], "log-7B-tp2-dp3-l1-.log", 4),
        (["x dist_world_size=4", "using world size: 8, data"], "log-7B-tp2-dp3-l1-.log", 8),
        ([], "other.log", None),
    ],
)
def test_world_size_comes_from_the_log_before_the_name(write_log, head, name, ranks):
    assert read_log(write_log(name, head=head)).world_size == ranks


def test_facts_and_arguments_of_the_run(write_log):
    zero = (
        "[2031] [INFO] [config.py:1000:print]   zero_config .................. stage=3"
        " offload_optimizer=Config(device='cpu', ratio=0.8) sub_group_size=5000 x=1"
    )
    head = [
        "Setting ds_accelerator to cuda (auto detect)",
        " > padded vocab (size: 1000) with 24 dummy tokens (new size: 1024)",
        "  micro_batch_size ................................ 3",
        "[date] [INFO] [config.py:1:print]   global_batch_size ............ 77",
        zero,
    ]
    log = read_log(write_log("run.log", head=head))
    assert (log.device, log.vocab_size) == ("cuda", 1024)
    assert log.settings == {"micro_batch_size": 3, "global_batch_size": 2,
                            "subgroup_numel": 5000, "offload_ratio": 0.8}  # fmt: skip
    named = "log-7B-tp1-dp1-l2-h4-a2-sl64-gbs2-mbs1-ratio0.5-subg100-prefetch0.log"
    settings = read_log(write_log(named, head=head)).settings
    assert (settings["subgroup_numel"], settings["offload_ratio"]) == (100, 0.5)


NAME = "log-8.3B-tp2-dp4-l72-h3072-a32-sl2048-gbs8-mbs1-ratio0.8-subg100000000"
OF_NAME = {
    "model": "8.3B", "tp": 2, "dp": 4, "num_layers": 72, "hidden": 3072, "heads": 32,
    "seq_length": 2048, "global_batch_size": 8, "micro_batch_size": 1, "offload_ratio": 0.8,
    "subgroup_numel": 100_000_000,
}  # fmt: skip


@pytest.mark.parametrize(
    ("rest", "more"),
    [
        ("-prefetch1-flush_async1-opt_gaps5", {"engine": "stride", "stride": 5}),
        ("-prefetch0-flush_async0-opt_gaps0", {"engine": "stock", "stride": 0}),
        ("-prefetch0-flush_async0-opt_gaps5", {"engine": "stock", "stride": 0}),
        ("-prefetch0-flush_async1-opt_gaps5", {"engine": "all-host", "stride": 0}),
        ("-prefetch0", {"engine": "stock", "stride": 0}),
        ("-prefetch1", {"engine": "stride"}),
        ("-hog0.5-zz7-engine_zen-tp9-x", {"engine": "zen-tp9-x"}),
        ("-engine_auto_2", {"engine": "auto_2"}),
    ],
)
def test_settings_of_a_name(rest, more):
    found = settings_from_name(f"{NAME}{rest}.log")
    knobs = ("prefetch", "flush_async", "opt_gaps")
    assert {k: v for k, v in found.items() if k not in knobs} == OF_NAME | more


# Memory, throughput


def breakdown(title, peak, used, percent):
    head = "[2031-01-01 00:00:00,000] [INFO] [utils.py:{}:see_memory_usage] "
    device = f"MA 1.0 GB         Max_MA {peak} GB         CA 3.0 GB         Max_CA 9 GB "
    host = f"CPU Virtual Memory:  used = {used} GB, percent = {percent}%"
    texts = {800: title, 801: device, 808: host}
    return [head.format(number) + text for number, text in texts.items()]


@pytest.fixture
def memory_lines(recipe):
    """Four iterations on a machine of 200 GiB; the setup's figures come first."""
    found = recipe(losses=(9.0, 8.5, 8.25, 8.0)).blocks()
    found[0] += breakdown("After initializing ZeRO optimizer", 1.5, 20.0, 10.0)
    for number, block in enumerate(found[1:], 1):
        before = breakdown("Engine before forward", 2.0 + number, 40.0 + number, 20 + number / 2)
        block[0:0] = before
        block[6:6] = breakdown("Engine after step", 1.25, 30.0, 15.0)
    return [line for block in found for line in block]


def test_a_row_of_memory_has_its_title_iteration_and_place(read, memory_lines):
    log = read(text="\n".join(memory_lines) + "\n")
    assert [(row["title"], row["iteration"]) for row in log.memory][:3] == [
        ("After initializing ZeRO optimizer", None),
        ("Engine before forward", 1),
        ("Engine after step", 1),
    ]
    row = log.memory[1]
    assert "Max_MA 3.0" in memory_lines[row["line"] - 1]
    assert (row["allocated_gib"], row["max_allocated_gib"], row["cached_gib"]) == (1.0, 3.0, 3.0)
    assert (row["host_used_gib"], row["host_percent"]) == (41.0, 20.5)
    assert [r.device_memory_gib for r in log.iterations] == [3.0, 4.0, 5.0, 6.0]
    assert [r.host_memory_gib for r in log.iterations] == [41.0, 42.0, 43.0, 44.0]
    titles = [row["title"] for row in log.memory]
    plain = [line.rpartition("see_memory_usage] ")[2] for line in memory_lines]
    for prefix in ("", "node-1: "):
        lines = [f"{prefix}{line}\n" for line in plain]
        assert [row["title"] for row in read(text="".join(lines)).memory] == titles
    after = memory_lines.index(plain[0]) + 2  # another line comes between the title and the figures
    stranger = [*plain[:after], "[rank1]: time (ms) | x", *plain[after:]]
    assert read(text="\n".join(stranger) + "\n").memory[0]["title"] is None


@pytest.mark.parametrize(
    ("old", "new", "device", "host"),
    [
        ("Max_MA 4.0 GB", "Max_MA 4.x GB", None, 42.0),
        ("used = 42.0 GB", "used = 42.0 XB", 4.0, None),
    ],
)
def test_figures_of_memory_that_cannot_be_are_missing(read, memory_lines, old, new, device, host):
    log = read((old, new), text="\n".join(memory_lines) + "\n")
    record = log.iterations[1]
    assert (record.device_memory_gib, record.host_memory_gib) == (device, host)
    assert [r.device_memory_gib for r in log.iterations if r is not record] == [3.0, 5.0, 6.0]
    assert reasons(log) == ["a damaged memory line"]


THROUGHPUT = (
    "[2026-11-22 12:40:16,782] [INFO] [timer.py:264:stop] epoch=0/micro_step=20/global_step=10, "
    "RunningAvgSamplesPerSec=1.9648661578794193, CurrSamplesPerSec=2.5, MemAllocated=0.37GB, "
    "MaxMemAllocated=0.48GB\n"
)


def test_a_throughput_line_is_read(read):
    log = read(text=THROUGHPUT)
    row = {"line": 1, "step": 10, "micro_step": 20, "running_samples_per_s": 1.9648661578794193}
    row |= {"current_samples_per_s": 2.5, "allocated_gib": 0.37, "max_allocated_gib": 0.48}
    assert (log.throughput, log.rejects) == ([row], [])
    [row] = read(("1.9648661578794193", "-inf"), text=THROUGHPUT).throughput
    assert (row["running_samples_per_s"], row["current_samples_per_s"]) == (None, 2.5)


@pytest.mark.parametrize(
    "damage", [("=2.5", "=2.x5"), ("0.37GB", "0.37"), ("0.48GB", "0.48GBx"), ("_step=20", "_step=")]
)
def test_a_damaged_throughput_line_counts_as_none_and_is_listed(read, damage):
    log = read(damage, text=THROUGHPUT)
    assert (log.throughput, reasons(log)) == ([], ["a throughput line that cannot be read"])


# metrics.jsonl


@pytest.fixture
def write_metrics(tmp_path):
    def write(losses, **end):
        events = [{"event": "start", "parameters": 42, "padded_vocab_size": 128, "num_ranks": 3}]
        for number, loss in enumerate(losses, 1):
            figures = {"grad_norm": number / 8, "update_ms": 1.0, "dry_ms": 2.5}
            events.append({"event": "iteration", "iteration": number, "loss": loss, **figures})
        events.append({"event": "evaluation", "iteration": 2, "loss": 8.75, "perplexity": 6310.5})
        events.append({"event": "end", "iterations": len(losses), **end})
        path = tmp_path / "metrics.jsonl"
        path.write_text("".join(json.dumps(event) + "\n" for event in events))
        return path

    return write


def test_exact_figures_are_attached(read, write_metrics):
    exact = [9.0000001, 8.5, 8.25, 8.125, 8.0]
    write_metrics(exact, weights_sha256="ab", optimizer_sha256=None)
    log = read()
    assert [r.exact_loss for r in log.iterations] == exact
    assert (log.iterations[3].printed["grad_norm"], log.iterations[0].update_ms) == (0.5, 30.75)
    assert log.iterations[0].phase_ms("dry") == 2.5
    assert (log.parameters, log.vocab_size, log.world_size) == (42, 128, 1)
    assert log.metrics.digest("weights_sha256") == "ab"
    assert log.metrics.digest("optimizer_sha256") is None
    assert [event["iteration"] for event in log.metrics.evaluations] == [2]
    # What is lost in the log is in the file.
    log = read(("lm loss: 8.25", "lm loss: 8x25"))
    assert (numbers(log), log.iterations[2].exact_loss) == ([1, 2, 3, 4, 5], 8.25)


@pytest.mark.parametrize("losses", [[9.0, 8.5, 8.26, 8.125, 8.0], [9.0, 8.5, "nan"], []])
def test_another_runs_metrics_are_left_out(read, write_metrics, losses):
    write_metrics(losses)
    log = read()
    assert log.metrics is None
    assert log.notes == ["metrics.jsonl beside log.log does not fit it; left out"]
    assert log.iterations[0].exact_loss is None


def test_damaged_lines_of_metrics_are_left_out(read, write_metrics):
    path = write_metrics([9.0, 8.5, 8.25, 8.125, 8.0])
    lines = path.read_text().splitlines()
    lines[3] = lines[3][:20]
    path.write_text("\n".join([*lines, "[" * 100_000, '"start"', "\0\ufffd"]) + "\n")
    log = read()
    assert (log.iterations[2].exact_loss, log.iterations[3].exact_loss) == (None, 8.125)
    assert log.notes == []
