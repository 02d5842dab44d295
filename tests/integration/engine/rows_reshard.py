"""Checkpoints loaded by other numbers of ranks than saved them, beside DeepSpeed's conversion.

``ROWS_ONLY`` says which rows a job runs: those that save, or some that load.
"""

import contextlib
import functools
import shutil
import sys
from unittest import mock

import torch
from engines import NUM_RANKS, RANK, STRIDE, Case, Net, Trial, answer, differences, state_of
from models import Adapted
from rows import Rows
from rows_checkpoints import TAG, UNIVERSAL, convert, shared_folder
from rows_table import FP16, WARMUP, two_groups
from seams import reshard, stamped

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
OVERFLOWS = {"dtype": torch.float16, "config": FP16["config"]}
SCALED = {"bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": 10}}
SCALED = {"dtype": torch.float16, "config": SCALED}
CASES["stage 3, fp16, nothing but overflows"] = case_of(3, **OVERFLOWS)
CASES["stage 3, fp16, two groups"] = case_of(3, groups=two_groups, **SCALED)
CASES["stage 2, fp16"] = case_of(2, **SCALED)
ROUND_ROBIN = "stage 2, round robin, two groups"
CASES[ROUND_ROBIN] = case_of(2, groups=two_groups, zero={"round_robin_gradients": True})
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
        assert (engine.skipped_steps == BEFORE) == ("nothing but overflows" in name)
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
        for what, tensor in state_of(engine).items():
            if not what.startswith("grad"):  # those from before, with other frozen parts
                trial.see(what, tensor)
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


def load_parts(_folder, stage, saved_by, **options):
    """Without moments, which stock itself loads on fewer ranks than saved them."""
    case, folder = CASES[f"stage {stage}, bf16"], folder_of(f"stage {stage}, bf16", saved_by)
    trials = []
    for block in (STRIDE, None):
        with Trial(block) as trial:
            engine = trial.open(case)
            assert engine.load_checkpoint(folder, TAG, **options)[0] is not None
            trial.see("counters", [engine.global_steps, *engine.get_lr()])
            trial.train(engine, 2, skip=BEFORE)
        trials.append(trial)
    assert not (found := differences(*trials)), found


# What is refused.


def without(name):
    return lambda folder: (folder / name).unlink()


def cut_off(name, numel=-2000):
    def cut(folder):
        path = folder / name
        path.write_bytes(path.read_bytes()[:numel])

    return cut


def of_two_saves(name, tag=TAG):
    """All files have an identity, and one of them another."""

    def stamp(folder):
        for path in folder.glob("*_states.pt"):
            it = {"id": "b" if path.name == name else "a", "tag": tag, "step": BEFORE}
            torch.save(stamped(torch.load(path, weights_only=False), it), path)

    return stamp


def changed(name, change):
    def rewrite(folder):
        saved = torch.load(folder / name, weights_only=False)
        change(saved)
        torch.save(saved, folder / name)

    return rewrite


def without_a_moment(saved):
    state = saved[STATE][STATE]["state"]
    state[1]["exp_avg"] = state[1]["exp_avg"][:-1]


def with_fewer_elements(saved):
    flats, state = saved[STATE]["fp32_flat_groups"], saved[STATE][STATE]["state"][0]
    flats[0] = flats[0][:-1]
    state |= {key: state[key][:-1] for key in ("exp_avg", "exp_avg_sq")}


MODEL, OTHER_MODEL = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (0, 1)]
FLAT_MODEL = "mp_rank_00_model_states.pt"
OPTIMIZER = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
STATE = "optimizer_state_dict"
OTHER_SHAPE, OTHER_NAME = {"layers.0.weight": (3, 4)}, {"head": (3,)}


def later(saved):
    """What two more updates count."""
    if STATE not in saved:
        saved["global_steps"] += 2
        return
    inner = saved[STATE]
    for state in inner.get(STATE, inner.get("base_optimizer_state"))["state"].values():
        state["step"] += 2


def with_other_weights(saved):
    later(saved)
    next(iter(saved["module"].values())).add_(1)


def without_moments(saved):
    saved[STATE][STATE]["state"] = {}


NOT_WHOLE = "the checkpoint is not whole; load another one"
NOT_ONE = (
    (without(OPTIMIZER), f"{OPTIMIZER} is missing: {NOT_WHOLE}"),
    (without(MODEL), f"{MODEL} is missing: {NOT_WHOLE}"),
    (without(OTHER_MODEL), f"{OTHER_MODEL} is missing: {NOT_WHOLE}"),
    (cut_off(OPTIMIZER), f"{OPTIMIZER} cannot be read, for it is cut off: {NOT_WHOLE}"),
    (cut_off(MODEL), f"{MODEL} cannot be read, for it is cut off: {NOT_WHOLE}"),
    (cut_off(OTHER_MODEL, 0), f"{OTHER_MODEL} cannot be read, for it is cut off: {NOT_WHOLE}"),
    (changed(OPTIMIZER, later), f"{OPTIMIZER} has updates of Adam = 5, and "),
    (changed(OTHER_MODEL, later), f"{OTHER_MODEL} has global_steps = 5, and "),
    (changed(OPTIMIZER, without_moments), f"{OPTIMIZER} has updates of Adam = none"),
    (of_two_saves(OPTIMIZER), f"{OPTIMIZER} is of save b (step 3, tag 'saved'), and "),
)
"""What is done to a folder, and what is said of it, by any number of ranks."""
REFUSED = (
    *NOT_ONE,
    (changed(MODEL, lambda it: it.pop("param_shapes")), "no param_shapes"),
    (changed(MODEL, lambda it: it.update(mp_world_size=2)), "model parallel size 2, here 1"),
    (changed(MODEL, lambda it: it.update(module=None)), "a PipelineModule"),
    (
        changed(MODEL, lambda it: it["param_shapes"][0].update(OTHER_SHAPE)),
        "parameter layers.0.weight of shape (3, 4), here (37, 37)",
    ),
    (
        changed(MODEL, lambda it: it["param_shapes"][0].update(OTHER_NAME)),
        "parameter head of shape (3,), here none",
    ),
    (
        changed(OPTIMIZER, lambda it: it[STATE].pop("fp32_flat_groups")),
        "does not hold 'fp32_flat_groups'",
    ),
    (changed(OPTIMIZER, without_a_moment), "moments of"),
    (changed(OPTIMIZER, with_fewer_elements), "flat tensors of"),
    (changed(OPTIMIZER, lambda it: it[STATE].update(partition_count=7)), "partition_count = 7"),
)
"""The same, by another number of ranks than saved it."""


@contextlib.contextmanager
def harmed(name, saved_by, *harms):
    """The folder of a copy of a checkpoint, to which something was done."""
    folder = shared_folder() / "harmed"
    if RANK == 0:
        shutil.rmtree(folder, ignore_errors=True)  # of a row that failed
        shutil.copytree(folder_of(name, saved_by) / TAG, folder / TAG)
        for harm in harms:
            harm(folder / TAG)
    torch.distributed.barrier()
    yield folder
    torch.distributed.barrier()
    if RANK == 0:
        shutil.rmtree(folder)
    torch.distributed.barrier()


def refuse(_folder, saved_by):
    """All ranks refuse alike, and go on as if they had not been asked."""
    name, trials = "stage 3, bf16", []
    for is_asked in (True, False):
        with Trial(STRIDE) as trial:
            engine = trial.open(CASES[name])
            trial.train(engine, 2)
            refused = NOT_ONE if saved_by == NUM_RANKS else REFUSED
            for harm, says in refused if is_asked else ():
                with harmed(name, saved_by, harm) as folder:
                    told = answer(functools.partial(engine.load_checkpoint, folder, TAG))
                assert told.startswith("CheckpointError"), (says, told)
                assert says in told, told
            trial.train(engine, 2)
        trials.append(trial)
    assert not (found := differences(*trials)), found


def refuse_weights_that_are_not_whole(_folder, saved_by):
    """One file has all weights at stage 2, and moments are not asked for."""
    name = "stage 2, bf16"
    with Trial(STRIDE) as trial:
        engine = trial.open(CASES[name])
        for harm, says in (
            (without(FLAT_MODEL), f"{FLAT_MODEL} is missing: {NOT_WHOLE}"),
            (cut_off(FLAT_MODEL), f"{FLAT_MODEL} cannot be read, for it is cut off: {NOT_WHOLE}"),
        ):
            with harmed(name, saved_by, harm) as folder:
                load = functools.partial(engine.load_checkpoint, folder, TAG)
                told = [answer(load), answer(functools.partial(load, load_module_only=True))]
            assert all(it.startswith("CheckpointError") and says in it for it in told), told


def refuse_weights_of_another_step(_folder, saved_by):
    """Counters that somebody has set are no reason, but for weights that are not the state's."""
    name = "stage 2, bf16"
    with Trial(STRIDE) as trial:
        engine = trial.open(CASES[name])
        with harmed(name, saved_by, changed(FLAT_MODEL, with_other_weights)) as folder:
            told = answer(functools.partial(engine.load_checkpoint, folder, TAG))
        assert told.startswith("CheckpointError"), told
        assert f"{FLAT_MODEL} counts 5 updates" in told, told
        with harmed(name, saved_by, changed(FLAT_MODEL, later)) as folder:
            assert engine.load_checkpoint(folder, TAG)[0] is not None
        assert engine.global_steps == BEFORE + 2
        trial.train(engine, 2)
        assert trial.is_finite


def doubt_counters(_folder, saved_by):
    """At stage 3 the weights are in no file of counters, which somebody may have set."""
    name, harms = "stage 3, bf16", [changed(MODEL, later), changed(OTHER_MODEL, later)]
    with Trial(STRIDE) as trial, mock.patch.object(reshard.logger, "warning") as warning:
        engine = trial.open(CASES[name])
        with harmed(name, saved_by, *harms) as folder:
            warning.reset_mock()
            assert engine.load_checkpoint(folder, TAG)[0] is not None
        told = [str(call) for call in warning.call_args_list if "updates" in str(call)]
        assert len(told) == (RANK == 0), told
        assert all("counts 5 updates" in it and "those of Adam: 3" in it for it in told), told
        trial.train(engine, 2)
        assert trial.is_finite


def refuse_no_moments(_folder, saved_by):
    """Where stock loads it makes new ones, and so it may; nobody else makes them up."""
    name = "stage 3, bf16"
    names = [OPTIMIZER, OPTIMIZER.replace("rank_1", "rank_0")]
    with Trial(STRIDE) as trial:
        engine = trial.open(CASES[name])
        with harmed(name, saved_by, *(changed(it, without_moments) for it in names)) as folder:
            told = answer(functools.partial(engine.load_checkpoint, folder, TAG))
    if saved_by == NUM_RANKS:
        assert told.startswith("no error"), told
    else:
        assert told.startswith("CheckpointError"), told
        assert "has no moments after 3 updates" in told, told


def refuse_another_type(_folder, saved_by):
    with Trial(STRIDE) as trial:
        engine = trial.open(CASES["stage 2, fp16"])
        folder = folder_of("stage 2, bf16", saved_by)
        told = answer(functools.partial(engine.load_checkpoint, folder, TAG))
    assert told.startswith("CheckpointError"), told
    assert "was saved with bf16.enabled = true, and this engine has false" in told, told


def load_a_mixture(_folder, saved_by):
    """Negative control: files are not compared, and one of another step goes unseen."""
    name = "stage 3, bf16"
    with Trial(STRIDE) as trial, mock.patch.object(reshard, "refuse_mixture"):
        engine = trial.open(CASES[name])
        with harmed(name, saved_by, changed(OPTIMIZER, later)) as folder:
            told = answer(functools.partial(engine.load_checkpoint, folder, TAG))
    assert told.startswith("no error"), told


def refuse_another_stage(_folder, saved_by):
    for here, there in ((3, 2), (1, 3)):
        with Trial(STRIDE) as trial:
            engine = trial.open(CASES[f"stage {here}, bf16"])
            folder = folder_of(f"stage {there}, bf16", saved_by)
            told = answer(functools.partial(engine.load_checkpoint, folder, TAG))
            assert told.startswith("CheckpointError"), told
            assert f"stage = {there}, and this engine has {here}" in told, told
    with Trial(STRIDE) as trial:  # which cut alike
        engine = trial.open(CASES["stage 2, bf16"])
        assert engine.load_checkpoint(folder_of("stage 1, bf16", saved_by), TAG)[0] is not None
        trial.train(engine, 2)
        assert trial.is_finite


def as_elastic(saved):
    saved[STATE]["base_optimizer_state"] = [saved[STATE]["base_optimizer_state"]["state"]]


def refuse_elastic(_folder, saved_by):
    name = "stage 2, bf16"
    with Trial(STRIDE) as trial, harmed(name, saved_by, changed(OPTIMIZER, as_elastic)) as folder:
        engine = trial.open(CASES[name])
        told = answer(functools.partial(engine.load_checkpoint, folder, TAG))
    assert told.startswith("CheckpointError"), told
    assert f"in {OPTIMIZER} elastic_checkpoint = true" in told, told


@contextlib.contextmanager
def off_by_one():
    """Negative control: slices are read one element beside their place."""
    true = reshard.overlaps

    def shifted(wanted, held):
        pairs = true(wanted, held)
        return [(to, of._replace(start=max(0, of.start - 1))) for to, of in pairs]

    with mock.patch.object(reshard, "overlaps", shifted):
        yield


def load_wrongly(folder, name, saved_by, control):
    with control():
        told = answer(functools.partial(load_as_converted, folder, name, saved_by))
    assert told.startswith("AssertionError: ["), told


for case_name in CASES:
    ROWS.check(f"save {case_name}", *SAVED_BY, name=case_name)(save_and_convert)
    for number in SAVED_BY:
        given = {"name": case_name, "saved_by": number}
        # Stock, which loads what as many ranks saved, refuses other subgroups.
        others = [ranks for ranks in LOADED_BY if ranks != number or case_name not in LOADED_WITH]
        ROWS.check(f"load {case_name} of {number}", *others, **given)(load_as_converted)
for stage in (2, 3):
    for option, value in (("load_module_only", True), ("load_optimizer_states", False)):
        given = {"stage": stage, "saved_by": 2, option: value}
        ROWS.check(f"load at stage {stage} with {option} of 2", **given)(load_parts)
    given = {"name": f"stage {stage}, bf16", "saved_by": 2, "control": off_by_one}
    ROWS.check(f"load wrongly at stage {stage} of 2", **given)(load_wrongly)
ROWS.check("load nothing that does not fit, of 2", 2, 3, saved_by=2)(refuse)
for what, act in (
    ("that is not whole at stage 2", refuse_weights_that_are_not_whole),
    ("of another step at stage 2", refuse_weights_of_another_step),
    ("without moments", refuse_no_moments),
    ("of another type", refuse_another_type),
):
    ROWS.check(f"load nothing {what}, of 2", 1, 2, saved_by=2)(act)
ROWS.check("load other counters, of 2", 1, 2, saved_by=2)(doubt_counters)
ROWS.check("load a mixture, of 2", 1, 2, saved_by=2)(load_a_mixture)
ROWS.check("load no other stage, of 2", saved_by=2)(refuse_another_stage)
ROWS.check("load nothing elastic, of 2", saved_by=2)(refuse_elastic)
