import math
from pathlib import Path

import pytest

from parse.log import read_log, read_usable_log
from parse.records import LogError

AUTHORS = Path(__file__).resolve().parents[4] / ".." / "shared" / "data" / "logs"


def seconds(log):
    return [record.iteration_s for record in log.iterations]


def numbers(log):
    return [record.iteration for record in log.iterations]


def reasons(log):
    return [reject.reason for reject in log.rejects]


def test_an_iteration_has_its_own_times_loss_and_settings(write_log):
    log = read_log(write_log())
    assert log.rejects == []
    assert log.notes == []
    assert [r.iteration for r in log.iterations] == [1, 2, 3, 4, 5]
    record = log.iterations[2]
    assert record.iteration_s == 0.1 + 0.0123456789 * 2
    assert (record.forward_ms, record.backward_ms, record.update_ms) == (12.25, 22.0, 32.75)
    assert (record.backward_inner_ms, record.backward_allreduce_ms) == (17.0, 5.0)
    assert record.optimizer_step_ms == 27.5
    assert record.loss == 8.25
    assert (record.learning_rate, record.tflops, record.tokens) == (3e-4, 2.5, 6 * 64)


def test_several_ranks_give_the_printing_ranks_timer(write_log, recipe):
    log = read_log(write_log(ranks=4, head=["using world size: 4, data-parallel-size: 4"]))
    assert seconds(log) == [recipe().time(i) for i in range(5)]
    assert log.notes == []


def test_glued_timers_are_all_found(write_log, recipe):
    source = recipe(ranks=4, head=["using world size: 4, data-parallel-size: 4"])
    text = source.text().replace(">\n<TIMER", "><TIMER")
    log = read_log(write_log(text=text))
    assert text.count("\n") < source.text().count("\n")
    assert seconds(log) == [source.time(i) for i in range(5)]
    assert log.notes == []


@pytest.mark.parametrize("parts", [("9.00", "0000E+00"), ("TFLOPs: 2", ".50 |")])
def test_a_line_with_a_timer_inside_is_left_out(write_log, recipe, parts):
    first = recipe().iteration_line(0)
    damaged = first.replace("".join(parts), "<TIMER:interval-time,0.1>".join(parts))
    assert damaged != first
    log = read_log(write_log(text=recipe().text().replace(first, damaged)))
    assert numbers(log) == [2, 3, 4, 5]
    assert [reject.line_number for reject in log.rejects] == [6]
    assert "cannot be read" in log.rejects[0].reason


def test_whole_timers_around_a_whole_line_do_no_harm(write_log, recipe):
    timer, first = "<TIMER:interval-time,0.1>", recipe().iteration_line(0)
    text = recipe().text().replace(first, timer + first + timer)
    log = read_log(write_log(text=text))
    assert log.iterations == read_log(write_log()).iterations
    assert log.rejects == []


def test_lost_timers_fall_back_on_the_iteration_line(write_log, recipe):
    source = recipe(ranks=2, head=["using world size: 2, data-parallel-size: 2"])
    lines = source.text().splitlines()
    lost = [i for i, line in enumerate(lines) if line.startswith("<TIMER")][4:6]
    text = "\n".join(line for i, line in enumerate(lines) if i not in lost) + "\n"
    log = read_log(write_log(text=text))
    expected = [source.time(i) for i in range(5)]
    expected[2] = float(f"{expected[2]:.6f}")
    assert seconds(log) == expected
    assert log.notes == ["8 interval timers for 2 ranks x 5 iterations"]


def test_without_iteration_lines_timers_are_grouped_by_the_world_size(write_log, recipe):
    source = recipe(ranks=2, head=["using world size: 2, data-parallel-size: 2"])
    lines = [line for line in source.text().splitlines() if "elapsed" not in line]
    log = read_log(write_log(text="\n".join(lines) + "\n"))
    assert seconds(log) == [source.time(i) + 0.001 for i in range(5)]
    assert [r.loss for r in log.iterations] == [None] * 5
    lines.remove(next(line for line in reversed(lines) if "TIMER" in line))
    log = read_log(write_log(text="\n".join(lines) + "\n"))
    assert seconds(log) == [source.time(i) + 0.001 for i in range(4)] + [None]


def test_a_damaged_interval_timer_is_left_out_alone(write_log, recipe):
    text = recipe().text().replace("time,0.1>", "time,0.1x>")
    log = read_log(write_log(text=text))
    assert seconds(log) == [recipe().time(i) for i in range(5)]
    assert reasons(log) == ["an interval timer that cannot be read"]


def test_a_log_cut_before_its_first_iteration_line_has_no_time(write_log, recipe):
    text = recipe().text()
    log = read_log(write_log(text=text[: text.index(" elapsed_time")]))
    assert [(r.update_ms, r.iteration_s) for r in log.iterations] == [(30.75, None)]


def test_where_ranks_differ_a_coarse_time_stays_as_printed(write_log, recipe):
    text = recipe(seconds=(0.1,) * 5).text().replace("elapsed_time 0.100000 |", "")
    text = text.replace("<TIMER:interval-time,0.1>", "<TIMER:interval-time,0.10001>" * 2)
    assert seconds(read_log(write_log(text=text))) == [0.10001] * 5
    text = text.replace("0.10001><", "0.09998><")
    assert seconds(read_log(write_log(text=text))) == [0.1] * 5


def test_fields_that_are_run_together_are_left_out_with_their_line(write_log, recipe):
    text = recipe(losses=(9.0, 8.5, None, 8.0)).text()
    skipped = text.splitlines()[15]
    assert "elapsed_time" in skipped
    for old in ("| number of skipped", "| number of nan", "| actual seqlen"):
        damaged = skipped.replace(old, old.replace("|", "x"))
        log = read_log(write_log(text=text.replace(skipped, damaged)))
        assert numbers(log) == [1, 2, 4]
        assert [reject.line_number for reject in log.rejects] == [16]
        assert log.notes == ["iterations missing: 3"]


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


def test_a_host_name_before_every_line_changes_nothing(write_log):
    plain, prefixed = read_log(write_log("a.log")), read_log(write_log("b.log", prefix="node-7: "))
    assert prefixed.iterations == plain.iterations


def test_the_old_prefix_changes_nothing(write_log, recipe):
    old = (
        recipe().text().replace("[Rank 0]", "[2024-01-02 03:04:05,678] [INFO] [f.py:96:g] [Rank 0]")
    )
    assert read_log(write_log("a.log", text=old)).iterations == read_log(write_log()).iterations


def test_a_loss_left_out_is_nan_and_so_is_a_literal_one(write_log):
    log = read_log(write_log(losses=(9.0, None, math.nan, math.inf)))
    losses = [r.loss for r in log.iterations]
    assert losses[0] == 9.0
    assert math.isnan(losses[1])
    assert math.isnan(losses[2])
    assert losses[3] == math.inf
    assert log.rejects == []


def test_a_line_with_a_damaged_loss_is_left_out_rather_than_nan(write_log, recipe):
    whole = "| lm loss: 8.250000E+00"
    for broken in (
        *("| lm lXss: 8.250000E+00", "| lm loss: 8.2X0000E+00", "| lm loss; 8.250000E+00"),
        *("x lm loss: 8.250000E+00", "| lm loss: |8.250000E+00"),
    ):
        text = recipe().text().replace(whole, broken)
        log = read_log(write_log(text=text))
        assert [r.loss for r in log.iterations] == [9.0, 8.5, 8.125, 8.0]
        assert [reject.line_number for reject in log.rejects] == [16]
        assert log.notes == ["iterations missing: 3"]


def test_times_that_some_iterations_lack_are_named(write_log, recipe):
    text = recipe().text().replace("step: 31.75", "step: 31x75").replace("step: 34.75", "step: 3\0")
    log = read_log(write_log(text=text))
    assert [r.update_ms for r in log.iterations] == [30.75, None, 32.75, 33.75, None]
    assert [r.loss for r in log.iterations] == [9.0, 8.5, 8.25, 8.125, 8.0]
    assert reasons(log) == ["a timer line whose 'step' cannot be read", "NUL bytes"]
    names = ("forward", "backward", "update")
    assert log.notes == [f"{name} time missing in iterations: 2, 5" for name in names]


def test_every_place_of_a_cut_gives_a_prefix_of_the_records(write_log, recipe):
    whole = read_log(write_log()).iterations
    text = recipe().text()
    for length in range(0, len(text), 3):
        records = read_log(write_log(text=text[:length])).iterations
        for record, expected in zip(records, whole, strict=False):
            # Timers without an iteration line give times, and no loss.
            assert record.loss == (None if record.tflops is None else expected.loss)
            assert record.update_ms == expected.update_ms
            timed = record.tflops is not None or record.iteration_s is not None
            assert record.iteration_s == (expected.iteration_s if timed else None)


def test_a_cut_line_is_rejected_and_said(write_log, recipe):
    text = recipe().text()
    log = read_log(write_log(text=text[: text.rindex("lm loss") + 12]))
    assert len(log.iterations) == 4
    assert log.ends_mid_line
    assert [r.reason for r in log.rejects] == ["cut off: the log ends here"]


def test_a_lost_iteration_line_leaves_a_gap_and_shifts_nothing(write_log, recipe):
    lines = recipe().text().splitlines()
    at = [i for i, line in enumerate(lines) if "elapsed_time" in line][2]
    del lines[at]
    log = read_log(write_log(text="\n".join(lines) + "\n"))
    assert [r.iteration for r in log.iterations] == [1, 2, 4, 5]
    assert [r.update_ms for r in log.iterations] == [30.75, 31.75, 33.75, 34.75]


@pytest.mark.parametrize(
    ("lost", "update_ms", "optimizer_step_ms"),
    [(["fwd: 13"], None, 28.5), (["optimizer_step: 28"], 33.75, None),
     (["fwd: 13", "optimizer_step: 28"], None, None)],
)  # fmt: skip
def test_phases_of_a_lost_iteration_are_not_the_next_ones(
    write_log, recipe, lost, update_ms, optimizer_step_ms
):
    text = recipe().text().splitlines()
    without = [recipe().iteration_line(2), *lost]
    lines = [line for line in text if not any(part in line for part in without)]
    record = read_log(write_log(text="\n".join(lines) + "\n")).iterations[2]
    assert record.iteration == 4
    assert (record.update_ms, record.optimizer_step_ms) == (update_ms, optimizer_step_ms)


def test_a_line_printed_twice_counts_once(write_log, recipe):
    lines = recipe().text().splitlines()
    at = next(i for i, line in enumerate(lines) if "elapsed_time" in line)
    lines.insert(at, lines[at])
    log = read_log(write_log(text="\n".join(lines) + "\n"))
    assert [r.loss for r in log.iterations] == [9.0, 8.5, 8.25, 8.125, 8.0]
    assert [r.reason for r in log.rejects] == ["an iteration that was printed before"]


def test_of_two_runs_in_one_log_the_last_counts(write_log, recipe):
    text = recipe().text() + recipe(losses=(7.0, 6.0)).text()
    log = read_log(write_log(text=text))
    assert [r.loss for r in log.iterations] == [7.0, 6.0]
    assert [r.update_ms for r in log.iterations] == [30.75, 31.75]
    assert "starts anew" in log.notes[0]


def test_phases_that_could_be_of_two_iterations_are_left_out(write_log, recipe):
    blocks = [recipe().block(i) for i in range(3)]
    text = "".join("\n".join([*block[3:], *block[:3]]) + "\n" for block in blocks)
    log = read_log(write_log(text=text))
    assert [r.update_ms for r in log.iterations] == [None] * 3
    assert log.notes == ["phase times could be of two iterations; left out"]
    assert seconds(log) == [recipe().time(i) for i in range(3)]


def test_old_timer_names_are_read(write_log, recipe):
    text = recipe().text().replace("fwd", "forward").replace("bwd", "backward")
    assert read_log(write_log(text=text)).iterations == read_log(write_log("b.log")).iterations


def test_facts_of_the_run(write_log):
    head = [
        "Setting ds_accelerator to cuda (auto detect)",
        " > padded vocab (size: 1000) with 24 dummy tokens (new size: 1024)",
        " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 700",
        " > number of parameters on (tensor, pipeline) model parallel rank (1, 0): 701",
        " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 700",
        "  micro_batch_size ................................ 3",
        "[date] [INFO] [config.py:1:print]   global_batch_size ............ 77",
    ]
    log = read_log(write_log("run.log", head=head))
    assert (log.device, log.vocab_size, log.parameters) == ("cuda", 1024, 1401)
    assert log.settings == {"micro_batch_size": 3, "global_batch_size": 2}


def test_memory_is_the_largest_within_the_iteration(write_log, recipe):
    blocks = recipe().blocks()
    for block, used in zip(blocks[1:], (5.0, 7.0, 6.0, 1.0, 1.0), strict=True):
        block[0:0] = [
            f"MA 0.4 GB         Max_MA {used} GB         CA 2.0 GB         Max_CA 9 GB ",
            f"CPU Virtual Memory:  used = {used + 10} GB, percent = {used + 10}%",
            "MA 0.4 GB         Max_MA 0.5 GB         CA 2.0 GB         Max_CA 3 GB ",
            "CPU Virtual Memory:  used = 1.0 GB, percent = 1.0%",
        ]
    text = "".join(f"{line}\n" for block in blocks for line in block)
    log = read_log(write_log(text=text))
    assert [r.device_memory_gib for r in log.iterations] == [5.0, 7.0, 6.0, 1.0, 1.0]
    assert [r.host_memory_gib for r in log.iterations] == [15.0, 17.0, 16.0, 11.0, 11.0]


def test_binary_noise_is_not_a_log(tmp_path):
    path = tmp_path / "noise.log"
    path.write_bytes(bytes(range(256)) * 40)
    log = read_log(path)
    assert not log.recognised
    assert log.iterations == []


def test_unusable_logs_say_why(write_log, tmp_path, recipe):
    cases = {
        tmp_path / "absent.log": "no such file",
        tmp_path: "is a folder",
        write_log("empty.log", text=""): "is empty",
        write_log("poem.log", text="roses are red\n"): "not a training log",
        write_log("cut.log", text=recipe().text()[:200]): "no complete iteration",
    }
    for path, reason in cases.items():
        with pytest.raises(LogError, match=reason):
            read_usable_log(path)


def test_utf_16_is_refused_by_name(tmp_path, recipe):
    path = tmp_path / "log.log"
    path.write_bytes(recipe().text().encode("utf-16"))
    with pytest.raises(LogError, match="UTF-16 text; convert it to UTF-8"):
        read_usable_log(path)


def test_a_progress_bar_and_colours_change_nothing(write_log, recipe):
    lines = recipe().text().splitlines()
    bars = "".join(
        f"\r 40%|####      | 2/5 [00:01<00:02]\r\x1b[32m{line}\x1b[0m\n" for line in lines
    )
    glued = "".join(f" 40%|####      | 2/5 [00:01<00:02]{line}\n" for line in lines)
    expected = read_log(write_log()).iterations
    assert read_log(write_log("b.log", text=bars)).iterations == expected
    assert read_log(write_log("c.log", text=glued)).iterations == expected


def test_an_iteration_that_the_loss_scaler_skipped_has_no_loss(write_log, recipe):
    text = recipe(losses=(9.0, None, None)).text()
    lines = text.splitlines()
    at = [i for i, line in enumerate(lines) if "elapsed_time" in line]
    lines[at[1]] = lines[at[1]].replace("skipped iterations:   0", "skipped iterations:   1")
    log = read_log(write_log(text="\n".join(lines) + "\n"))
    assert log.iterations[1].loss is None
    assert math.isnan(log.iterations[2].loss)
    assert log.rejects == []


def test_zeros_of_a_power_cut_hide_an_iteration_and_move_none(write_log, recipe):
    whole = read_log(write_log()).iterations
    text = recipe().text()
    start = text.index("| consumed samples:            6")
    for size in (1, 300, 600, 900):
        damaged = text[:start] + "\0" * size + text[start + size :]
        log = read_log(write_log(text=damaged))
        known = {record.iteration: record for record in whole}
        assert 3 not in [record.iteration for record in log.iterations]
        assert all(record.loss == known[record.iteration].loss for record in log.iterations)
        assert log.rejects


def test_an_overlong_line_hides_an_iteration_and_moves_none(write_log, recipe):
    third = recipe().iteration_line(2)
    text = recipe().text().replace(third, third + " " * 2**20 + "end")
    log = read_log(write_log(text=text))
    assert numbers(log) == [1, 2, 4, 5]
    assert reasons(log) == ["a line of over 1048576 characters"]
    assert [r.update_ms for r in log.iterations] == [30.75, 31.75, 33.75, 34.75]


def test_the_mean_of_an_interval_is_an_iterations_time(write_log):
    lines = []
    for number in (10, 20, 30):
        lines.append(
            f" elapsed_time 5.000000 | consumed samples: {2 * number} |"
            f" consumed tokens: {128 * number} | elapsed time per iteration (ms): 500.0 |"
            " learning rate: 3.000E-04 | global batch size: 2 | lm loss: 9.0E+00 |"
            " loss scale: 1.0 | actual seqlen: 64 | TFLOPs: 2.50 |"
        )
    log = read_log(write_log(text="\n".join(lines) + "\n"))
    assert [r.iteration for r in log.iterations] == [10, 20, 30]
    assert seconds(log) == [0.5, 0.5, 0.5]


@pytest.mark.skipif(not AUTHORS.is_dir(), reason="the authors' logs are not here")
def test_every_log_of_the_authors_is_read_whole():
    logs = [read_log(path) for path in sorted(AUTHORS.rglob("*.log"))]
    assert len(logs) >= 17
    for log in logs:
        expected = 5 if "TP-motivation" in str(log.path) else 10
        assert len(log.iterations) == expected
        assert log.rejects == []
        assert log.notes == []
        assert all(r.iteration_s and r.update_ms and r.tflops for r in log.iterations)
        assert all(r.loss is not None for r in log.iterations)
