"""Logs that are packed, and what makes two files one log."""

import bz2
import gzip
import lzma

import pytest

from parse.lines import read_lines
from parse.log import read_log
from parse.records import LogError
from parse.run import find_logs

PACKS = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
NAME = "log-7B-tp1-dp1-l2-h4-a2-sl64-gbs2-mbs1-ratio1-subg100-prefetch0-flush_async0-opt_gaps0.log"


@pytest.mark.parametrize("ending", PACKS)
def test_a_packed_log_says_the_same_as_the_log(write_log, ending):
    path = write_log(NAME)
    packed = path.with_name(f"{NAME}{ending}")
    packed.write_bytes(PACKS[ending](path.read_bytes()))
    unnamed = path.with_name("stdout")
    unnamed.write_bytes(packed.read_bytes())
    plain, found = read_log(path), read_log(packed)
    assert plain.iterations
    assert found.iterations == plain.iterations == read_log(unnamed).iterations
    assert found.settings == plain.settings
    assert found.settings["engine"] == "stock"
    assert found.digest == plain.digest
    assert find_logs(path.parent) == [path, packed]


@pytest.mark.parametrize("ending", PACKS)
def test_a_packed_log_that_is_cut_off_gives_its_first_iterations(write_log, ending):
    path = write_log(losses=tuple(9.0 - 0.001 * i for i in range(3000)))
    data = PACKS[ending](path.read_bytes())
    # bzip2 packs in blocks of 900 kB; less than one cannot be unpacked.
    path.write_bytes(data[: -len(data) // 8])
    log = read_log(path)
    assert 100 < len(log.iterations) < 3000
    assert log.ends_mid_line
    path = path.with_name(f"log.log{ending}")
    path.write_bytes(data[:30])
    with pytest.raises(LogError, match=rf"log.log{ending}: is damaged: .*; get it again"):
        read_log(path)


@pytest.mark.parametrize("begin", [b"BZh", b"\x1f\x8b\x08", b"\xfd7zXZ\x00"])
def test_a_text_that_begins_like_a_packed_file_is_a_text(write_log, begin):
    path = write_log()
    count = len(read_log(path).iterations)
    path.write_bytes(begin + b"\n" + path.read_bytes())
    assert len(read_log(path).iterations) == count


def test_what_the_standard_library_cannot_unpack_is_named(tmp_path):
    (tmp_path / "x.log.zst").write_bytes(b"\x28\xb5\x2f\xfd\x00\x00")
    with pytest.raises(LogError, match="is packed by zstd; unpack it with `zstd -d`"):
        list(read_lines(tmp_path / "x.log.zst"))


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ("a\r\nb\r\n", True),
        ("a\nb", True),
        ("a\nb\n\n \n", True),
        ("a\n\nb\n", False),
        ("ab", False),
    ],
)
def test_ends_of_lines_do_not_make_another_log(write_log, other, same):
    first, second = write_log("a.log", text="a\nb\n"), write_log("b.log", text=other)
    assert (read_log(first).digest == read_log(second).digest) is same


def test_trainers_files_are_found_and_of_checkpoints_the_last(tmp_path):
    def write(*names):
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("")

    write("a/trainer_log.jsonl", "a/run.log", "a/config.json", "a/checkpoint-5/trainer_state.json",
          "a/checkpoint-40/trainer_state.json", "a/checkpoint-40/x.log")  # fmt: skip
    found = [path.relative_to(tmp_path / "a").as_posix() for path in find_logs(tmp_path)]
    last = ["checkpoint-40/trainer_state.json", "checkpoint-40/x.log"]
    assert found == [*last, "run.log", "trainer_log.jsonl"]
    write("a/trainer_state.json")
    found = [path.relative_to(tmp_path / "a").as_posix() for path in find_logs(tmp_path)]
    assert found == ["run.log", "trainer_log.jsonl", "trainer_state.json"]
