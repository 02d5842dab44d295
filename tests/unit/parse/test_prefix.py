"""A line reads the same whoever's prefix stands before it, and nothing else is taken for one."""

import pytest

from parse.log import read_log
from parse.prefix import split_prefix

PREFIXES = [
    "[rank3]: ",
    "[default0]:",
    "[default7]:[rank7]: ",
    "[trainer1]:",
    "[1,0]<stdout>:",
    "[prterun-head-812@1,3]<stderr>: ",
    "0: ",
    " 3: ",
    "localhost: ",
    "192.168.1.2: ",
    "node-1: ",
    "gpu12.cluster: ",
    "DGX-01: [rank0]: ",
    "worker_1  | ",
    "[pod/worker-0/train] ",
    "(RayTrainWorker pid=123, ip=10.0.0.1) ",
]
STAMPS = ["2026-07-01T12:00:01.123456Z ", "2026-07-01T12:00:01+00:00 ", "[2026-07-01T12:00:01] "]
TEXTS = [
    '  File "/w/train.py", line 3, in main',
    "Traceback (most recent call last):",
    "torch.OutOfMemoryError: CUDA out of memory.",
    "{'loss': 2.0, 'grad_norm': 1.0}",
    " iteration       10/     100 | consumed samples:           40 | lm loss: 2.0E+00 |",
    "[2026-07-01 12:00:01,123] [INFO] [logging.py:107:log_dist] [Rank 0] step=10, skipped=7",
]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("stamp", ["", *STAMPS])
def test_a_prefix_is_split_off_and_a_time_stamp_left_out(prefix, stamp):
    for text in TEXTS:
        assert split_prefix(stamp + prefix + text) == (prefix, text)


@pytest.mark.parametrize(
    ("line", "split"),
    [
        ("2026-07-01T12:00:01Z gpu12 text", ("gpu12 ", "text")),
        ("2026-07-01T12:00:01.5Z text", ("", "text")),
        ("2026-07-01 12:00:01 node-1: text", ("node-1: ", "text")),
        ("Jul  1 12:00:01 node-1 train[123]: text", ("node-1 train[123]: ", "text")),
        (" (RayTrainWorker pid=12)  text", (" (RayTrainWorker pid=12)  ", "text")),
        (" trainer_1  |  text", (" trainer_1  |  ", "text")),
        ("ubuntu: RuntimeError: no", ("ubuntu: ", "RuntimeError: no")),
        (
            "ubuntu: [2026-07-01 12:00:01,123] [INFO]",
            ("ubuntu: ", "[2026-07-01 12:00:01,123] [INFO]"),
        ),
    ],
)
def test_other_prefixes(line, split):
    assert split_prefix(line) == split


@pytest.mark.parametrize(
    "text",
    [
        *TEXTS,
        "ValueError: zip() argument 2 is longer than argument 1",
        "urllib3.exceptions.MaxRetryError: no route",
        "step1: loss 2.0",
        "bf16: true",
        "adam_beta1: 0.9",
        "sh: 1: c++: not found",
        "cc1plus: fatal error: no space",
        "libcudart.so.11.0: cannot open shared object file",
        "train2.py: error: unrecognized arguments",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.",
        "2026-07-01 12:00:01,123 INFO started",
        " 10%|#         | 10/100 [00:01<00:09,  9.9it/s]",
        "",
    ],
)
def test_a_programs_own_words_are_no_prefix(text):
    assert split_prefix(text) == ("", text)


@pytest.mark.parametrize("prefix", ["192.168.0.7: ", "[default3]:", "0: "])
def test_figures_and_arguments_are_read_behind_a_prefix(tmp_path, prefix):
    path = tmp_path / "run.log"
    lines = [
        "  hidden_size ..................... 64",
        *(
            f" iteration {at:8}/ 100 | consumed samples: {4 * at} |"
            f" elapsed time per iteration (ms): 9.5 | global batch size: 4 |"
            f" lm loss: {3 - 0.1 * at:.6E} |"
            for at in range(1, 4)
        ),
    ]
    path.write_text("".join(f"{prefix}{line}\n" for line in lines))
    log = read_log(path)
    assert log.settings["hidden"] == 64
    assert [record.loss for record in log.iterations] == pytest.approx([2.9, 2.8, 2.7])
