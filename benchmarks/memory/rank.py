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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STATUS = Path("/proc/self/status")
ITERATIONS = 2


def resident_bytes(name: str = "VmRSS") -> int:
    """A line of the kernel's status of this process: ``VmRSS`` now, ``VmHWM`` at most."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", STATUS.read_text(encoding="ascii"), re.MULTILINE)
    assert found, name
    return int(found.group(1)) * 1024


def reset_peak() -> None:
    """Let the kernel forget the highest resident set, as ``clear_refs`` documents."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


class Peaks:
    """Peaks of phases above what the process had when this was made."""

    def __init__(self) -> None:
        gc.collect()
        self.baseline_bytes = resident_bytes()
        self.found: dict[str, int] = {}
        reset_peak()

    def end(self, phase: str) -> None:
        """Note the peak of a phase that is over."""
        self.found[f"{phase}_bytes"] = resident_bytes("VmHWM") - self.baseline_bytes
        reset_peak()


def main() -> int:
    """Measure the case in ``sys.argv[1]`` into the file ``sys.argv[2]``."""
    case, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    import deepspeed
    import torch

    torch.set_num_threads(case["threads"])
    if case["engine"] == "ours":
        import deep_optimizer_states

        deep_optimizer_states.install()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    _work_once(case)
    peaks = Peaks()
    engine = _load(case)
    gc.collect()
    peaks.end("load")
    for batch in _batches(case):
        engine.backward(engine(**batch).loss)
        engine.step()
    gc.collect()
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
    rank = torch.distributed.get_rank()
    out.with_suffix(f".{rank}").write_text(json.dumps(result), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def _work_once(case: dict[str, Any]) -> None:
    """Load everything that is used later: matrix products, DeepSpeed's Adam, transformers."""
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    small = {**case["model"], **case["tiny"]}
    small |= {name: 2 for name in small if name in ("num_attention_heads", "num_key_value_heads")}
    model = _model_of(small, case).to(_dtype(case))
    model.train()
    model(**_batch({**case, "model": small, "micro_batch": 1, "sequence": 16})).loss.backward()
    weight = torch.nn.Parameter(torch.zeros(64))
    weight.grad = torch.zeros(64)
    DeepSpeedCPUAdam([weight]).step()


def _model_of(table: dict[str, Any], case: dict[str, Any]) -> Any:  # noqa: ANN401
    import transformers

    config = transformers.AutoConfig.for_model(**table)
    config._attn_implementation = case["attention"]
    if table["model_type"] == "bert":
        # transformers would zero a row of an embedding that zero.Init has already cut.
        config.pad_token_id = None
    kind = {
        "t5": transformers.AutoModelForSeq2SeqLM,
        "bert": transformers.AutoModelForMaskedLM,
    }.get(table["model_type"], transformers.AutoModelForCausalLM)
    model = kind.from_config(config)
    if case["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.config.use_cache = False
    return model


def _load(case: dict[str, Any]) -> Any:  # noqa: ANN401
    """The model as a user makes it: under ``zero.Init`` for stage 3, else whole in its type."""
    import deepspeed
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    config = case["ds_config"]
    torch.manual_seed(0)
    zero = config["zero_optimization"]
    if zero["stage"] == 3:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = _model_of(case["model"], case)
        for parameter in model.parameters():
            # What transformers draws after a module is made never reaches weights that are cut.
            parameter.ds_tensor.normal_(std=0.02)
    else:
        torch.set_default_dtype(_dtype(case))
        model = _model_of(case["model"], case)
        torch.set_default_dtype(torch.float32)
    optimizer = None
    if "offload_optimizer" not in zero:
        # DeepSpeed would compile a FusedAdam for CPUs, which has the same arrays.
        optimizer = DeepSpeedCPUAdam(list(model.parameters()), **config["optimizer"]["params"])
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), optimizer=optimizer, config=config
    )
    engine.train()
    return engine


def _batches(case: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for _ in range(ITERATIONS * case["ds_config"].get("gradient_accumulation_steps", 1)):
        yield _batch(case)


def _batch(case: dict[str, Any]) -> dict[str, Any]:
    import torch

    shape = (case["micro_batch"], case["sequence"])
    ids = torch.randint(2, case["model"]["vocab_size"], shape)
    return {"input_ids": ids, "labels": ids}


def _dtype(case: dict[str, Any]) -> Any:  # noqa: ANN401
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[case["dtype"]]


if __name__ == "__main__":
    sys.exit(main())
