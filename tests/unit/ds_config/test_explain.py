"""What is said of a configuration, and that DeepSpeed's own loader agrees."""

import copy
import dataclasses
import importlib.metadata
import json

import pytest
from in_process import VERSION, ask, explain_or_advise, refuses, told

from ds_config.document import read_config
from ds_config.explain import as_text, explain, walk
from ds_config.mend import fixed

GOOD = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": False,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "activation_checkpointing": {"partition_activations": True},
    "wall_clock_breakdown": False,
}


def notes(found):
    return {note.key: f"{note.text}; {note.remedy}" for note in (*found.unknown, *found.faults)}


def test_a_good_configuration_is_accepted_and_every_key_is_told():
    found = told(GOOD)
    assert found.is_accepted
    assert {line.key for line in found.keys} == {
        ".".join(key)
        for key, _ in walk(GOOD, ())
        if key[:2] != ("optimizer", "params") or len(key) == 2
    }
    assert all(line.meaning for line in found.keys)
    auto = {line.key: line.auto for line in found.keys if line.auto}
    assert auto["zero_optimization.reduce_bucket_size"].startswith("hidden size squared")
    assert auto["zero_optimization.stage3_prefetch_bucket_size"].startswith(
        "0.9 x hidden size squared"
    )
    assert auto["zero_optimization.stage3_param_persistence_threshold"].startswith(
        "10 x hidden size"
    )


BROKEN = {
    "misspelled": (("gradient_cliping",), 1.0, "did you mean gradient_clipping"),
    "misplaced": (("zero_optimization", "fp16"), {"enabled": True}, "move it to the top level"),
    "foreign in a model": (("fp16", "frobnicate"), 1, "raises an error"),
    "foreign at the top": (("frobnicate",), 1, "read by nobody"),
    "removed": (("elasticity",), {"enabled": False}, "is removed"),
    "removed in ZeRO": (("zero_optimization", "mics_shard_size"), 8, "leave it out"),
    "text for a number": (("train_batch_size",), "16", "number without quotes"),
    "text for a switch": (("prescale_gradients",), "false", "write false without quotes"),
    "zero": (("train_micro_batch_size_per_gpu",), 0, "1 or more"),
    "no stage": (("zero_optimization", "stage"), 4, "1, 2 or 3"),
    "no device": (("zero_optimization", "offload_optimizer", "device"), "gpu", "'none', 'cpu'"),
    "beyond a limit": (("zero_optimization", "reduce_bucket_size"), 0, "greater than 0"),
    "no block": (("zero_optimization", "offload_optimizer"), "cpu", "give an object"),
    "a share below stage 3": (("zero_optimization",),
                              {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
                              "= 0.5 goes with stage 3 alone: at stage 2 DeepSpeed refuses it"),
    "nvme without a path": (("zero_optimization", "offload_param"), {"device": "nvme"}, "folder"),
}  # fmt: skip


READ_ON = {
    "prescale_gradients",
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "offload_param",
}
"""Keys of which the loader takes a wrong value, and the engine does not."""


def put(table, key, value):
    table = copy.deepcopy(table)
    at = table
    for block in key[:-1]:
        at = at.setdefault(block, {})
    at[key[-1]] = value
    return table


ADAMW = {"type": "AdamW", "params": {"lr": "1e-5"}}
NAMED = {
    "both kinds of 16 bits": ({"fp16": {"enabled": True}, "bf16": {"enabled": True}},
                              "bf16.enabled", "set one of the two to false", {}),
    "a rate in quotes": ({"optimizer": ADAMW}, "optimizer.params.lr", "number without quotes",
                         {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}),
    "steps in quotes": ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "9"}}},
                        "scheduler.params.warmup_num_steps", "number without quotes",
                        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}),
    "null for a block": ({"zero_optimization": None}, "zero_optimization", "leave it out",
                         {"zero_optimization": ...}),
    "other capitals": ({"FP16": {"enabled": True}}, "FP16", "did you mean fp16?",
                       {"FP16": ..., "fp16": {"enabled": True}}),
    "only alike": ({"pipe-parallel-size": 2}, "pipe-parallel-size", "Else leave it out",
                   {"pipe-parallel-size": ..., "sequence_parallel_size": ...}),
    "the block's own name": ({"fp16": {"fp16": True, "enabled": True}}, "fp16.fp16",
                             "leave it out", {"fp16": {"enabled": True}}),
    "the plugin's block, misspelled": ({"deep-optimizer-state": {"enabled": True}},
                                       "deep-optimizer-state",
                                       "did you mean deep_optimizer_states?",
                                       {"deep_optimizer_states": {"enabled": True}}),
    "the plugin's block, misplaced": ({"fp16": {"deep_optimizer_states": {"enabled": True}}},
                                      "fp16.deep_optimizer_states", "move it to the top level",
                                      {"deep_optimizer_states": {"enabled": True}}),
    "a negative batch": ({"train_batch_size": -8}, "train_batch_size", "1 or more", {}),
}  # fmt: skip


@pytest.mark.parametrize(("table", "key", "words", "mended"), NAMED.values(), ids=NAMED)
def test_a_wrong_value_is_named_once_by_its_key(table, key, words, mended):
    table = {"train_batch_size": 8, **table}
    found = told(table)
    ((name, said),) = [(one.key, one.remedy) for one in (*found.unknown, *found.faults)]
    assert name == key
    assert words in said
    result, changes = fixed(table, ask(table))
    assert bool(changes) == bool(mended)
    for block, value in mended.items():
        assert result.get(block, ...) == value


@pytest.mark.parametrize(("key", "value", "words"), BROKEN.values(), ids=BROKEN)
def test_what_is_wrong_is_named_with_its_remedy(key, value, words):
    table = put(GOOD, key, value)
    found = told(table)
    assert not found.is_accepted
    assert not refuses(GOOD)
    assert refuses(table) or found.unknown or key[-1] in READ_ON, "the loader reads on"
    said = notes(found)
    assert len(said) == len(found.unknown) + len(found.faults), "each key is named once"
    assert words in said[next(name for name in said if name.startswith(".".join(key)))]
    before = copy.deepcopy(table)
    result, changes = fixed(table, ask(table))
    assert changes or not found.unknown
    assert not told(result).unknown
    assert table == before


def test_what_the_loader_alone_refuses_is_told_in_its_words():
    table = put(GOOD, ("checkpoint", "tag_validation"), "perhaps")
    assert "tag_validation" in notes(told(table))["(DeepSpeed)"]
    # It is told beside keys that do nothing, and not beside faults, which it may repeat.
    table = put(GOOD, ("gradient_allreduce_op",), "sum")
    assert "ZeRO stage 3" in notes(told(table))["(DeepSpeed)"]
    assert notes(told(put(table, ("frobnicate",), 1))).keys() == {"(DeepSpeed)", "frobnicate"}
    assert notes(told({"steps_per_print": 1})).keys() == {"train_batch_size"}


@pytest.mark.parametrize(
    ("batch", "ranks", "words"),
    [
        ((32, 4, 3), 2, "give train_batch_size = 24"),
        ((24, 4, 3), 2, ""),
        ((24, 4, 3), None, ""),
        ((30, 4), 2, "give a multiple of 8"),
        ((2, 4), None, "give 4 or more"),
        ((), None, "give one of them"),
    ],
)
def test_the_arithmetic_of_batches_is_checked(batch, ranks, words):
    """A loader without ranks finds no fault with batches of several."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    found = told(dict(zip(names, batch, strict=False)), num_ranks=ranks)
    assert found.is_accepted == (not words)
    assert words in notes(found).get("train_batch_size", "")


def warned(found):
    return {note.key: note.text for note in found.warnings}


def test_what_the_stage_ignores_is_told_and_accepted():
    found = told(put(GOOD, ("zero_optimization", "stage"), 2))
    assert found.is_accepted
    assert (
        warned(found)["zero_optimization.stage3_prefetch_bucket_size"] == "does nothing at stage 2"
    )
    assert "zero_optimization.offload_optimizer" not in warned(found)


@pytest.mark.parametrize(("stage", "words"), [(2, "0.8 GB"), (3, None), (0, "does nothing")])
def test_overlap_is_priced_at_the_bucket_that_it_adds(stage, words):
    zero = {"stage": stage, "overlap_comm": True, "reduce_bucket_size": 2e8}
    table = {"train_batch_size": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    found = told(table)
    text = warned(found).get("zero_optimization.overlap_comm")
    assert words in text if words else text is None
    costs = {line.key: line.cost_bytes for line in found.keys if line.cost_bytes}
    assert costs == ({"zero_optimization.reduce_bucket_size": 4e8} if stage else {})


@pytest.mark.parametrize(
    ("stage", "ratio", "block", "is_warned"),
    [
        (3, 0.8, {}, True),
        (3, 0.8, {"enabled": False}, True),
        (3, 0.8, {"enabled": True}, False),
        (3, 1.0, {}, False),
        (2, 0.8, {}, False),
    ],
)
def test_a_share_on_the_gpu_keeps_its_learning_rate(stage, ratio, block, is_warned):
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu", "ratio": ratio}}
    found = told({"train_batch_size": 1, "zero_optimization": zero, "deep_optimizer_states": block})
    text = warned(found).get("zero_optimization.offload_optimizer.ratio", "")
    assert ("whatever a scheduler says" in text) == is_warned


def test_a_comment_is_no_misspelling():
    found = told({"train_batch_size": 1, "_comment": "of mine", "comment": "too"})
    assert found.is_accepted
    assert {"_comment", "comment"} <= warned(found).keys()
    inside = told({"train_batch_size": 1, "fp16": {"_enabled": "DeepSpeed raises here"}})
    assert notes(inside) == {
        "fp16._enabled": f"no key of DeepSpeed {VERSION}: it raises an error; leave it out"
    }


def test_a_key_of_other_releases_is_told_as_such():
    table = {"train_batch_size": 1, "zero_optimization": {"stage": 2, "cpu_offload": True}}
    answer = ask(table)
    keys = {key: fact for key, fact in answer.keys.items() if key[-1] != "cpu_offload"}
    said = notes(explain(table, dataclasses.replace(answer, keys=keys)))
    text = f"a key of other releases than DeepSpeed {VERSION}: here it raises an error"
    assert said == {"zero_optimization.cpu_offload": f"{text}; leave it out"}


@pytest.mark.parametrize("zero", [{"overlap_com": True}, {"compute_grad_norm": False}])
def test_a_key_for_which_deepspeed_raises_is_not_said_to_do_nothing(tmp_path, capsys, zero):
    path = tmp_path / "file.json"
    table = {"train_batch_size": 1, "zero_optimization": {"stage": 3, **zero}}
    path.write_text(json.dumps(table))
    assert refuses(table)
    assert explain_or_advise(["explain", str(path)]) == 1
    text = capsys.readouterr().out
    assert "it would refuse this configuration." in text
    assert f"{next(iter(zero))}: does nothing" not in text


def test_a_corrected_copy_lies_beside_and_replaces_nothing(tmp_path, capsys):
    path, copied = tmp_path / "mine.json", tmp_path / "mine.fixed.json"
    text = '{"train_batch_size": "8", "gradient_cliping": 1, "elasticity": {},} // mine'
    path.write_text(text)
    assert explain_or_advise(["explain", path, "--fix"]) == 1
    assert path.read_text() == text
    assert json.loads(copied.read_text()) == {"train_batch_size": 8, "gradient_clipping": 1}
    assert not refuses(json.loads(copied.read_text()))
    capsys.readouterr()
    copied.write_text('{"train_batch_size": 1}')
    assert explain_or_advise(["explain", copied, "--fix"]) == 0
    told_of = capsys.readouterr()
    assert "would take" in told_of.out
    assert told_of.err == "--fix: nothing to mend\n"
    assert explain_or_advise(["explain", path, "--fix"]) == 2
    assert f"--fix {copied}: is already there" in capsys.readouterr().err
    assert copied.read_text() == '{"train_batch_size": 1}'


def test_what_is_left_in_a_corrected_copy_is_told_last(tmp_path, capsys):
    path = tmp_path / "mine.json"
    block = {"enabled": True, "polcy": 3}
    table = {"train_batch_size": "8", "scheduler": {"type": "WarmupXX"}}
    path.write_text(json.dumps({**table, "deep_optimizer_state": block}))
    assert explain_or_advise(["explain", path, "--fix"]) == 1
    lines = capsys.readouterr().err.splitlines()
    left = lines[lines.index(f"--fix: {tmp_path / 'mine.fixed.json'}") + 1 :]
    assert [line.partition(": = ")[0].partition(": is")[0] for line in left] == [
        "--fix: left to you: scheduler.type",
        "--fix: left to you: deep_optimizer_states",
    ]
    assert 'did you mean "policy"' in left[1]
    good = tmp_path / "good.json"
    good.write_text('{"train_batch_size": "8"}')
    assert explain_or_advise(["explain", good, "--fix"]) == 1
    assert capsys.readouterr().err.endswith("good.fixed.json\n--fix: no fault is left in it\n")


def test_older_names_are_written_anew():
    older = {
        "cpu_offload": True,
        "cpu_offload_param": False,
        "cpu_offload_use_pin_memory": True,  # two keys took its place
        "stage3_gather_fp16_weights_on_model_save": True,
    }
    table = {"train_batch_size": 1, "zero_optimization": {"stage": 3, **older}}
    result, changes = fixed(table, ask(table))
    assert result["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "none"},
        "cpu_offload_use_pin_memory": True,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    assert changes[0] == "zero_optimization.cpu_offload: now offload_optimizer"


def test_comments_and_trailing_commas_are_read_and_named(tmp_path):
    path = tmp_path / "guide.json"
    path.write_text('{"train_batch_size": 8,\n"tag": "a//b,}", // ,}\n"x": 1, }')
    loaded = read_config(path)
    assert loaded.table == {"train_batch_size": 8, "tag": "a//b,}", "x": 1}
    assert loaded.warnings[0].text.startswith("is no strict JSON (")
    assert "line 2 column 18" in loaded.warnings[0].text
    assert "DeepSpeed reads it" in loaded.warnings[0].text
    path.write_text('{"train_batch_size": 8}')
    assert not read_config(path).warnings


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "holds [1] and no object"),
        ("null", "holds null and no object"),
        ("{}", "is empty: give DeepSpeed's configuration"),
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("\xff", "no text in UTF-8"),
        ('{"name": "x", "version": 1}', "no key of DeepSpeed"),
        (None, "No such file"),
    ],
)
def test_what_is_no_configuration_ends_with_2(tmp_path, capsys, text, words):
    path = tmp_path / "file.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    assert explain_or_advise(["explain", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_json_has_what_the_text_has(tmp_path, capsys):
    path = tmp_path / "file.json"
    path.write_text('{"train_batch_size": 1, "train_batch_size": 2, "frobnicate": 2}')
    assert explain_or_advise(["explain", path, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [note["key"] for note in found["unknown"]] == ["frobnicate"]
    assert found["keys"][0]["key"] == "train_batch_size"
    assert ["given twice" in note["text"] for note in found["faults"]] == [True]


def test_the_installed_release_is_asked_in_a_process_of_its_own(tmp_path, capsys, real_process):
    """It judges by a rule that its models have in code alone."""
    path = tmp_path / "file.json"
    path.write_text('{"train_batch_size": 8, "fp16": {"enabled": true, "loss_scale": -1}}')
    assert explain_or_advise(["explain", str(path)]) == 1
    assert "fp16.loss_scale: is refused: " in capsys.readouterr().out


def test_without_deepspeed_one_line_says_so(tmp_path, capsys, monkeypatch, real_process):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    path = tmp_path / "file.json"
    path.write_text('{"train_batch_size": 8}')
    assert explain_or_advise(["explain", str(path)]) == 2
    error = capsys.readouterr().err
    assert "error: DeepSpeed is not installed here" in error
    assert error.endswith("pip install deepspeed\n")
    assert error.count("\n") == 1
    assert [*tmp_path.iterdir()] == [path]


def test_a_deepspeed_that_does_not_answer_is_named(tmp_path, capsys, monkeypatch, real_process):
    path, program = tmp_path / "file.json", tmp_path / "installed.py"
    path.write_text('{"train_batch_size": 8}')
    program.write_text("raise ImportError('no torch')")
    monkeypatch.setattr("ds_config.release.PROGRAM", program)
    assert explain_or_advise(["explain", str(path)]) == 2
    assert "could not be asked: it cannot be imported: ImportError: no torch" in (
        capsys.readouterr().err
    )
    program.write_text("print('{')")
    assert explain_or_advise(["explain", str(path)]) == 2
    assert "no answer that can be read" in capsys.readouterr().err


def test_a_number_of_ranks_is_checked(tmp_path):
    path = tmp_path / "file.json"
    path.write_text(json.dumps({"train_batch_size": 3}))
    assert explain_or_advise(["explain", path, "--ranks", "3"]) == 0
    assert explain_or_advise(["explain", path, "--ranks", "2"]) == 1


def test_a_file_around_the_configuration_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ds_config.__main__.ask", ask)
    path = tmp_path / "around.json"
    path.write_text(json.dumps({"deepspeed": GOOD, "seed_of_data": 1}))
    assert explain_or_advise(["explain", path]) == 2
    assert "at its top, but deepspeed, seed_of_data: give" in capsys.readouterr().err


def test_the_plugins_block_is_said_to_need_the_plugin():
    table = {"train_batch_size": 1, "deep_optimizer_states": {"enabled": True}}
    (line,) = (one for one in told(table).keys if one.key == "deep_optimizer_states")
    assert "only after deep_optimizer_states.install()" in line.meaning
    assert "python -m deep_optimizer_states run" in line.meaning


OFFLOADED = {
    "train_batch_size": 8,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "deep_optimizer_states": {"enabled": True},
}
OF_OFFLOAD = ("zero_optimization", "offload_optimizer")
EARLY = {"enabled": True, "step_before_norm": True}
REFUSED_BY_THE_PLUGIN = {
    "an unknown key": ({"deep_optimizer_states": {"polcy": "stride"}}, 'did you mean "policy"?'),
    "a switch": ({"deep_optimizer_states": {"enabled": "maybe"}}, "valid boolean"),
    "a number": (
        {"deep_optimizer_states": {"policy": "stride", "stride": -1}}, '.stride" = -1: '),
    "no block": ({"deep_optimizer_states": True}, "give a table such as"),
    "another optimizer": ({"optimizer": {"type": "Lion"}}, 'set it to "Adam" or "AdamW"'),
    "nvme": (
        {OF_OFFLOAD: {"device": "nvme", "nvme_path": "/x"}}, "offload_optimizer.device = nvme"),
    "no offload": ({OF_OFFLOAD: None}, 'offload_optimizer.device = none: set it to "cpu"'),
    "a share": ({OF_OFFLOAD: {"device": "cpu", "ratio": 0.5}}, "offload_optimizer.ratio = 0.5"),
    "early and clipped": (
        {"deep_optimizer_states": EARLY, "gradient_clipping": 1.0}, "gradient_clipping = 1.0"),
    "early in fp16": (
        {"deep_optimizer_states": EARLY, "bf16": {}, "fp16": {"enabled": True}}, "true and fp16"),
    "early at stage 2": (
        {"deep_optimizer_states": EARLY, ("zero_optimization", "stage"): 2}, "or use stage 3"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "words"), REFUSED_BY_THE_PLUGIN.values(), ids=REFUSED_BY_THE_PLUGIN
)
def test_what_the_plugin_refuses_is_told_in_its_words(changed, words):
    table = OFFLOADED
    for key, value in changed.items():
        table = put(table, (key,) if isinstance(key, str) else key, value)
    found = told(table)
    assert told(OFFLOADED).is_accepted
    assert not refuses(table), "DeepSpeed takes it"
    (note,) = found.faults
    assert note.key == "deep_optimizer_states"
    assert words in note.text
    assert "the plugin would refuse this configuration." in as_text("file.json", found)
    if "deep_optimizer_states" not in changed:
        off = told(put(table, ("deep_optimizer_states",), {"enabled": False}))
        assert off.is_accepted, "stock trains it"


def test_what_a_framework_may_fill_in_is_not_refused_by_the_plugin():
    zero = {"stage": "auto", "offload_optimizer": {"device": "auto"}}
    table = {**OFFLOADED, "zero_optimization": zero, "gradient_clipping": "auto"}
    assert told(table, framework="accelerate").is_accepted
    table["optimizer"] = {"type": "Lion"}
    (note,) = told(table, framework="accelerate").faults
    assert "optimizer.type = lion: " in note.text
    assert "offload" not in note.text


def test_what_the_plugin_refuses_is_told_beside_what_deepspeed_refuses():
    table = put(OFFLOADED, ("fp16",), {"enabled": "perhaps"})
    table = put(table, ("deep_optimizer_states", "polcy"), 1)
    assert notes(told(table)).keys() == {"fp16.enabled", "deep_optimizer_states"}
    block = {"enabled": True, "policy": "auto", "stride": 2}
    assert told(put(OFFLOADED, ("deep_optimizer_states",), block)).is_accepted
