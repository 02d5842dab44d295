"""Titles of DeepSpeed's memory lines, with lines of others in between."""

import pytest

from parse.log import read_log

HEAD = "[2031-01-01 00:00:00,{:03}] [INFO] [utils.py:800:see_memory_usage] "
DEVICE = "MA {} GB         Max_MA 2.5 GB         CA 3.0 GB         Max_CA 3 GB "
HOST = "CPU Virtual Memory:  used = {} GB, percent = 4.0%"
OTHERS = [
    "Adam Optimizer #0 is created with AVX512 arithmetic capability.",
    "Installed CUDA version 12.0 does not match the version torch was compiled with 12.8",
    "[Gloo] Rank 3 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3",
    "  0%|          | 0/743 [00:00<?, ?it/s]",
    "x/trainer.py:7: UserWarning: call it before the loop",
    "2031-01-01 00:00:00 | INFO | after the start",
    "[after dataloaders are built] datetime: 2031-01-01 00:00:00",
    "building GPT model ...",
    "CPU Virtual Memory:  used = 1.0 GB, percent = 1.0%",
]


def rows(write_log, lines):
    return [
        (row["title"], row["allocated_gib"], row.get("host_used_gib"))
        for row in read_log(write_log(text="".join(f"{line}\n" for line in lines))).memory
        if "allocated_gib" in row
    ]


def written(*texts):
    return [HEAD.format(number) + text for number, text in enumerate(texts)]


def test_lines_of_others_come_between_without_taking_the_title_away(write_log):
    title, device, host = written("Engine after step", DEVICE.format(1.0), HOST.format(7.0))
    lines = [title, *OTHERS[:4], device, *OTHERS[:4], host]
    assert rows(write_log, lines) == [("Engine after step", 1.0, 7.0)]
    far = [title, *OTHERS[:1] * 99, device]
    assert rows(write_log, far) == [(None, 1.0, None)]


def test_each_rank_gets_its_own_title_and_host(write_log):
    first, second = (
        written(title, DEVICE.format(n), HOST.format(n + 7.0))
        for n, title in ((1.0, "Before forward"), (2.0, "After forward"))
    )
    hosts = [f"worker-0: {line}" for line in first], [f"worker-1: {line}" for line in second]
    woven = [line for pair in zip(*hosts, strict=True) for line in pair]
    expected = [("Before forward", 1.0, 8.0), ("After forward", 2.0, 9.0)]
    assert rows(write_log, woven) == expected
    same = [
        line.replace("After", "Before") for pair in zip(first, second, strict=True) for line in pair
    ]
    assert [row[0] for row in rows(write_log, same)] == ["Before forward"] * 2
    # Which of two titles is whose is not known without a word of the host.
    woven = [line for pair in zip(first, second, strict=True) for line in pair]
    assert [row[0] for row in rows(write_log, woven)][1] != "After forward"


def test_a_title_whose_figures_are_lost_is_not_given_to_others(write_log):
    lost, title, device = written("Before forward", "After forward", DEVICE.format(1.0))
    lines = [lost, title, device, *OTHERS[:1], device]
    assert rows(write_log, lines) == [("After forward", 1.0, None), (None, 1.0, None)]


@pytest.mark.parametrize(
    "glued",
    [
        "{0}Engine after step[2031-01-01 00:00:00,001] [INFO] [x.py:1:y] more",
        "{0}Engine after step<TIMER:interval-time,1.0>",
        "  0%|   | 0/743 [00:00<?, ?it/s]{0}Engine after step",
    ],
)
def test_what_is_printed_in_the_same_line_is_no_part_of_the_title(write_log, glued):
    (device,) = written(DEVICE.format(1.0))
    assert rows(write_log, [glued.format(HEAD.format(0)), device])[0][0] == "Engine after step"


@pytest.mark.parametrize(
    "title",
    ["Engine after step", "DeepSpeedZeRoOffload initialize [begin]", "Rank=0, after batch"],
)
@pytest.mark.parametrize(
    ("one", "other"),
    [("", ""), ("12:00:01,007 - INFO - ", "12:00:01,013 - INFO - "),
     ("  0%|      | 0/50 [00:00<?, ?it/s]", ""),
     ("Epoch 0: 1%| | 7/743 [00:22<31:07, 2.5s/it]", "")],
)  # fmt: skip
def test_titles_without_a_word_of_their_writer(write_log, title, one, other):
    lines = [f"{one}{title}", f"{other}{DEVICE.format(1.0)}", f"{other}{HOST.format(7.0)}"]
    assert rows(write_log, lines) == [(title, 1.0, 7.0)]


@pytest.mark.parametrize("other", OTHERS)
def test_another_line_is_no_title(write_log, other):
    assert rows(write_log, [other, DEVICE.format(1.0)]) == [(None, 1.0, None)]
    (device,) = written(DEVICE.format(1.0))
    assert rows(write_log, [*written(other) * ("GB" in other), other, device])[-1][0] is None
