"""Train with a checkpoint every step, from the last one there is; see test_killed.py.

``killed_worker.py train FOLDER STEPS`` under the plugin, until killed or done;
``killed_worker.py replay FOLDER STEPS OUT.json`` under stock, from the same checkpoints' steps.
Not a test itself.
"""

import json
import sys
import time
from pathlib import Path

import deepspeed
import deepspeed.ops
import torch

sys.path.insert(0, str(Path(__file__).parent))
import equality_worker as equality
from equality_cases import Case

import deep_optimizer_states

CASE = Case()
BLOCK = equality.POLICIES["stride 2"]


def last_tag(folder):
    """The last whole checkpoint.

    DeepSpeed writes `latest` after everything else, but not in one piece: killed in between, it is
    empty, and then the newest checkpoint is whole.
    """
    if not (folder / "latest").is_file():
        return None
    written = (folder / "latest").read_text().strip()
    tags = [path.name for path in folder.glob("global_step*")]
    return written or max(tags, key=lambda tag: int(tag.removeprefix("global_step")))


def _waits_at(folder):
    """The step before which a run waits to be killed."""
    path = folder / "wait at"
    return int(path.read_text() or -1) if path.exists() else -1


def go_on(folder, block, until):
    """From the last checkpoint, or the beginning, to step ``until``; a checkpoint every step."""
    engine = equality.make_engine(CASE, block)
    start = 0
    if tag := last_tag(folder):
        engine.load_checkpoint(folder, tag=tag)
        start = engine.global_steps
    with (folder / "starts").open("a") as file:
        file.write(f"{start}\n")
    for step in range(start, until):
        while block is not None and step == _waits_at(folder):
            time.sleep(0.02)
        equality.train(engine, CASE, steps=1, skip=step)
        engine.save_checkpoint(folder)
    return engine


def replay(folder, steps, out):
    """Stock, stopped and started where the killed run was; then both ends compared."""
    starts = [int(line) for line in (folder / "starts").read_text().split()]
    stock_folder = folder / "stock"
    stock_folder.mkdir()
    for stop in [*starts[1:], steps]:
        stock = go_on(stock_folder, None, stop)
        stock_state = equality.state_of(stock)
        stock.destroy()
    engine = equality.make_engine(CASE, BLOCK)
    engine.load_checkpoint(folder, tag=last_tag(folder))
    ours = equality.state_of(engine)
    different = [key for key in ours if not torch.equal(ours[key], stock_state[key])]
    out.write_text(json.dumps({"starts": starts, "different": different}))
    engine.destroy()


def main():
    mode, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    equality.make_engines_cheaper()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="nccl" if torch.cuda.is_available() else "gloo")
    deep_optimizer_states.install()
    if mode == "train":
        go_on(folder, BLOCK, steps).destroy()
    else:
        replay(folder, steps, Path(sys.argv[4]))
    equality.leave()


if __name__ == "__main__":
    main()
