"""Work in backward, and all that can come between backward and ``step()``; answers as JSON.

Run as every rank of a job: ``ahead_worker.py OUT.json FOLDER``. Not a test itself. More ranks than
one do the comparisons in which several gradients of a parameter come, and nothing else.
"""

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from pathlib import Path

import deepspeed
import equality_worker as equality
import torch
from ahead_engine import (
    AHEAD,
    CASE,
    EARLY,
    GOOD,
    backward,
    engines,
    given,
    has_begun,
    one_window,
    plan_of,
    sent,
    settle,
    started,
    stock_after,
    train,
)
from ahead_models import AGAIN, RELEASED, Detached
from equality_cases import ONE_LAYER_A_BUCKET, WIDTH
from safety_worker import answer

from deep_optimizer_states.core.device.emulated import EmulatedDevice
from deep_optimizer_states.core.plan import Kind

# Mishaps of an update that has begun before step().


def overflow(engine):
    """The loss is large enough for gradients that are no numbers."""
    generator = torch.Generator().manual_seed(0)
    batches = [CASE.batch(generator) for _ in range((GOOD + 1) * CASE.accumulation)]
    backward(engine, batches[-2])
    settle(engine)
    engine.step()
    x, y = batches[-1]
    backward(engine, (x, y * torch.inf))
    engine.step()


def another_rate(engine):
    one_window(engine, GOOD)
    assert has_begun(engine)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.5
    engine.step()


def rate_in_place(engine):
    for group in engine.optimizer.param_groups:
        group["lr"] = torch.tensor(0.01)
    one_window(engine, GOOD)
    for group in engine.optimizer.param_groups:
        group["lr"].fill_(0.5)
    engine.step()


def clipping_at_last(engine):
    one_window(engine, GOOD)
    engine.optimizer.clip_grad = 1e-3
    engine.step()


def two_backwards(engine):
    generator = torch.Generator().manual_seed(0)
    batches = [CASE.batch(generator) for _ in range((GOOD + 1) * CASE.accumulation)]
    backward(engine, batches[-2])
    settle(engine)
    engine.step()
    loss = CASE.loss(engine, [tensor.bfloat16() for tensor in batches[-1]])
    engine.backward(loss, retain_graph=True)
    engine.backward(loss)


def gradient_again(engine):
    """As a parameter that is recomputed twice, each time with a backward of its own."""
    one_window(engine, GOOD)
    param = engine.module.layers[-1].weight
    engine.optimizer._gradients.flush(param.ds_id, torch.ones(param.partition_numel()))


def another_forward(engine):
    one_window(engine, GOOD)
    engine(torch.ones(4, WIDTH).bfloat16())


@contextlib.contextmanager
def in_first_layer(engine, action):
    """Do something when backward arrives at the first layer."""

    def hook(module, inputs, output):
        output.register_hook(lambda grad: action())

    handle = engine.module.layers[0].register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def hidden_use(engine):
    def use():
        assert has_begun(engine)
        with deepspeed.zero.GatheredParameters([engine.module.layers[-1].weight]):
            pass

    with in_first_layer(engine, lambda: use() if has_begun(engine) else None):
        one_window(engine, GOOD)


def interrupted(engine):
    def interrupt():
        if has_begun(engine):
            raise KeyboardInterrupt

    with in_first_layer(engine, interrupt):
        one_window(engine, GOOD)


MISHAPS = {
    "overflow": overflow,
    "another rate": another_rate,
    "rate in place": rate_in_place,
    "clipping at last": clipping_at_last,
    "two backwards": two_backwards,
    "another forward": another_forward,
    "gradient again": gradient_again,
    "hidden use": hidden_use,
    "interrupted": interrupted,
}


def left_of_window(engine):
    """What stock has of a window that is not over, as numbers."""
    optimizer = engine.optimizer
    return {
        "norms": len(optimizer.norm_for_param_grads),
        "parameters in buckets": sum(len(b.params) for b in optimizer.ipg_buckets.values()),
        "backwards under way": optimizer._backward_active_depth,
        "gradients": sum(param.grad is not None for param in engine.module.parameters()),
        "micro-steps": optimizer.micro_step_id,
    }


def mishap(name, folder):
    engine = started(EARLY, folder)
    found = {"given": given[-1], "said": answer(lambda: MISHAPS[name](engine))}
    found["save"] = [answer(lambda: engine.save_checkpoint(folder, "bad")) for _ in range(2)]
    found["state"] = answer(lambda: engine.optimizer.state)
    found["latest"] = (folder / "latest").read_text()
    found["left"] = left_of_window(engine)
    found["loaded"] = answer(lambda: engine.load_checkpoint(folder, "good")[0] is not None)
    found["left then"] = left_of_window(engine)
    engine.optimizer.clip_grad = 0.0
    results = train(engine, 2, GOOD), equality.state_of(engine)
    found["differences"] = equality.differences(results, stock_after(folder))
    found["given again"] = given[-1]
    engine.destroy()
    return found


def looked_at(folder):
    """State and checkpoints are refused between backward and step(), and the step is whole."""
    engine, said = started(EARLY, folder), []

    def load(engine, *args, **options):
        said.append(answer(lambda: engine.load_checkpoint(folder, "good", *args, **options)))

    def look(engine):
        said.append(answer(lambda: engine.optimizer.state))
        said.append(answer(lambda: engine.optimizer.fp32_partitioned_groups_flat))
        said.append(answer(lambda: engine.save_checkpoint(folder, "bad")))
        load(engine, load_module_only=True)
        load(engine, load_optimizer_states=False)
        load(engine, True, False)
        said.append(answer(lambda: engine.optimizer._rigid_load_state_dict({}, False)))

    results = train(engine, 2, GOOD, look), equality.state_of(engine)
    engine.destroy()
    differences = equality.differences(results, stock_after(folder))
    return {"said": said, "latest": (folder / "latest").read_text(), "differences": differences}


FACTORS = {
    "clip_grad": lambda engine, value: setattr(engine.optimizer, "clip_grad", value),
    "loss_scale": lambda engine, value: engine.optimizer.override_loss_scale(value),
}
"""What the caller may set by hand, of which gradients are multiplied by something else then."""


def factor_set(name, folder):
    """A factor of gradients is set between two steps, and taken back once it was refused."""
    engine = started(EARLY, folder)
    updates = engine.optimizer._update.num_updates
    FACTORS[name](engine, 0.5)
    found = {"said": [answer(lambda: one_window(engine, GOOD)) for _ in range(2)]}
    found["begun"] = [has_begun(engine), engine.optimizer._update.num_updates - updates]
    found["left"] = left_of_window(engine)
    FACTORS[name](engine, {"clip_grad": 0.0, "loss_scale": 1.0}[name])
    results = train(engine, 2, GOOD), equality.state_of(engine)
    found["differences"] = equality.differences(results, stock_after(folder))
    found["given"] = given[-1]
    engine.destroy()
    return found


def loaded_between(folder):
    """A checkpoint that is loaded between backward and step() ends the update that has begun."""
    engine = started(EARLY, folder)
    one_window(engine, GOOD)
    found = {"begun": has_begun(engine)}
    engine.load_checkpoint(folder, "good")
    engine.micro_steps += -engine.micro_steps % engine.gradient_accumulation_steps()
    results = train(engine, 2, GOOD), equality.state_of(engine)
    engine.destroy()
    return found | {"differences": equality.differences(results, stock_after(folder))}


def detached():
    """The update waits for the weight's release, not for its gradient alone."""
    case = dataclasses.replace(
        CASE,
        make=lambda: torch.nn.Sequential(*(Detached() for _ in range(4))),
        zero={"reduce_bucket_size": 1000, "sub_group_size": 10**4},
        is_cut=False,
    )
    return compare(case, EARLY)


def shared_tiles():
    """Tiles that hold parts of several parameters, whose gradients come one after the other."""
    zero = {"stage3_param_persistence_threshold": 0, "sub_group_size": 10**6}
    case = dataclasses.replace(CASE, zero=zero, is_cut=False)
    return compare(case, {**EARLY, "tile_numel": 2048})


def compare(case, block):
    results = []
    for engine_block in (block, None):
        engine = equality.make_engine(case, engine_block)
        results.append((train(engine, 5, 0), equality.state_of(engine)))
        engine.destroy()
    return {"given": given[-1], "differences": equality.differences(*results)}


def used_again():
    """Parameters that get several gradients in one backward, of which stock goes by some."""
    found = {}
    for name, options in AGAIN.items():
        for accumulation, zero in ((1, {}), (2, RELEASED)):
            zero = {**ONE_LAYER_A_BUCKET, **zero}
            case = dataclasses.replace(CASE, **options, accumulation=accumulation, zero=zero)
            *ours, _ = equality.run(case, EARLY)
            early = given[-1]
            *stock, _ = equality.run(case, None)
            differences = equality.differences(ours, stock)
            found[f"{name}, accumulation {accumulation}"] = [early, differences]
    return found


def destroyed_between(folder):
    engine = started(EARLY, folder)
    one_window(engine, GOOD)
    found = {"begun": has_begun(engine), "destroy": answer(engine.destroy)}
    threads = [t.name for t in threading.enumerate() if t.name.startswith("deep_optimizer_states")]
    return found | {"threads": threads}


# State that was sent ahead.


def num_ahead(engine):
    return sum(action.kind is Kind.AHEAD for action in plan_of(engine).actions)


def ahead(folder, between=lambda engine: None, block=AHEAD, steps=4):
    """Train on with state ahead and something between backward and step()."""
    sent.clear()
    engine, seen, waiting = started(block, folder), [], []
    first = list(sent)

    def watch(engine):
        seen.append(num_ahead(engine))  # of the step before
        waiting.append(len(engine.optimizer._update.executor.ahead))
        between(engine)

    results = train(engine, steps, GOOD, watch), equality.state_of(engine)
    seen.append(num_ahead(engine))
    engine.destroy()
    stock = stock_after(folder, between, steps)
    differences = equality.differences(results, stock)
    return {"ahead": seen[1:], "first": first, "waiting": waiting, "differences": differences}


def taken():
    """Elements of each tile whose state is ahead."""
    update = engines[-1].optimizer._update
    return [update._schedule.tiles[tile].numel for tile in update.executor.away]


def write_masters(engine):
    for master in engine.optimizer.fp32_partitioned_groups_flat:
        master.data.mul_(1.5)


def evaluate(engine):
    engine.eval()
    with torch.no_grad():
        engine(torch.ones(4, WIDTH).bfloat16())
    engine.train()


@contextlib.contextmanager
def memory(free, **attributes):
    """The stand-in's memory, and what allocating does."""
    before = {name: getattr(EmulatedDevice, name) for name in ("free_bytes", "empty_device")}
    EmulatedDevice.free_bytes = free
    for name, value in attributes.items():
        setattr(EmulatedDevice, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(EmulatedDevice, name, value)


def late_flushes():
    """State whose flush lasts into the next backward is not sent ahead before it is home."""
    case = dataclasses.replace(CASE, accumulation=1, steps=8)
    make = EmulatedDevice.__init__

    def make_with_slow_flushes(self, *args):
        make(self, *args)
        submit = self.d2h.submit

        def submit_late(what, work, uses=()):
            submit(what, lambda: (time.sleep(0.01), work()), uses)

        self.d2h.submit = submit_late

    EmulatedDevice.__init__ = make_with_slow_flushes
    try:
        *ours, _ = equality.run(case, {**AHEAD, "prefetch_memory_bytes": 10**9})
    finally:
        EmulatedDevice.__init__ = make
    *stock, _ = equality.run(case, None)
    return {"sent": sent[-8:], "differences": equality.differences(ours, stock)}


def out_of_memory(folder):
    """One piece of device memory in 23 is refused."""
    allocate, count = EmulatedDevice.empty_device, [0]

    def refuse(self, numel, dtype):
        count[0] += 1
        if count[0] % 23 == 0 and count[0] > 200:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return allocate(self, numel, dtype)

    with memory(EmulatedDevice.free_bytes, empty_device=refuse):
        found = ahead(folder, block={**AHEAD, "prefetch_memory_bytes": "auto"}, steps=6)
    return found | {"refused": count[0] // 23}


def short(folder):
    """Others need the memory: at some looks there is none."""
    looks = [0]

    def free(self):
        looks[0] += 1
        return -1 if looks[0] % 97 == 0 else 10**9

    with memory(free):
        return ahead(folder, block={**AHEAD, "prefetch_memory_bytes": "auto"}, steps=8)


def little(folder):
    """What is free covers what three tiles take, of 256 elements and 14 bytes an element."""
    with memory(lambda self: 3 * 256 * 14 + 100 - sum(14 * numel for numel in taken())):
        return ahead(folder, block={**AHEAD, "prefetch_memory_bytes": "auto"})


def main():
    out, folder = map(Path, sys.argv[1:])
    equality.prepare()
    report = {"used again": used_again()}
    if os.environ["WORLD_SIZE"] == "1":
        report |= alone(folder)
    out.with_suffix(f".{os.environ['RANK']}.json").write_text(json.dumps(report))
    equality.leave()


def alone(folder):
    return {
        "mishaps": {name: mishap(name, folder / name.replace(" ", "-")) for name in MISHAPS},
        "looked at": looked_at(folder / "looked"),
        "factors": {name: factor_set(name, folder / name) for name in FACTORS},
        "loaded between": loaded_between(folder / "between"),
        "detached": detached(),
        "shared tiles": shared_tiles(),
        "destroyed between": destroyed_between(folder / "destroyed"),
        "late flushes": late_flushes(),
        "ahead": {
            "fixed": ahead(folder / "fixed"),
            "auto": ahead(folder / "auto", block={**AHEAD, "prefetch_memory_bytes": "auto"}),
            "gradients kept": ahead(folder / "kept", block={**AHEAD, "keep_grads_on_device": True}),
            "none": ahead(folder / "none", block={**AHEAD, "prefetch_memory_bytes": 1}),
            "written": ahead(folder / "written", write_masters),
            "evaluated": ahead(folder / "evaluated", evaluate),
            "out of memory": out_of_memory(folder / "oom"),
            "short": short(folder / "short"),
            "little": little(folder / "little"),
        },
    }


if __name__ == "__main__":
    main()
