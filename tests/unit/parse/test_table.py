import pytest
from programs import parse_logs as main, report
from rows import rows

REQUIRED = [
    *("path", "model", "tp", "dp", "global_batch_size", "micro_batch_size", "offload_ratio"),
    *("subgroup_numel", "hog_share", "engine", "stride", "just_in_time", "iterations"),
    *("iteration_ms", "forward_ms"),
    *("backward_ms", "backward_inner_ms", "backward_allreduce_ms", "update_ms"),
    *("optimizer_step_ms", "tflops", "loss_first", "loss_last", "verdict", "parameters"),
]


def test_a_run_is_a_row_of_means_after_the_warm_up(write_log, tmp_path, capsys):
    name = (
        "log-7B-tp1-dp1-l2-h4-a2-sl64-gbs2-mbs1-ratio0.5-subg100-prefetch1-flush_async1-opt_gaps3"
    )
    log = write_log(f"{name}.log")
    assert main([str(log), "--out", str(tmp_path / "out"), "--warmup", "2"]) == 0
    (row,) = rows(tmp_path / "out" / "runs.csv")
    assert list(row)[: len(REQUIRED)] == REQUIRED
    assert row["path"] == str(log)
    assert (row["model"], row["engine"], row["stride"]) == ("7B", "stride", "3")
    assert (row["offload_ratio"], row["subgroup_numel"], row["iterations"]) == ("0.5", "100", "5")
    assert float(row["update_ms"]) == pytest.approx(33.75)
    assert float(row["optimizer_step_ms"]) == pytest.approx(28.5)
    assert float(row["iteration_ms"]) == pytest.approx(100 + 12.3456789 * 3)
    assert (row["loss_first"], row["loss_last"], row["verdict"]) == ("9.0", "8.0", "trains")
    assert (row["warmup_iterations"], row["timed_iterations"]) == ("2", "3")
    assert "1 runs, 5 iterations, 0 lines rejected" in capsys.readouterr().out


def test_iterations_keep_nan_and_unknown_losses_apart(write_log, tmp_path, recipe):
    text, _, end = recipe(losses=(9.0, None, None)).text().rpartition("skipped iterations:   0")
    text += "skipped iterations:   1" + end  # the loss scaler skipped the third
    main([str(write_log(text=text)), "--out", str(tmp_path)])
    table = rows(tmp_path / "iterations.csv")
    assert [row["loss"] for row in table] == ["9.0", "nan", ""]
    assert [row["warmup"] for row in table] == ["1", "0", "0"]
    assert [float(row["forward_ms"]) for row in table] == [10.25, 11.25, 12.25]


def test_lines_that_are_left_out_are_named_and_can_be_read(write_log, recipe, tmp_path, capsys):
    text = recipe().text()
    for loss in ("8.5", "8.25"):
        text = text.replace(f"lm loss: {loss}", f"lm loss: ={loss}\a", 1)
    path, out = write_log(text=text), tmp_path / "out"
    assert main([str(path), "--out", str(out)]) == 0
    printed, why = capsys.readouterr(), "an iteration line whose 'lm loss' cannot be read"
    assert "3 iterations, 2 lines rejected" in printed.out
    assert printed.err.splitlines() == [
        f"parse: {path}: iterations missing: 2 to 3",
        *(f"parse: {path}: line {line} left out: {why}" for line in (11, 16)),
    ]
    assert [row["rejects"] for row in rows(out / "runs.csv")] == ["2"]
    table = rows(out / "rejects.csv")
    assert [(row["line"], row["reason"]) for row in table] == [(n, why) for n in ("11", "16")]
    assert {row["path"] for row in table} == {str(path)}
    assert all("consumed samples" in row["text"] and "\a" not in row["text"] for row in table)
    assert main([str(write_log()), "--out", str(out)]) == 0
    assert not list(out.glob("rejects.*"))


def test_folders_are_searched_and_a_log_counts_once(write_log, tmp_path):
    write_log("logs/b/x.log", ranks=2)
    first = write_log("logs/a/x.log")
    write_log("logs/notes.log", text="shopping list\n")
    write_log("logs/a/ignored.txt")
    assert main([str(tmp_path / "logs"), str(first), "--out", str(tmp_path / "out")]) == 0
    found = [row["path"] for row in rows(tmp_path / "out" / "runs.csv")]
    assert found == [str(first), str(tmp_path / "logs" / "b" / "x.log")]


def test_under_a_sweep_only_its_runs_count(sweep_writer, tmp_path, write_log):
    folder = sweep_writer.write()
    write_log("a sweep/old/run-000/older.log")
    assert main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    table = rows(tmp_path / "out" / "runs.csv")
    assert [row["engine"] for row in table] == ["stock", "all-host", "stride"]
    assert [row["label"] for row in table] == [
        "tiny stock",
        "tiny all-host",
        "tiny stride 2",
    ]
    assert {row["device"] for row in table} == {"cpu"}
    assert {row["parameters"] for row in table} == {"12345"}
    assert folder.is_dir()


def test_tables_are_rebuilt_but_a_users_file_is_not_overwritten(write_log, tmp_path, capsys):
    log, out = str(write_log()), tmp_path / "out"
    assert main([log, "--out", str(out)]) == 0
    assert main([log, "--out", str(out)]) == 0
    for name in ("iterations.csv", "comparisons.csv", "study.json"):
        mine = tmp_path / name.replace(".", "-")
        mine.mkdir()
        (mine / name).write_text("my own")
        assert main([log, "--out", str(mine)]) == 2
        assert f"{name}: not a file of this parser" in capsys.readouterr().err
        assert [(path.name, path.read_text()) for path in mine.iterdir()] == [(name, "my own")]


def test_nothing_to_parse_is_one_line_and_exit_code_2(tmp_path, capsys):
    for path in (tmp_path, tmp_path / "absent"):
        assert main([str(path), "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert str(path) in error
    assert not (tmp_path / "out").exists()


def test_tables_are_not_written_into_a_file(write_log, tmp_path, capsys, recipe):
    file = tmp_path / "README.md"
    file.write_text("mine")
    log = write_log("run.log", text=recipe().text())
    assert main([str(log), "--out", str(file)]) == 2
    error = f"parse: error: {file}: is a file, where a folder is needed; give another one\n"
    assert capsys.readouterr().err.endswith(error)
    assert file.read_text() == "mine"


def test_memory_is_a_table(write_log, tmp_path, recipe):
    lines = [
        "Engine before forward",
        "MA 1.0 GB         Max_MA 2.5 GB         CA 3.0 GB         Max_CA 4 GB ",
        "CPU Virtual Memory:  used = 50.5 GB, percent = 25.3%",
    ]
    text = "".join(f"{line}\n" for line in lines) + recipe().text()
    log, out = write_log(text=text), tmp_path / "out"
    assert main([str(log), "--out", str(out)]) == 0
    assert rows(out / "memory.csv") == [
        {
            "path": str(log), "label": "unknown engine", "case": "", "engine": "",
            "iteration": "1", "line": "2", "title": "Engine before forward",
            "allocated_gib": "1.0", "max_allocated_gib": "2.5", "cached_gib": "3.0",
            "max_cached_gib": "4.0", "host_used_gib": "50.5", "host_percent": "25.3",
        }
    ]  # fmt: skip


def test_accumulation_and_rates_need_all_that_they_are_made_of(write_log, tmp_path):
    name = "log-7B-tp1-dp{}-l2-h4-a2-sl64-gbs2-mbs1-ratio1-subg100-prefetch0-flush_async0.log"
    logs = [str(write_log(name.format(dp), head=[])) for dp in (1, 2, 3)]
    main([*logs, "--out", str(tmp_path / "out")])
    table = rows(tmp_path / "out" / "runs.csv")
    assert [row["accumulation"] for row in table] == ["2", "1", ""]
    assert {row["update_rate"] for row in table} == {""}
    assert {row["repeat"] for row in table} == {""}
    assert {row["hog_share"] for row in table} == {""}


def test_a_run_of_which_nothing_is_timed_is_told(write_log, recipe, tmp_path, capsys):
    short = write_log("a/short.log")
    empty = write_log("b/empty.log", text="using world size: 1, data-parallel-size: 1\n")
    words = [str(short), str(empty), "--out", str(tmp_path / "t")]
    assert main([*words, "--warmup", "99"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        f"parse: {short}: all 5 iterations are warm-up (--warmup 99)",
        f"parse: {empty}: no iteration in it",
    ]
    main(words[:1] + words[2:])
    assert capsys.readouterr().err == ""


FAILING = {
    "diverged": (9.0, 9.5, 10.0, 10.5, 11.0, 11.5),
    "frozen": (9.0, 8.5, 8.0, 8.0, 8.0, 8.0),
    "nan": (9.0, 8.5, float("nan"), 8.0, 7.5, 7.0),
}
SECONDS = (9.0, 0.2, 0.205, 0.21, 0.215, 0.2075)


@pytest.mark.parametrize("word", FAILING)
def test_a_loss_that_fails_is_the_runs_status_and_an_exit_code(
    sweep_writer, tmp_path, capsys, word
):
    folder = sweep_writer.write(
        **{name: {"losses": FAILING[word], "seconds": SECONDS} for name in ("stock", "stride")}
    )
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.count(f"the loss is {word}") == 2
    table = {row["engine"]: row for row in rows(tmp_path / "out" / "runs.csv")}
    assert [table[name]["status"] for name in ("stock", "all-host", "stride")] == [
        word, "ok", word,
    ]  # fmt: skip
    # Its times were measured all the same, and stand in the tables.
    assert table["stride"]["timed_iterations"] == "5"
    (pair,) = (r for r in rows(tmp_path / "out" / "comparisons.csv")
               if (r["engine"], r["phase"]) == ("stride", "iteration"))  # fmt: skip
    assert float(pair["ratio"]) == pytest.approx(1.0)
    assert pair["speedup"] == ""
    assert f"the loss of stride is {word}" in pair["withheld"]
    assert report([str(folder)]) == 1
    assert f"loss: {word}" in capsys.readouterr().out
    assert (folder / "report.md").read_text().count(f"the loss is {word}") >= 2


def test_rates_go_by_the_median_so_that_one_stall_does_not_count(write_log, tmp_path):
    name = "log-7B-tp1-dp1-l2-h4-a2-sl64-gbs2-mbs1-ratio1-subg100-prefetch0-flush_async0.log"
    log = write_log(name, seconds=(0.1, 0.2, 0.2, 0.2, 9.0))
    text = log.read_text().replace("step: 33.75", "step: 933.75")
    head = "number of parameters on (tensor, pipeline) model parallel rank (0, 0): 1000\n"
    log.write_text(head + text)
    main([str(log), "--out", str(tmp_path / "out")])
    (row,) = rows(tmp_path / "out" / "runs.csv")
    assert float(row["iteration_median_ms"]) == 200
    assert float(row["iteration_ms"]) == pytest.approx(2400)
    assert float(row["samples_per_s"]) == pytest.approx(2 / 0.2)
    assert float(row["update_median_ms"]) == pytest.approx(33.75)
    assert float(row["update_rate"]) == pytest.approx(1000 / 0.03375)


def test_runs_name_their_point_and_what_models_of_one_name_differ_in(write_log, tmp_path):
    name = "log-7B-tp1-dp1-l{}-h4-a2-sl64-gbs2-mbs1-ratio1-subg100-prefetch0-flush_async0.log"
    logs = [str(write_log(f"{at}/{name.format(layers)}", prefix=f"{at}: ")) for at, layers in
            (("a", 2), ("b", 2), ("c", 3))]  # fmt: skip
    main([*logs, "--out", str(tmp_path / "out")])
    table = rows(tmp_path / "out" / "runs.csv")
    assert [row["model.layers"] for row in table] == ["2", "2", "3"]
    points = [row["point"] for row in table]
    assert points[0] == points[1] != points[2]


def test_a_reference_alone_that_fails_fails_the_report(sweep_writer, tmp_path, capsys):
    reference = ("stock", 0, {"losses": FAILING["diverged"], "seconds": SECONDS})
    folder = sweep_writer.write_runs([reference])
    assert report([str(folder)]) == 1
    assert "tiny stock: the loss is diverged (from 9.25 to 11.25" in capsys.readouterr().out
