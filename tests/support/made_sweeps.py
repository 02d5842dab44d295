"""Sweep folders of the study of peers, as launch and the trainer leave them, with made-up runs."""

import json

from configs.study import load_study


def write_sweep(folder, runs):
    """Write a sweep's index and run folders.

    Args:
        folder: Of the sweep; made here.
        runs: Of each its engine, fields of its point, its status and the losses of its iterations,
            and how long these lasted, in seconds.

    Returns:
        The points.
    """
    study, points, entries = load_study("peers"), [], []
    for engine, fields, status, losses, seconds in runs:
        point = study.make_point({"model": "1.3B", "dp": 1, "engine": engine, **fields})
        run_dir = folder / f"log-{engine}" / "run-001"
        run_dir.mkdir(parents=True)
        run = {"study": study.as_table(), "point": point.model_dump(mode="json")}
        run |= {"log": "a.log", "metrics": "metrics.jsonl"}
        (run_dir / "run.json").write_text(json.dumps(run))
        (run_dir / "status.json").write_text(json.dumps({"status": status}))
        head = "using world size: 1, data-parallel-size: 1\n"
        lines = "".join(map(_lines, range(1, 1 + len(losses)), losses, seconds))
        (run_dir / "a.log").write_text(head + lines)
        events = [
            {"event": "iteration", "iteration": number, "loss": loss, "grad_norm": 1.0}
            for number, loss in enumerate(losses, start=1)
        ]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
        entry = {"name": engine, "engine": engine, "repeat": 1, "log": "a.log", "status": status}
        entries.append({**entry, "run_dir": f"log-{engine}/run-001"})
        points.append(point)
    index = {"study": study.as_table(), "name": folder.name, "runs": entries}
    (folder / "sweep.json").write_text(json.dumps(index))
    return points


def _lines(number, loss, seconds):
    """What the trainer writes of an iteration, with 0.3, 0.2 and 0.4 s of its phases."""
    return (
        "[Rank 0] time (ms) | fwd: 300.00 | bwd: 200.00 | bwd_inner: 150.00 | "
        "bwd_allreduce: 50.00 | step: 400.00\n"
        f"<TIMER:interval-time,{seconds!r}>\n"
        f" elapsed_time {seconds:.6f} | consumed samples: {4 * number} |"
        f" consumed tokens: {8192 * number} |"
        f" elapsed time per iteration (ms): {seconds * 1000:.1f} | learning rate: 3.000E-04 |"
        f" global batch size: 4 | lm loss: {loss:.6E} | loss scale: 1.0 | actual seqlen: 2048 |"
        " number of skipped iterations: 0 | number of nan iterations: 0 |"
        " samples per second: 1.000 | TFLOPs: 2.50 |\n"
    )
