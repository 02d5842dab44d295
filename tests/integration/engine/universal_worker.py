"""Save checkpoints, or load universal ones and go on; see test_universal.py. Not a test itself.

``universal_worker.py save FOLDER`` or ``universal_worker.py load FOLDER OUT.json``.
"""

import json
import sys
from pathlib import Path
from unittest import mock

import deepspeed
import deepspeed.ops
import torch
from deepspeed.checkpoint import ds_to_universal

sys.path.insert(0, str(Path(__file__).parent))
import equality_worker as equality
from equality_cases import Case

import deep_optimizer_states

ENGINES = {"stock": None, "stride-2": equality.POLICIES["stride 2"]}
CASE = Case()
UNIVERSAL = Case(config={"checkpoint": {"load_universal": True}})


def save(folder):
    for name, block in ENGINES.items():
        engine = equality.make_engine(CASE, block)
        equality.train(engine, CASE, steps=3)
        engine.save_checkpoint(folder / name, tag="step3")
        engine.destroy()


def convert(folder):
    """As DeepSpeed's own command does."""
    for name in ENGINES:
        words = ["--input_folder", folder / name / "step3"]
        words += ["--output_folder", folder / name / "step3_universal"]
        words += ["--num_extract_workers", 1, "--num_merge_workers", 1]
        with mock.patch.object(sys, "argv", ["ds_to_universal", *map(str, words)]):
            ds_to_universal.main(ds_to_universal.parse_arguments())


def load(folder):
    results = {}
    for saved in ENGINES:
        for name, block in ENGINES.items():
            engine = equality.make_engine(UNIVERSAL, block)
            engine.load_checkpoint(folder / saved, tag="step3_universal")
            results[saved, name] = (equality.train(engine, CASE, skip=3), equality.state_of(engine))
            engine.destroy()
    stock = results["stock", "stock"]
    return {f"{a} to {b}": equality.differences(r, stock) for (a, b), r in results.items()}


def main():
    mode, folder = sys.argv[1], Path(sys.argv[2])
    if mode == "load":
        convert(folder)
    equality.make_engines_cheaper()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    deep_optimizer_states.install()
    if mode == "save":
        save(folder)
    else:
        Path(sys.argv[3]).write_text(json.dumps(load(folder)))
    equality.leave()


if __name__ == "__main__":
    main()
