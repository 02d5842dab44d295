"""Save checkpoints, or load universal ones and go on; see test_universal.py. Not a test itself.

``universal_worker.py save FOLDER`` or ``universal_worker.py load FOLDER OUT.json``.
"""

import json
import sys
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch

sys.path.insert(0, str(Path(__file__).parent))
import equality_worker as equality

import deep_optimizer_states

ENGINES = {"stock": None, "stride-2": equality.POLICIES["stride 2"]}
CASE = equality.Case()
UNIVERSAL = equality.Case(config={"checkpoint": {"load_universal": True}})


def save(folder):
    for name, block in ENGINES.items():
        engine = equality.make_engine(CASE, block)
        equality.train(engine, CASE, steps=3)
        engine.save_checkpoint(folder / name, tag="step3")
        engine.destroy()


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
