"""Tiny runs of our trainer: a corpus, a model, a run folder, a process or several."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import prepared
from processes import python_path
from ranks import free_port, run_ranks

from configs.study import Study, default_study
from dataset import indexed
from launch.backends import OWN_TRAINER
from launch.backends.own import PipelineTrainer

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")},
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": python_path(ROOT, ROOT / "src"),
}
MODEL = {
    "name": "test",
    "hidden": 64,
    "ffn": 96,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "seq_length": 32,
    "vocab_size": 500,
}
PIPELINE = {
    "model": {
        **MODEL,
        **{"hidden": 32, "ffn": 64, "kv_heads": 4, "seq_length": 16, "architecture": "gpt2"},
    },
    "micro_batch_size": 2,
    "iterations": 6,
    "dtype": "fp32",
    "zero_stage": 0,
    "offload_optimizer": "none",
    "activation_checkpointing": False,
    "device": "cpu",
    "split": "80,20,0",
}
"""Fields of a tiny point of the pipeline trainer."""
ITERATIONS = 4


def write_corpus(prefix: Path) -> None:
    """Make a corpus in a folder that may only be read from then on."""
    documents = [(np.arange(40 + start) * 3 + start * 7) % 499 for start in range(60)]
    indexed.write(prefix, documents, eod=499, vocab_size=MODEL["vocab_size"])
    prefix.parent.chmod(0o555)


def write_run(
    run_dir: Path,
    corpus: Path,
    fields: dict[str, Any],
    study: Study | None = None,
    **ds_changes: Any,
) -> Path:
    """Make a run folder; a study's point is one of the pipeline trainer's, others DeepSpeed's."""
    run_dir.mkdir(exist_ok=True)
    trainer = OWN_TRAINER if study is None else PipelineTrainer()
    defaults = {"model": MODEL, "micro_batch_size": 2, "global_batch_size": 4, "device": "cpu",
                "iterations": ITERATIONS, "subgroup_numel": 20_000}  # fmt: skip
    known = (study or default_study()).point_type
    point = known(**{k: v for k, v in {**defaults, **fields}.items() if k in known.model_fields})
    run = {
        "schema_version": 2,
        "run_id": "test",
        "study": (study or default_study()).as_table(),
        "point": point.model_dump(mode="json"),
        "log": point.log_name,
        "metrics": "metrics.jsonl",
        "data_prefix": str(corpus),
    }
    (run_dir / "ds_config.json").write_text(json.dumps({**trainer.ds_config(point), **ds_changes}))
    path = run_dir / "run.json"
    path.write_text(json.dumps(run))
    return path


def launch(run_json: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the trainer's program on a run file; returns its exit code and output.

    Ranks and torchrun are forked from a process that has imported what they need.
    """
    point = json.loads(run_json.read_text())["point"]
    num_ranks = point["tp"] * point["dp"]
    program = ["-m", "launch.pretrain_gpt", str(run_json), *words]
    if num_ranks == 1:
        output = run_json.with_name("output")
        (code,) = prepared.run(prepared.MEGATRON, program, [ENVIRONMENT], [output])
        return subprocess.CompletedProcess(program, code, output.read_text())
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
    launcher += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return subprocess.run(
        [sys.executable, *launcher, *program],
        cwd=run_json.parent,
        env={**ENVIRONMENT, **prepared.variables(prepared.MEGATRON)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def train_together(
    folders: list[Path], words: list[str], num_ranks: int = 1, path: str = ""
) -> list[dict[str, Any]]:
    """Run ``trainer_worker`` on run files, in one process a rank; what came out of each.

    ``path`` stands before everything else that Python imports from, and nothing is imported before
    a rank has it.
    """
    worker = Path(__file__).with_name("trainer_worker.py")
    paths = python_path(path, ROOT, ROOT / "src")
    modules = () if path else prepared.MEGATRON
    run_ranks(worker, *words, num_ranks=num_ranks, modules=modules, PYTHONPATH=paths)
    return [result_of(folder) for folder in folders]


def result_of(folder: Path) -> dict[str, Any]:
    """What the worker found out of a run, with its losses, norms and evaluations, without times."""
    result = json.loads((folder / "result.json").read_text())
    events = events_of(folder) if "digests" in result else []
    trained = [event for event in events if event["event"] == "iteration"]
    return {
        **result,
        "losses": [event["loss"] for event in trained],
        "norms": [event["grad_norm"] for event in trained],
        "evaluations": [
            {name: value for name, value in event.items() if name != "samples_per_s"}
            for event in events
            if event["event"] == "evaluation"
        ],
    }


def events_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def train_pipelines(parent: Path, corpus: Path, study: Study, runs: dict[str, Any]) -> None:
    """Train runs of four ranks in turn, each in a folder of its name below ``parent``.

    The fields may have ``ds``, changes of DeepSpeed's JSON, and ``from``, the run that it continues
    from its checkpoint of iteration 3.
    """
    words = []
    for name, fields in runs.items():
        fields, begun = dict(fields), fields.get("from")
        path = write_run(parent / name, corpus, fields, study, **fields.get("ds", {}))
        start = f"={parent / begun / 'checkpoints' / 'iteration-000003'}" if begun else ""
        words.append(f"{free_port()}:{path}{start}")
    worker = Path(__file__).with_name("pipeline_worker.py")
    paths = python_path(ROOT, ROOT / "src")
    run_ranks(worker, *words, num_ranks=4, modules=prepared.MEGATRON, PYTHONPATH=paths)
