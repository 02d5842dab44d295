"""One row of ``make bench-gpu`` in a process of its own: trains, times, fingerprints.

``python -m benchmarks.gpu_worker JOB.json RESULT.json``; the job is what :class:`Job` holds. An
error is a result as well. Started by :mod:`benchmarks.gpu`.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.host_engines import free_port
from configs.schema import Point

if TYPE_CHECKING:
    import torch

LOG_TAIL = 300
"""Characters of an error."""


@dataclass(frozen=True)
class Job:
    """What to run.

    Attributes:
        point: Model, batch and seed.
        ds_config: The row's DeepSpeed config.
        warm_up: First iterations, which do not count.
        ends_update: Whether the update is over when ``step()`` returns.
        zero_init: Whether the model is partitioned while it is made.
    """

    point: Point
    ds_config: dict[str, Any]
    warm_up: int
    ends_update: bool
    zero_init: bool = True


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Train ``job.point.iterations`` iterations; returns times, losses, fingerprints and memory."""
    from launch.trainer.plugin import plugin_installed
    from launch.trainer.ranks import Ranks
    from launch.trainer.runfile import RunFile
    from launch.trainer.runtime import distributed

    ranks = Ranks(0, 0, 1, "127.0.0.1", free_port())
    ranks.export(os.environ)
    paths = (folder / "data", folder / "metrics.jsonl")
    run_file = RunFile(folder, job.point, job.ds_config, *paths)
    with distributed(job.point, ranks) as device, plugin_installed(run_file):
        begin = time.perf_counter()
        engine, parameters = _set_up(run_file, device, job.zero_init)
        set_up_s = time.perf_counter() - begin
        found = _train(job, engine, device)
        from benchmarks.state import digests

        found |= {"set_up_s": set_up_s, "parameters": parameters, "digests": digests(engine)}
        found["device_share"] = getattr(engine.optimizer, "device_share", None)  # stock has none
        return found | _memory(device)


def _set_up(run_file: Any, device: torch.device, zero_init: bool) -> tuple[Any, int]:  # noqa: ANN401
    from launch.trainer import model as trainer_model

    mpu = trainer_model.ParallelState()
    if zero_init:
        model = trainer_model.build_model(run_file, mpu, device)
    else:
        model = _whole_model(run_file.point, device)
    parameters = trainer_model.num_local_parameters(model)
    engine = trainer_model.initialize_engine(run_file, model, mpu)
    _synchronize(device)
    return engine, parameters


def _whole_model(point: Point, device: torch.device) -> Any:  # noqa: ANN401
    import torch

    from launch.trainer.model import make_gpt, rotary_frequencies

    model = make_gpt(point, on_cpu=device.type == "cpu").to(device, torch.bfloat16)
    model.rotary_pos_emb.inv_freq = rotary_frequencies(point.model, device)
    return model


def _train(job: Job, engine: Any, device: torch.device) -> dict[str, Any]:  # noqa: ANN401
    """Iterations of one sample each, the same in every row.

    An iteration lasts from the end of the one before to its own. Where the update goes on after
    ``step()``, nothing waits for it there: one is in flight when the clock starts, one when it
    stops.
    """
    losses, iteration_s, phases = [], [], []
    last = time.perf_counter()
    for number in range(1, job.point.iterations + 1):
        tokens, positions = _sample(job.point, number, device)
        begin = time.perf_counter()
        batch = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
        loss = engine(position_ids=positions, attention_mask=None, **batch).mean()
        engine.backward(loss)
        if job.ends_update:
            _synchronize(device)
        middle = time.perf_counter()
        engine.step()
        if job.ends_update:
            _synchronize(device)
        losses.append(float(loss).hex())
        end = time.perf_counter()
        if number > job.warm_up:
            iteration_s.append(end - last)
            phases.append((middle - begin, end - middle))
        last = end
    timed = job.ends_update
    return {
        "losses": losses,
        "iteration_s": iteration_s,
        "compute_s": [compute for compute, _ in phases] if timed else None,
        "update_s": [update for _, update in phases] if timed else None,
    }


def _sample(point: Point, number: int, device: torch.device) -> tuple[Any, Any]:
    """Tokens, (1, sequence + 1), and positions, (1, sequence), of one iteration."""
    import torch

    length = point.model.seq_length
    generator = torch.Generator().manual_seed(point.seed + number)
    tokens = torch.randint(point.model.vocab_size, (1, length + 1), generator=generator)
    return tokens.to(device), torch.arange(length, device=device).expand(1, length)


def _synchronize(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def _memory(device: torch.device) -> dict[str, Any]:
    import torch

    on_device = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    resident = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"device_bytes": on_device, "resident_bytes": resident}


def explain(error: BaseException) -> str:
    """The reason in a line; memory that ran out is called that."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    said = str(error).lower()
    is_memory = isinstance(error, MemoryError) or "out of memory" in said or "alloc" in said
    return f"out of memory: {text}"[:LOG_TAIL] if is_memory else text[:LOG_TAIL]


def main(argv: list[str]) -> int:
    """Run the job of one file and write its result to another."""
    job_path, result_path = map(Path, argv)
    # When memory runs out, this process is to go, not the user's others.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    table = json.loads(job_path.read_text(encoding="utf-8"))
    job = Job(**{**table, "point": Point(**table["point"])})
    status = 0
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = run(job, Path(folder))
    except Exception as error:  # noqa: BLE001 - the row says why, the others go on
        import traceback

        traceback.print_exc()
        result, status = {"error": explain(error)}, 1
    result_path.write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    os._exit(status)  # helpers of DeepSpeed's would keep the process, gloo may abort it


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
