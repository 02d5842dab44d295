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

from configs.study import default_study
from dataset import indexed
from launch.ds_json import deepspeed_config

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
ITERATIONS = 4


def write_corpus(prefix: Path) -> None:
    """Make a corpus in a folder that may only be read from then on."""
    documents = [(np.arange(40 + start) * 3 + start * 7) % 499 for start in range(60)]
    indexed.write(prefix, documents, eod=499, vocab_size=MODEL["vocab_size"])
    prefix.parent.chmod(0o555)


def write_run(
    run_dir: Path, corpus: Path, fields: dict[str, Any], **ds_changes: dict[str, Any]
) -> Path:
    defaults = {
        "model": MODEL,
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "iterations": ITERATIONS,
        "subgroup_numel": 20_000,
        "device": "cpu",
    }
    point = default_study().point_type(**{**defaults, **fields})
    run = {
        "schema_version": 2,
        "run_id": "test",
        "point": point.model_dump(mode="json"),
        "log": point.log_name,
        "metrics": "metrics.jsonl",
        "data_prefix": str(corpus),
    }
    ds_config = {**deepspeed_config(point), **ds_changes}
    (run_dir / "ds_config.json").write_text(json.dumps(ds_config))
    path = run_dir / "run.json"
    path.write_text(json.dumps(run))
    return path


def launch(run_json: Path, *words: str, anew: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the trainer's program on a run file; returns its exit code and output.

    Args:
        run_json: the run file.
        words: further words of the command line.
        anew: whether one rank is a process from its start on, as several ranks under torchrun are,
            and not forked from one that has imported what it needs.
    """
    point = json.loads(run_json.read_text())["point"]
    num_ranks = point["tp"] * point["dp"]
    program = ["-m", "launch.pretrain_gpt", str(run_json), *words]
    if num_ranks == 1 and not anew:
        output = run_json.with_name("output")
        [code] = prepared.run(prepared.MEGATRON, program, [ENVIRONMENT], [output])
        return subprocess.CompletedProcess(program, code, output.read_text())
    if num_ranks > 1:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
        launcher += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
        program = [*launcher, *program]
    return subprocess.run(
        [sys.executable, *program],
        cwd=run_json.parent,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def train_together(
    folders: list[Path], files: list[str], num_ranks: int = 1, path: str = ""
) -> list[Any]:
    """Run ``trainer_worker`` on run files, in one process a rank.

    Args:
        folders: the runs' folders.
        files: the worker's words.
        num_ranks: processes.
        path: before everything else that Python imports from.
    """
    worker = Path(__file__).with_name("trainer_worker.py")
    paths = python_path(path, ROOT, ROOT / "src")
    run_ranks(worker, *files, num_ranks=num_ranks, modules=prepared.MEGATRON, PYTHONPATH=paths)
    return [result_of(folder) for folder in folders]


def result_of(folder: Path) -> dict[str, Any]:
    """What the worker found out of a run, with its losses, norms and evaluations."""
    result = json.loads((folder / "result.json").read_text())
    lines = (folder / "metrics.jsonl").read_text().splitlines() if "digests" in result else []
    events = [json.loads(line) for line in lines]
    trained = [event for event in events if event["event"] == "iteration"]
    return {
        **result,
        "losses": [event["loss"] for event in trained],
        "norms": [event["grad_norm"] for event in trained],
        "evaluations": [event for event in events if event["event"] == "evaluation"],
    }
