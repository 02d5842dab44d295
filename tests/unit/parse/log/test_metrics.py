import json

import pytest

from parse.log import read_log


def write_metrics(folder, losses, **end):
    events = [{"event": "start", "parameters": 42, "padded_vocab_size": 128, "num_ranks": 3}]
    events += [
        {"event": "iteration", "iteration": i, "loss": loss, "grad_norm": i / 8, "update_ms": 1.0}
        for i, loss in enumerate(losses, 1)
    ]
    events.append({"event": "end", "iterations": len(losses), **end})
    text = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "metrics.jsonl").write_text(text)


def test_exact_figures_are_attached(write_log, tmp_path):
    exact = [9.0000001, 8.5, 8.25, 8.125, 8.0]
    write_metrics(tmp_path, exact, weights_sha256="ab", optimizer_sha256=None)
    log = read_log(write_log())
    assert [r.exact_loss for r in log.iterations] == exact
    assert log.iterations[3].grad_norm == 0.5
    assert log.iterations[0].update_ms == 30.75
    assert (log.parameters, log.vocab_size, log.world_size) == (42, 128, 1)
    assert log.metrics.digest("weights_sha256") == "ab"
    assert log.metrics.digest("optimizer_sha256") is None


@pytest.mark.parametrize("losses", [[9.0, 8.5, 8.26, 8.125, 8.0], [9.0, 8.5, None, 8.125, 8.0], []])
def test_another_runs_metrics_are_left_out(write_log, tmp_path, losses):
    write_metrics(tmp_path, losses)
    if losses and losses[2] is None:
        text = (tmp_path / "metrics.jsonl").read_text().replace("null", 'null, "loss_text": "nan"')
        (tmp_path / "metrics.jsonl").write_text(text)
    log = read_log(write_log())
    assert log.metrics is None
    assert log.notes == ["metrics.jsonl beside log.log does not fit it; left out"]
    assert log.iterations[0].exact_loss is None


def test_damaged_lines_are_left_out_and_counted(write_log, tmp_path):
    write_metrics(tmp_path, [9.0, 8.5, 8.25, 8.125, 8.0])
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[3] = lines[3][:20]
    path.write_text("\n".join([*lines, "[" * 100_000, '"start"', "\0\ufffd"]) + "\n")
    log = read_log(write_log())
    assert log.iterations[2].exact_loss is None
    assert log.iterations[3].exact_loss == 8.125
    assert log.notes == ["metrics.jsonl: 4 unreadable lines left out"]


def test_evaluations_are_kept_and_are_no_iterations(write_log, tmp_path):
    write_metrics(tmp_path, [9.0, 8.5, 8.25, 8.125, 8.0])
    path = tmp_path / "metrics.jsonl"
    evaluation = {"event": "evaluation", "iteration": 2, "loss": 8.75, "perplexity": 6310.5}
    path.write_text(path.read_text() + json.dumps(evaluation) + "\n")
    log = read_log(write_log())
    assert log.notes == []
    assert log.metrics.evaluations == [evaluation]
    assert log.iterations[1].exact_loss == 8.5
