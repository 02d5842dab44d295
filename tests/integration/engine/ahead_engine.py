"""Train an engine that works in backward, and count what each update was handed beforehand.

Not a test itself, see ``ahead_worker``.
"""

import dataclasses

import equality_worker as equality
import torch

from deep_optimizer_states.adapter.update import UpdatePhase
from deep_optimizer_states.adapter.zero3 import ahead as ahead_module

UNCLIPPED = {"gradient_clipping": 0}
CASE = dataclasses.replace(equality.CASES[equality.FIRST_CASE], config=UNCLIPPED)
AHEAD = {
    "enabled": True,
    "policy": "all-host",
    "tile_numel": 256,
    "verify_every": 0,
    "keep_grads_on_device": False,
    "prefetch_memory_bytes": 60_000,
}
EARLY = {**AHEAD, "policy": "stride", "step_before_norm": True, "prefetch_memory_bytes": 0}
# What is sent is then a matter of memory, and not of time.
ahead_module.MOST_UNDER_WAY, ahead_module.LOOK_S = 1000, 0.0
GOOD = 3
"""Steps until a checkpoint is saved; backward works from the third on."""


engines = []
"""The one that trains, last."""


def train(engine, steps, skip, between=lambda engine: None):
    """As ``equality.train``, with something done between the last backward and each step."""
    generator = torch.Generator().manual_seed(0)
    losses, norms = [], []
    for number in range((skip + steps) * CASE.accumulation):
        batch = CASE.batch(generator)
        if number < skip * CASE.accumulation:
            continue
        losses.append(backward(engine, batch).item())
        is_last = (number + 1) % CASE.accumulation == 0
        if not is_last:
            settle(engine)
        if is_last:
            between(engine)
        engine.step()
        if is_last:
            norms.append(float(engine.get_global_grad_norm() or 0.0))
    return losses, norms


def settle(engine):
    """In the middle of a window: let the update end, which the next backward might still meet."""
    if hasattr(engine.optimizer, "background"):
        sent = engine.optimizer._update.executor.ahead
        assert not sent, "nothing is sent before the last micro-batch"
        engine.optimizer.background.wait()


def backward(engine, batch, **options):
    loss = CASE.loss(engine, [tensor.bfloat16() for tensor in batch])
    engine.backward(loss, **options)
    return loss


def one_window(engine, skip):
    """Both micro-batches of a window, without the step that ends it."""
    generator = torch.Generator().manual_seed(0)
    batches = [CASE.batch(generator) for _ in range((skip + 1) * CASE.accumulation)]
    for batch in batches[-CASE.accumulation : -1]:
        backward(engine, batch)
        settle(engine)
        engine.step()
    backward(engine, batches[-1])


def stock_after(folder, between=lambda engine: None, steps=2):
    engine = equality.make_engine(CASE, None)
    assert engine.load_checkpoint(folder, "good")[0]
    results = train(engine, steps, GOOD, between), equality.state_of(engine)
    engine.destroy()
    return results


def started(block, folder):
    engine = equality.make_engine(CASE, block)
    engines.append(engine)
    train(engine, GOOD, 0)
    engine.save_checkpoint(folder, "good")
    return engine


launch, given, sent = UpdatePhase.launch, [], []
"""The method, and how many tiles each update was handed and was sent the state of beforehand."""


def counted_launch(update, *args):
    given.append(len(update._begun.handover.given) if update.is_begun else 0)
    sent.append(len(update.executor.away))
    launch(update, *args)


UpdatePhase.launch = counted_launch


def plan_of(engine):
    return engine.optimizer._update.executor.last_plan


def has_begun(engine):
    return engine.optimizer._update.is_begun
