import json

import pytest
from programs import parse_logs as main

from parse.monitor import is_monitor_csv, read_samples

HEADER = "device_id,timestamp(ns),txpci,rxpci,gpu_util,mem_util,mem_used,mem_free\n"
ROWS = "0,5000000000,12,7,55,20,1048576,2097152\n1,5500000000,0,3,100,40,4096,8192\n"


def named(sample):
    return {name: value for name, value in sample.items() if value is not None}


def test_the_papers_csv_is_read_in_our_units(tmp_path):
    path = tmp_path / "m.csv"
    path.write_text(HEADER + ROWS)
    samples, damaged = read_samples(path)
    assert damaged == 0
    assert named(samples[0]) == {
        "time_s": 0.0, "device_id": 0, "gpu_util_percent": 55, "gpu_memory_used_bytes": 1048576,
        "pcie_tx_bytes_per_s": 12_000, "pcie_rx_bytes_per_s": 7_000,
        "gpu_memory_free_bytes": 2097152, "gpu_memory_util_percent": 20,
    }  # fmt: skip
    assert named(samples[1])["time_s"] == 0.5


@pytest.mark.parametrize(
    "line", ["0,1,2\n", "x,6000000000,1,1,1,1,1,1\n", "0,,1,1,1,1,1,1\n", "\0\n"]
)
def test_damaged_lines_of_the_csv_are_counted(tmp_path, line):
    path = tmp_path / "m.csv"
    path.write_text(HEADER + ROWS + line + "0,7000000000,,1,x,1,1,1")
    samples, damaged = read_samples(path)
    assert (len(samples), damaged) == (3, 1)
    assert named(samples[2])["time_s"] == 2.0
    assert "pcie_tx_bytes_per_s" not in named(samples[2])


def test_the_runs_own_memory_is_told_from_the_machines(tmp_path):
    row = {"time_s": 1.5, "host_used_bytes": 10, "host_pss_bytes": 8, "machine_used_bytes": 90,
           "gpu_memory_used_bytes": 70, "gpu_memory_run_bytes": 60}  # fmt: skip
    path = tmp_path / "monitor.jsonl"
    path.write_text(json.dumps(row) + "\n")
    ((sample,), _) = read_samples(path)
    assert named(sample) == row


def test_our_samples_keep_what_they_have(tmp_path):
    row = {"time_s": 1.5, "host_used_bytes": 10, "host_free_bytes": 2**40, "cpu_percent": 12.5,
           "device_id": None, "gpu_util_percent": None, "gpu_memory_used_bytes": "many",
           "pcie_tx_bytes_per_s": True}  # fmt: skip
    path = tmp_path / "monitor.jsonl"
    lines = [
        json.dumps(row),
        "{",
        "[1]",
        "",
        '{"time_s": null}',
        "[" * 100_000,
        '{"time_s": 1e999}',
    ]
    path.write_text("\n".join(lines) + "\n")
    samples, damaged = read_samples(path)
    assert damaged == 5
    assert [named(sample) for sample in samples] == [
        {"time_s": 1.5, "host_used_bytes": 10, "host_free_bytes": 2**40, "cpu_percent": 12.5}
    ]
    assert read_samples(tmp_path / "absent.jsonl") == ([], 0)


def test_a_csv_is_the_monitors_by_its_first_line(tmp_path):
    for name, text, is_one in (
        ("a.csv", HEADER, True),
        ("b.csv", "path,label\n", False),
        ("c.txt", HEADER, False),
    ):
        (tmp_path / name).write_text(text)
        assert is_monitor_csv(tmp_path / name) is is_one
    assert not is_monitor_csv(tmp_path / "absent.csv")


def monitor_rows(out):
    path = out / "monitor.csv"
    return path.read_text().splitlines()[1:] if path.exists() else []


def test_samples_belong_to_the_log_beside_them(write_log, tmp_path, capsys):
    log = write_log("one/a.log")
    (tmp_path / "one" / "gpu.csv").write_text(HEADER + ROWS)
    out = tmp_path / "out"
    assert main([str(log), "--out", str(out)]) == 0
    assert [row.split(",")[0] for row in monitor_rows(out)] == [str(log)] * 2
    write_log("one/b.log")  # now nobody knows whose samples they are
    assert main([str(log), "--out", str(out)]) == 0
    assert monitor_rows(out) == []
    assert not (out / "monitor.parquet").exists()
    (tmp_path / "one" / "gpu.csv").rename(tmp_path / "one" / "b.csv")
    assert main([str(tmp_path / "one"), "--out", str(out)]) == 0
    assert [row.split(",")[0] for row in monitor_rows(out)] == [str(tmp_path / "one/b.log")] * 2


def test_a_run_folder_has_its_samples(sweep_writer, tmp_path):
    folder = sweep_writer.write()
    run_dir = next(folder.glob("*opt_gaps2/run-001"))
    (run_dir / "monitor.jsonl").write_text('{"time_s": 0.5, "host_used_bytes": 7}\nbroken\n')
    out = tmp_path / "out"
    assert main([str(folder), "--out", str(out)]) == 0
    (row,) = monitor_rows(out)
    assert row.endswith(",tiny hybrid stride 2,tiny,hybrid,0.5,7,,,,,,,,,,,,")
