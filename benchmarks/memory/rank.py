"""One rank of one case: builds the model, trains, saves, and writes its process's peaks.

The figures are the kernel's: the highest resident set since it was last reset, less that of the
process before the model was built, when every library is loaded and has worked once.
"""

from __future__ import annotations

import gc
import json
import math
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from deepspeed.ops.adam import DeepSpeedCPUAdam

from deep_optimizer_states.predict.huggingface import LAYER_COUNTS, language_model

ITERATIONS = 2
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def resident_bytes(name: str = "VmRSS") -> int:
    """Return a line of the kernel's status of this process: ``VmRSS`` now, ``VmHWM`` at most."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    assert found, name
    return int(found.group(1)) * 1024


class Peaks:
    """Peaks of phases above what the process had when this was made."""

    def __init__(self) -> None:
        gc.collect()
        self.baseline_bytes = resident_bytes()
        self.found: dict[str, int] = {}
        self._reset()

    def end(self, phase: str) -> None:
        """Note the peak of a phase that is over."""
        gc.collect()
        self.found[f"{phase}_bytes"] = resident_bytes("VmHWM") - self.baseline_bytes
        self._reset()

    def _reset(self) -> None:
        """Let the kernel forget the highest resident set, as ``clear_refs`` documents."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def main() -> int:
    """Measure the case in ``sys.argv[1]`` into the file ``sys.argv[2]``."""
    case, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    if case["engine"] == "ours":
        import deep_optimizer_states

        deep_optimizer_states.install()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    _work_once(case)
    peaks = Peaks()
    engine = _load(case)
    peaks.end("load")
    for _ in range(ITERATIONS * case["accumulation"]):
        engine.backward(engine(**_batch(case)).loss)
        engine.step()
    peaks.end("train")
    norm = float(engine.get_global_grad_norm() or 0.0)
    if not math.isfinite(norm):
        raise FloatingPointError(f"the gradients' norm is {norm}: no step was taken")
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    folder = [tempfile.mkdtemp(dir=out.parent) if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(folder)
    engine.save_checkpoint(folder[0])
    peaks.end("save")
    result = {
        "baseline_bytes": peaks.baseline_bytes,
        "parameters": parameters,
        "ranks": torch.distributed.get_world_size(),
        **peaks.found,
    }
    out.write_text(json.dumps(result), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def _config_of(case: dict[str, Any]) -> Any:
    config = transformers.AutoConfig.for_model(**case["sizes"])
    config.use_cache = False
    if config.model_type == "bert":
        # transformers would zero a row of an embedding that zero.Init has already cut.
        config.pad_token_id = None
    return config


def _work_once(case: dict[str, Any]) -> None:
    """Load everything that is used later: matrix products, DeepSpeed's Adam, transformers."""
    config = _config_of(case)
    for name in LAYER_COUNTS:
        if hasattr(config, name):
            setattr(config, name, 1)
    config.vocab_size = 128
    model = language_model(config, case["attention"]).to(TYPES[case["dtype"]]).train()
    ids = torch.randint(2, 128, (1, 16))
    model(input_ids=ids, labels=ids).loss.backward()
    weight = torch.nn.Parameter(torch.zeros(64))
    weight.grad = torch.zeros(64)
    DeepSpeedCPUAdam([weight]).step()


def _load(case: dict[str, Any]) -> Any:
    """Build the model as a user does: under ``zero.Init`` for stage 3, else whole in its type."""
    config = case["ds_config"]
    torch.manual_seed(0)
    zero = config["zero_optimization"]
    if zero["stage"] == 3:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = language_model(_config_of(case), case["attention"])
        for parameter in model.parameters():
            # What transformers draws after a module is made never reaches weights that are cut.
            parameter.ds_tensor.normal_(std=0.02)
    else:
        torch.set_default_dtype(TYPES[case["dtype"]])
        model = language_model(_config_of(case), case["attention"])
        torch.set_default_dtype(torch.float32)
    if case["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = None
    if "offload_optimizer" not in zero:
        # DeepSpeed would compile a FusedAdam for CPUs, which has the same arrays.
        optimizer = DeepSpeedCPUAdam(list(model.parameters()), **config["optimizer"]["params"])
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), optimizer=optimizer, config=config
    )
    engine.train()
    return engine


def _batch(case: dict[str, Any]) -> dict[str, Any]:
    shape = (case["micro_batch"], case["sequence"])
    ids = torch.randint(2, case["sizes"]["vocab_size"], shape)
    return {"input_ids": ids, "labels": ids}


if __name__ == "__main__":
    sys.exit(main())
