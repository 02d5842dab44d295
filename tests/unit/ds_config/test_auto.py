"""Who fills ``auto`` in is what the installed frameworks do, and what is said follows from it."""

import copy
import inspect
import json
import re
from types import SimpleNamespace

import pytest
from in_process import ask, explain_or_advise, told

from ds_config.auto import tables
from ds_config.installed import autos, of_auto
from ds_config.mend import fixed

PARAMS = {
    "optimizer": ["lr", "betas", "eps", "weight_decay", "momentum"],
    "scheduler": ["warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps", "gamma"],
}


def all_auto():
    """Every key of the installed DeepSpeed, and those of optimizers and schedulers."""
    table = {}
    for key, fact in ask({}).keys.items():
        if not fact.removed:
            put(table, key, "auto")
    for block, names in PARAMS.items():
        table[block] = {"type": "auto", "params": dict.fromkeys(names, "auto")}
    return table


def put(table, key, value):
    """Lay a value under a key, with its blocks, and return the table."""
    at = table
    for name in key[:-1]:
        at[name] = at[name] if isinstance(at.get(name), dict) else {}
        at = at[name]
    at.setdefault(key[-1], value)
    return table


def filled(before, after):
    return {".".join(key) for key in {*autos(before)} - {*autos(after)}}


def test_the_table_of_transformers_is_what_it_fills_in():
    deepspeed = pytest.importorskip("transformers.integrations.deepspeed")
    table = all_auto()
    config = deepspeed.HfTrainerDeepSpeedConfig(copy.deepcopy(table))
    ones = (
        "world_size per_device_train_batch_size gradient_accumulation_steps max_grad_norm "
        "learning_rate adam_beta1 adam_beta2 adam_epsilon weight_decay fp16 bf16 fp16_full_eval "
        "bf16_full_eval"
    )
    args = SimpleNamespace(**dict.fromkeys(ones.split(), 1), save_on_each_node=False)
    args.get_warmup_steps = lambda steps: steps
    config.trainer_config_process(args)
    config.is_zero3 = lambda: True
    config.trainer_config_finalize(args, SimpleNamespace(config=SimpleNamespace(hidden_size=8)), 9)
    own = filled(table, config.config)
    assert len(own) > 10
    assert own | tables()["accelerate"].keys() == tables()["transformers"].keys()
    assert config.config["zero_optimization"]["stage3_prefetch_bucket_size"] == int(0.9 * 64)


def test_the_table_of_accelerate_is_what_it_fills_in_and_the_rest_is_an_error():
    accelerate = pytest.importorskip("accelerate")
    table = all_auto()
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config=copy.deepcopy(table))
    plugin.set_mixed_precision("bf16")
    source = inspect.getsource(accelerate.Accelerator._prepare_deepspeed)
    later = {*re.findall(r'"([\w.]+)"(?:: |\] = )', source)}
    early = filled(table, plugin.deepspeed_config)
    known = {".".join(key) for key in autos(table)}
    assert early | later & known | {"gradient_accumulation_steps"} == tables()["accelerate"].keys()
    for name in ("zero_optimization.sub_group_size", "deep_optimizer_states.policy"):
        rest = put({}, tuple(name.split(".")), "auto")
        plugin.hf_ds_config.config |= rest
        with pytest.raises(ValueError, match=name):
            plugin.deepspeed_config_process(config=rest)


ALONE = {
    "zero_optimization.stage": "default",
    "zero_optimization.sub_group_size": "default",
    "zero_optimization.offload_optimizer.device": "default",
    "fp16.enabled": "default",
    "gradient_clipping": "text",
    "steps_per_print": "text",
    "prescale_gradients": "text",
    "optimizer.type": "text",
    "aio.block_size": "text",
    "train_batch_size": "refused",
    "gradient_accumulation_steps": "refused",
    "communication_data_type": "refused",
    "checkpoint.tag_validation": "refused",
    "pipeline.stages": "default",
}


@pytest.mark.parametrize("name", ALONE)
def test_the_loader_is_asked_what_it_does_with_an_auto(name):
    assert of_auto(tuple(name.split(".")))[0] == ALONE[name]


def config(**more):
    return {"train_batch_size": 8, "fp16": {"enabled": True}, **more}


FILLED = {"gradient_clipping": "auto"}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": 1e-8}}}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "kind": "auto"}}}
STAGE = {"zero_optimization": {"stage": "auto"}}
SUBGROUP = {"zero_optimization": {"stage": 3, "sub_group_size": "auto"}}
POLICY = {"deep_optimizer_states": {"policy": "auto"}}
JUDGED = [
    (FILLED, "transformers", [], []),
    (FILLED, "accelerate", [], []),
    (FILLED, "none", ["gradient_clipping"], []),
    (ADAM, "transformers", [], []),
    (ADAM, "accelerate", ["optimizer.params.betas"], []),
    (ADAM, "none", ["optimizer.params.lr", "optimizer.params.betas"], []),
    (WARMUP, "transformers", ["scheduler.params.kind"], []),
    (STAGE, "transformers", [], []),
    (STAGE, "none", [], ["zero_optimization.stage"]),
    (SUBGROUP, "transformers", ["zero_optimization.sub_group_size"], []),
    (SUBGROUP, "accelerate", ["zero_optimization.sub_group_size"], []),
    (SUBGROUP, "none", [], ["zero_optimization.sub_group_size"]),
    (SUBGROUP, "", [], ["zero_optimization.sub_group_size"]),
    (FILLED | SUBGROUP, "", ["zero_optimization.sub_group_size"], []),
    ({"prescale_gradients": "auto"}, "none", ["prescale_gradients"], []),
    ({"data_types": {"keep_in_fp32_modules": "auto"}}, "", [], []),
    (POLICY, "none", [], []),
    (POLICY, "accelerate", ["deep_optimizer_states.policy"], []),
]  # fmt: skip


@pytest.mark.parametrize(("block", "framework", "faults", "warnings"), JUDGED)
def test_an_auto_is_judged_by_who_hands_the_configuration_over(block, framework, faults, warnings):
    found = told(config(**block), framework=framework)
    assert [note.key for note in found.faults] == faults
    assert [note.key for note in found.warnings if "= auto" in note.text] == warnings


def test_where_no_framework_is_named_each_case_is_told(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config(**FILLED, **STAGE)))
    assert explain_or_advise(["explain", path]) == 0
    text = capsys.readouterr().out
    assert "would take this configuration from Hugging Face's Trainer or accelerate alone" in text
    assert "max_grad_norm (Hugging Face's Trainer)" in text
    alone = text.partition("  deepspeed.initialize alone\n")[2]
    assert "stays a text and ends with an error where the number is needed: gradient_clip" in alone
    assert "is dropped for the default, 0: zero_optimization.stage" in alone
    assert explain_or_advise(["explain", path, "--framework", "none"]) == 1
    assert "it would refuse this configuration" in capsys.readouterr().out


def test_an_auto_inside_params_has_a_line():
    found = told(config(**ADAM))
    (line,) = [line for line in found.keys if line.key == "optimizer.params.betas"]
    assert line.auto.startswith("adam_beta1 and adam_beta2 (Hugging Face's Trainer)")
    assert "handed to the optimizer as a text" in line.auto


def test_an_auto_of_nobodys_is_left_out_of_a_corrected_copy():
    table = config(**FILLED, **SUBGROUP)
    result, changes = fixed(table, ask(table))
    assert result["zero_optimization"] == {"stage": 3}
    assert changes == ['zero_optimization.sub_group_size: left out; it was "auto"']


def test_stage_auto_handed_to_deepspeed_is_stage_0():
    zero = {"stage": "auto", "stage3_prefetch_bucket_size": 1e6}
    found = told(config(zero_optimization=zero), framework="none")
    assert "does nothing at stage 0" in {note.text for note in found.warnings}


@pytest.mark.parametrize("framework", ["transformers", "accelerate", "none"])
def test_a_configuration_without_auto_is_explained_for_any_framework(framework):
    found = told({"train_batch_size": 8, "zero_optimization": {"stage": 2}}, framework=framework)
    assert found.is_accepted
    assert found.auto == []
