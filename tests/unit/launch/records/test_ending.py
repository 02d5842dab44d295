import json
import subprocess

import pytest

from launch.records.run_folder import RunFolder, Status, disk_is_full


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB of its own."""
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system needs root")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def fill(path):
    with (path / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return


def status(path):
    return json.loads((path / "status.json").read_text())


def test_a_full_disk_still_gets_the_status(small_disk, capsys):
    folder = RunFolder(small_disk, "a.log")
    folder.write_status(Status("running"))
    assert not disk_is_full(small_disk)
    fill(small_disk)
    assert disk_is_full(small_disk)
    got = folder.record_end(Status("failed", 1, 2.5, "the words"))
    record = status(small_disk)
    assert (record["status"], record["exit_code"], record["seconds"]) == ("failed", 1, 2.5)
    assert record["cause"].startswith("the words; status.json could not be written: No space left")
    assert got.cause.startswith(record["cause"])
    assert "written in place" in capsys.readouterr().err
    assert sorted(path.name for path in small_disk.iterdir()) == ["filler", "status.json"]


def test_a_disk_that_became_read_only_is_said_and_survived(small_disk, capsys):
    folder = RunFolder(small_disk, "a.log")
    folder.write_status(Status("running"))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    got = folder.record_end(Status("ok", 0, 1.0))
    assert "Read-only file system" in got.cause
    assert status(small_disk)["status"] == "running"
    assert "Read-only file system" in capsys.readouterr().err


def test_a_folder_that_was_removed_is_said_and_survived(tmp_path, capsys):
    got = RunFolder(tmp_path / "gone", "a.log").record_end(Status("ok", 0, 1.0))
    assert got.status == "ok"
    assert "No such file" in capsys.readouterr().err


def test_nothing_is_said_when_all_is_well(tmp_path, capsys):
    given = Status("ok", 0, 1.0)
    assert RunFolder(tmp_path, "a.log").record_end(given) == given
    assert status(tmp_path)["status"] == "ok"
    assert capsys.readouterr().err == ""
    assert not disk_is_full(tmp_path / "gone")
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
