import json

import pytest

from launch.process.watch import Live, Tail, duration_text, progress_text


def test_a_growing_file_is_read_piece_by_piece(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.look() is None
    line = json.dumps({"event": "iteration", "iteration": 1, "loss": 9.0})
    path.write_text('{"event": "start"}\n' + line[:10])
    assert tail.look() is None
    with path.open("a") as file:
        file.write(line[10:] + "\nnoise\n")
    assert tail.look()["iteration"] == 1
    with path.open("a") as file:
        file.write(line.replace("1,", "2,", 1) + "\n")
    assert tail.look()["iteration"] == 2


@pytest.mark.parametrize(
    ("newest", "text"),
    [
        (None, "starting"),
        (
            {"iteration": 7, "iteration_ms": 251.0, "loss": 8.12345},
            "iteration 7 of 20, 0.251 s each, loss 8.1235",
        ),
        (
            {"iteration": 7, "loss": None, "loss_text": "nan"},
            "iteration 7 of 20, loss nan",
        ),
    ],
)
def test_progress_says_what_is_known(newest, text):
    assert progress_text(newest, 20) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(8.4, "8 s"), (89, "89 s"), (720, "12 min"), (12_000, "3 h 20 min")]
)
def test_durations_have_a_unit_that_fits(seconds, text):
    assert duration_text(seconds) == text


def test_the_time_left_counts_this_point_down_to_nothing():
    live = Live("[1/3] x", 20, others_s=100.0, point_s=30.0)
    assert live.text(None, 10.0).endswith("the sweep needs about 2 min more")
    assert live.text(None, 999.0).endswith("the sweep needs about 2 min more")
    assert Live("[1/3] x", 20, 60.0, 30.0).text(None, 10.0).endswith("about 80 s more")
    assert Live("[1/3] x", 20, None, None).text(None, 10.0) == "[1/3] x: starting"
