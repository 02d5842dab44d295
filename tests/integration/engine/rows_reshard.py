"""Checkpoints loaded by other numbers of ranks than saved them, beside DeepSpeed's conversion.

``ROWS_ONLY`` says which rows a job runs: those that save, or some that load.
"""

import contextlib
import sys

import torch
from engines import NUM_RANKS, RANK, STRIDE, Case, Net, Trial, differences
from models import Adapted
from rows import Rows
from rows_checkpoints import TAG, UNIVERSAL, convert, shared_folder
from rows_table import FP16, WARMUP, two_groups

ROWS = Rows()
run = ROWS.run
SAVED_BY, LOADED_BY = (1, 2, 4), (1, 2, 3, 4)
BEFORE, AFTER = 3, 10
"""Iterations before a checkpoint is saved, and after it is loaded."""


def frozen_net():
    """Frozen layers, one of which has a low-rank one beside it that learns."""
    net = Net()
    net.layers[1] = Adapted(net.layers[1], 3)
    net.layers[4].requires_grad_(False)
    return net


def case_of(stage, **given):
    config = {"scheduler": WARMUP, **given.pop("config", {})}
    zero = {"stage": stage, **given.pop("zero", {})}
    return Case(config=config, zero=zero, is_cut=False, **given)


FROZEN = {"make": frozen_net}
CASES = {f"stage {stage}, bf16": case_of(stage) for stage in (1, 2, 3)}
CASES |= {f"stage {stage}, frozen parts": case_of(stage, **FROZEN) for stage in (2, 3)}
CASES |= {
    f"stage {stage}, fp16, two groups": case_of(
        stage, groups=two_groups, dtype=torch.float16, config=FP16["config"]
    )
    for stage in (2, 3)
}
ROUND_ROBIN = "stage 2, round robin"
CASES[ROUND_ROBIN] = case_of(2, zero={"round_robin_gradients": True})
CASES["stage 3, other subgroups"] = case_of(3)
LOADED_WITH = {"stage 3, other subgroups": {"zero": {"stage": 3, "sub_group_size": 1900}}}
"""Changes of a case before it loads."""


def folder_of(name, saved_by):
    return shared_folder() / f"{name}, {saved_by}".replace(" ", "-").replace(",", "")


def save_and_convert(_folder, name):
    case, folder = CASES[name], folder_of(name, NUM_RANKS)
    with Trial(STRIDE) as trial:
        engine = trial.open(case)
        trial.train(engine, BEFORE)
        with contextlib.redirect_stdout(sys.stderr):
            engine.save_checkpoint(folder, TAG, client_state={"ours": [torch.ones(3), NUM_RANKS]})
        if name == ROUND_ROBIN:
            torch.save(state_by_parameter(engine), folder / f"by-parameter.{RANK}")
            return
    options = ["--inject_missing_state"] if case.stage < 3 else []
    convert(folder.parent, [folder.name], *options)


def state_by_parameter(engine):
    """Master weights and moments below stage 3, of all ranks, in the order in which they lie."""
    zero, found = engine.optimizer, {}
    for group, master in zip(
        zero.round_robin_bit16_groups, zero.single_partition_of_fp32_groups, strict=True
    ):
        state = zero.optimizer.state[master]
        for key, flat in {"master": master.data, **state}.items():
            if key == "step":
                continue
            parts = [torch.empty_like(flat) for _ in range(NUM_RANKS)]
            torch.distributed.all_gather(parts, flat)
            pieces = torch.cat(parts)[: sum(map(torch.numel, group))].split(
                [param.numel() for param in group]
            )
            names = [f"{key} of {engine.param_names[param]}" for param in group]
            found |= {name: piece.clone() for name, piece in zip(names, pieces, strict=True)}
    return found


def load_round_robin(folder, saved_by):
    """DeepSpeed's conversion mixes parameters up here, so that it is no reference."""
    with Trial(STRIDE) as trial:
        engine = trial.open(CASES[ROUND_ROBIN])
        engine.load_checkpoint(folder, TAG)
        saved, found = torch.load(folder / "by-parameter.0"), state_by_parameter(engine)
        assert saved.keys() == found.keys()
        assert [
            name for name, tensor in saved.items() if not torch.equal(tensor, found[name])
        ] == []
        for name, param in engine.module.named_parameters():
            assert torch.equal(param, found[f"master of {name}"].to(param.dtype).view_as(param)), (
                name
            )
        trial.train(engine, AFTER, skip=BEFORE)
        assert trial.is_finite


def unlike(make):
    """A model that nothing was loaded into: its frozen parts differ."""

    def made():
        model = make()
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data.add_(1)
        return model

    return made


def go_on(case, block, folder, tag):
    """Load into an engine that has trained, and train; the trial."""
    with Trial(block) as trial:
        engine = trial.open(case)
        if case.make is Net:  # or frozen parts that differ leave other gradients
            trial.train(engine, 1)
        trial.forget()
        groups = [dict(group) for group in engine.optimizer.param_groups]
        path, client = engine.load_checkpoint(folder, tag)
        assert path is not None
        if block is None and case.stage == 3:
            # DeepSpeed gives every parameter group the settings of the first.
            for group, own in zip(engine.optimizer.param_groups, groups, strict=True):
                group |= {key: own[key] for key in ("betas", "weight_decay")}
        trial.see("client state", client["ours"])
        counters = [engine.global_steps, engine.global_samples, engine.skipped_steps]
        trial.see("counters", [*counters, *engine.get_lr(), engine.optimizer.loss_scale])
        trial.see("scheduler", engine.lr_scheduler.last_batch_iteration)
        trial.see_state(engine)
        trial.train(engine, AFTER, skip=BEFORE)
    return trial


def load_as_converted(_folder, name, saved_by):
    case, folder = CASES[name].changed(**LOADED_WITH.get(name, {})), folder_of(name, saved_by)
    if name == ROUND_ROBIN:
        load_round_robin(folder, saved_by)
        return
    config = {**case.config, **UNIVERSAL["config"]}
    converted = go_on(case.changed(config=config), None, folder, f"{TAG}_universal")
    make = case.make if case.make is Net else unlike(case.make)
    ours = go_on(case.changed(make=make), STRIDE, folder, TAG)
    assert not (found := differences(ours, converted)), found


for case_name in CASES:
    ROWS.check(f"save {case_name}", *SAVED_BY, name=case_name)(save_and_convert)
    for number in SAVED_BY:
        given = {"name": case_name, "saved_by": number}
        ROWS.check(f"load {case_name} of {number}", *LOADED_BY, **given)(load_as_converted)
