"""Small logs and sweeps in the shapes that the trainer writes."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SEQ_LENGTH = 64
LOSSES = (9.0, 8.5, 8.25, 8.125, 8.0)


@dataclass
class Recipe:
    """What goes into a log; every iteration i (from 0) has phases of 10 + i, 20 + i, 30 + i ms."""

    losses: tuple[float | None, ...] = LOSSES
    seconds: tuple[float, ...] = ()
    ranks: int = 1
    batch: int = 2
    prefix: str = ""
    head: list[str] = field(default_factory=lambda: ["using world size: 1, data-parallel-size: 1"])

    def time(self, index: int) -> float:
        return self.seconds[index] if self.seconds else 0.1 + 0.0123456789 * index

    def blocks(self) -> list[list[str]]:
        return [self.head, *(self.block(index) for index in range(len(self.losses)))]

    def block(self, index: int) -> list[str]:
        ranks = [self.time(index) + 0.001 * rank for rank in range(self.ranks - 1, -1, -1)]
        return [
            f"[Rank 0] time (ms) | optimizer_step: {25 + index}.50",
            "[Rank 0] time (ms) | fwd_microstep: 1.00 | bwd_microstep: 2.00 | "
            "bwd_inner_microstep: 1.50 | bwd_allreduce_microstep: 0.50 | step_microstep: 3.00",
            f"[Rank 0] time (ms) | fwd: {10 + index}.25 | bwd: {20 + index}.00 | "
            f"bwd_inner: {15 + index}.00 | bwd_allreduce: 5.00 | step: {30 + index}.75",
            *(f"<TIMER:interval-time,{seconds!r}>" for seconds in ranks),
            self.iteration_line(index),
        ]

    def iteration_line(self, index: int) -> str:
        samples = (index + 1) * self.batch
        loss, seconds = self.losses[index], self.time(index)
        shown = "" if loss is None else f" lm loss: {loss:.6E} |"
        return (
            f" elapsed_time {seconds:.6f} | consumed samples: {samples:12d} |"
            f" consumed tokens: {samples * SEQ_LENGTH:12d} |"
            f" elapsed time per iteration (ms): {seconds * 1000:.1f} |"
            f" learning rate: 3.000E-04 | global batch size: {self.batch:5d} |{shown}"
            f" loss scale: 1.0 | actual seqlen: {SEQ_LENGTH:5d} |"
            " number of skipped iterations:   0 | number of nan iterations:   0 |"
            " samples per second: 1.000 | TFLOPs: 2.50 |"
        )

    def text(self) -> str:
        lines = [line for block in self.blocks() for line in block]
        return "".join(f"{self.prefix}{line}\n" for line in lines)


@pytest.fixture
def write_log(tmp_path):
    def write(name="log.log", recipe=None, text=None, **fields):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((recipe or Recipe(**fields)).text() if text is None else text)
        return path

    return write


ENGINES = (("stock", 0), ("all-host", 0), ("stride", 2))


@dataclass
class SweepWriter:
    """A sweep folder of three engines on the CPU, as launch and the trainer leave it."""

    folder: Path
    device: str = "cpu"

    def write(self, engines=ENGINES, **changes) -> Path:
        """``changes``: engine to a dict of run fields (losses, norms, digest, status, cause)."""
        return self.write_runs([(e, stride, changes.get(e, {})) for e, stride in engines])

    def write_runs(self, runs, **index) -> Path:
        """``runs``: engine, stride and changed fields of each; ``index``: more of sweep.json."""
        self.study = index.get("study")
        runs = [self._run(engine, stride, **fields) for engine, stride, fields in runs]
        index = {"schema_version": 1, "name": "small | sweep", "description": "", **index}
        index["runs"] = runs
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "sweep.json").write_text(json.dumps(index))
        return self.folder

    def _run(self, engine, stride, **changes):
        fields = {"losses": LOSSES, "norms": None, "digest": "aa", "log": True}
        fields |= {"status": "ok", "cause": "", "seconds": (), "repeat": None, "last_lines": []}
        fields |= {"point": {}, "provenance": {}, "measured": {}, "evaluations": ()}
        fields |= changes
        losses = fields["losses"]
        on = int(engine == "stride")
        stem = (
            f"log-tiny-tp1-dp1-l2-h64-a4-sl64-gbs2-mbs{fields['point'].get('micro_batch_size', 1)}"
            f"-ratio1-subg{fields['point'].get('subgroup_numel', 1_000_000)}"
            f"-prefetch{on}-flush_async{int(engine != 'stock')}-opt_gaps{stride}"
        )
        if engine not in dict(ENGINES):
            stem += f"-engine_{engine}"
        if "seed" in fields["point"]:
            stem += f"-seed{fields['point']['seed']}"
        run = self.folder / stem / f"run-{fields['repeat'] or 1:03}"
        run.mkdir(parents=True)
        if fields["log"]:
            # No two real logs are the same.
            text = f"{Recipe(losses, fields['seconds']).text()}the run's folder is {run}\n"
            (run / f"{stem}.log").write_text(text)
            self._metrics(run / "metrics.jsonl", engine, fields)
        status = {"status": fields["status"], "seconds": 1.5, "cause": fields["cause"]}
        status["last_lines"] = fields["last_lines"]
        (run / "status.json").write_text(json.dumps(status))
        point = {
            "model": {"name": "tiny", "layers": 2, "hidden": 64, "heads": 4, "seq_length": 64},
            "engine": engine, "stride": stride, "tp": 1, "dp": 1, "global_batch_size": 2,
            "micro_batch_size": 1, "offload_ratio": 1.0, "subgroup_numel": 1_000_000, "seed": 1,
            **fields["point"],
        }  # fmt: skip
        provenance = {
            "versions": {"python": "3.11.7", "triton": None},
            "cpu": {"model": "A CPU", "cores_usable": 2}, "gpus": [], "platform": "Linux",
            "git": {"commit": "abc", "dirty": True}, "host_memory_bytes": 2**33,
            **fields["provenance"],
        }  # fmt: skip
        run_json = {"point": point, "log": f"{stem}.log", "metrics": "metrics.jsonl",
                    "command": ["python", "a b"], "provenance": provenance}  # fmt: skip
        entry = {"name": point.get("name", engine), "engine": engine, "log": f"{stem}.log",
                 "run_dir": run.relative_to(self.folder).as_posix()}  # fmt: skip
        if self.study is not None:
            run_json["study"] = self.study
        run_json["dtype_reason"] = fields.get("dtype_reason", "")
        if fields["repeat"] is not None:
            run_json["repeat"] = entry["repeat"] = fields["repeat"]
            entry["status"] = fields["status"]
        (run / "run.json").write_text(json.dumps(run_json))
        return entry

    def _metrics(self, path, engine, fields):
        losses, norms, digest = fields["losses"], fields["norms"], fields["digest"]
        start = {
            "event": "start", "engine": engine, "parameters": 12345, "vocab_size": 50257,
            "device": self.device, "versions": {"torch": "2.13.0"}, "num_ranks": 1,
        }  # fmt: skip
        events = [start]
        for index, loss in enumerate(losses):
            finite = loss is not None and math.isfinite(loss)
            event = {"event": "iteration", "iteration": index + 1, "loss": loss if finite else None,
                     "grad_norm": (norms or [0.5] * len(losses))[index]}  # fmt: skip
            event |= fields["measured"]
            events.append(event if finite else {**event, "loss_text": "nan"})
        events += [{"event": "evaluation", "iteration": i, "loss": loss, "perplexity": 2.0}
                   for i, loss in fields["evaluations"]]  # fmt: skip
        events += [{"event": "checkpoint", "iteration": at, "stall_ms": stall}
                   for at, stall in fields.get("stalls", ())]  # fmt: skip
        events.append({"event": "end", "iterations": len(losses), "weights_sha256": digest,
                       "optimizer_sha256": digest, **fields.get("end", {})})  # fmt: skip
        path.write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.fixture
def sweep_writer(tmp_path):
    return SweepWriter(tmp_path / "a sweep")


@pytest.fixture
def recipe():
    return Recipe
