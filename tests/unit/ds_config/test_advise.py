"""The ladder, its choice and its JSON."""

import dataclasses
import json

import pytest
from in_process import explain_or_advise

from deep_optimizer_states.predict.huggingface import model_of_config
from deep_optimizer_states.predict.memory import GIB
from ds_config.advise import (
    CHECKPOINTING,
    GLIBC,
    NARROW,
    Room,
    Task,
    chosen,
    ladder,
    notes_of,
)

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
TASK = Task(model_of_config(LLAMA), 2048, 4, "bf16")
FASTEST_FIRST = [
    "stage 0, batch 4",
    "batch 1",
    "checkpointing",
    "stage 1",
    "stage 2",
    "stage 2 + optimizer offload",
    "stage 3",
    "stage 3 + parameter offload",
    "stage 3 + optimizer offload, ours",
    "stage 3 + both offloads",
    "smaller buckets",
    "half precision",
    "16-bit states, ours",
    "16-bit states + parameter offload, ours",
    "optimizer on NVMe",
    "parameters on NVMe",
]


def room(gpus=1, device=24, host=128, **fields):
    return Room(gpus, gpus, device and device * GIB, host * GIB, **fields)


def advise(capsys, *words, code=0):
    assert explain_or_advise(["advise", *words]) == code
    return capsys.readouterr()


def as_json(capsys, *words, code=0):
    return json.loads(advise(capsys, *words, "--json", code=code).out)


def test_the_ladder_has_every_rung_of_the_guide_in_its_order():
    task = dataclasses.replace(TASK, dtype="fp32")
    assert [rung.name for rung in ladder(task, room(nvme="/disk"))] == FASTEST_FIRST
    rungs = ladder(TASK, room(gpus=8))
    # A smaller batch is made up for by accumulation.
    assert {rung.config["train_batch_size"] for rung in rungs} == {32}
    names = [rung.name for rung in rungs]
    assert names == [n for n in FASTEST_FIRST if "NVMe" not in n and n != "half precision"]


@pytest.mark.parametrize(
    ("gpus", "device", "host", "name"),
    [
        (1, 192, 64, "stage 0, batch 4"),
        (8, 40, 256, "stage 2"),
        (1, 24, 128, "stage 3 + optimizer offload, ours"),
        (1, 8, 160, "stage 3 + both offloads"),
        (1, 12, 96, "16-bit states + parameter offload, ours"),
        (1, 24, 64, None),
    ],
)
def test_the_fastest_that_fits_is_taken(gpus, device, host, name):
    rungs = ladder(TASK, room(gpus, device, host))
    best = chosen(rungs)
    assert (None if best is None else rungs[best].name) == name
    assert all(not rung.fits for rung in rungs[:best])


@pytest.mark.parametrize("name", ["stage 3 + both offloads", "stage 2"])
def test_every_phase_of_every_rank_has_to_fit(name):
    """Each rank reads the whole model before stage 2 cuts its state, which takes most there."""

    def rung(host):
        return next(one for one in ladder(TASK, room(8, 80, host)) if one.name == name)

    peaks = rung(10_000).peaks
    assert (peaks.load.host_bytes > 2 * peaks.train.host_bytes) == (name == "stage 2")
    need = 8 * peaks.host_bytes / 0.97 / GIB
    assert rung(need * 1.01).fits
    assert not rung(need * 0.99).fits


def test_7b_on_one_gpu_of_24_and_a_host_of_64_fits_with_eight_bytes_a_parameter(capsys):
    words = ("--model", "7B", "--gpus", 1, "--gpu-memory", 24, "--host-memory", 64)
    found = as_json(capsys, *words, "--micro-batch", 1)
    assert found["chosen"] == "16-bit states, ours"
    assert found["predicted"] is True
    keys = {"name", "device_bytes", "host_bytes", "fits", "iteration_s"}
    assert all(keys <= set(rung) for rung in found["rungs"])
    assert found["config"]["bf16"]["bf16_master_weights_and_grads"] is True
    assert found["config"]["optimizer"]["params"]["fp32_optimizer_states"] is False
    rung = next(rung for rung in found["rungs"] if rung["name"] == found["chosen"])
    assert rung["host_bytes"] - 5 * GIB == pytest.approx(8 * found["parameters"], rel=0.03)
    assert any("16-bit states round" in note for note in found["notes"])


def test_where_nothing_fits_it_is_said_what_is_short_and_what_to_try(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    words = ("--model", path, "--gpus", 1, "--gpu-memory", 24, "--host-memory", 64)
    found = as_json(capsys, *words, code=1)
    (note,) = found["notes"]
    assert note in advise(capsys, *words, code=1).out
    nearest = next(rung for rung in found["rungs"] if rung["name"] == "16-bit states, ours")
    lack = nearest["short_bytes"]["host"]
    assert set(nearest["short_bytes"]) == {"host"}
    assert lack == pytest.approx(nearest["host_bytes"] - 0.97 * 64 * GIB, abs=1)
    assert note.startswith(
        f"'16-bit states, ours' comes nearest: host memory is short by {lack / GIB:.1f} GiB "
        f"({nearest['host_bytes'] / GIB:.1f} needed, 62.1 may be taken); try --nvme FOLDER"
    )
    for more in (("--nvme", tmp_path), ("--micro-batch", 1), ("--gpus", 2, "--gpus-per-node", 1)):
        assert as_json(capsys, *words, *more)["chosen"]


def test_time_is_known_where_the_performance_model_reaches(capsys):
    found = as_json(capsys, "--model", "7B", "--gpus", 4, "--machine", "h100x4")
    times = {rung["name"]: rung["iteration_s"] for rung in found["rungs"]}
    assert times["stage 3"] < times["stage 3 + optimizer offload, ours"]
    known = {name for name, seconds in times.items() if seconds is not None}
    both = "stage 3 + both offloads"
    assert known == {"stage 3", "stage 3 + optimizer offload, ours", both}
    why = {rung["name"]: rung["no_time"] for rung in found["rungs"]}
    assert {name for name, reason in why.items() if not reason} == known
    for name in ("stage 0, batch 4", "stage 1", "stage 2", "stage 2 + optimizer offload"):
        assert why[name] == "the performance model knows ZeRO stage 3 alone"
    assert "fp32 states" in why["16-bit states, ours"]
    text = advise(capsys, "--model", "7B", "--gpus", 4, "--machine", "h100x4").out
    assert "unknown" in text
    assert f"stage 2 + optimizer offload: {why['stage 2']}" in text


@pytest.mark.parametrize("idx", [0, 3, 8, 12, 13, -1])
def test_deepspeed_s_own_loader_and_explain_take_the_configuration(tmp_path, capsys, idx):
    """Explain asks DeepSpeed itself; of the rungs these differ most."""
    rung = ladder(dataclasses.replace(TASK, dtype="fp32"), room(nvme=str(tmp_path)))[idx]
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(rung.config))
    assert explain_or_advise(["explain", path]) == 0, capsys.readouterr().out
    assert "was not asked" not in capsys.readouterr().err


def test_the_winner_is_written_to_a_new_file_alone(tmp_path, capsys):
    path = tmp_path / "mine.json"
    words = ("--model", "7B", "--gpus", 1, "--gpu-memory", 24, "--host-memory", 128, "--out", path)
    found = as_json(capsys, *words)
    assert json.loads(path.read_text()) == found["config"]
    path.write_text("mine")
    assert f"--out {path}: is already there" in advise(capsys, *words, code=2).err
    assert path.read_text() == "mine"


def test_a_config_json_of_hugging_face_is_a_model_without_a_time(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for path in (tmp_path, tmp_path / "config.json"):
        found = as_json(capsys, "--model", path, "--gpus", 1, "--machine", "h200x1")
        assert found["parameters"] == 6_738_415_616  # Llama 2 7B's own count
        reasons = {rung["no_time"] for rung in found["rungs"]}
        assert reasons == {"the performance model knows megatron-core's models alone"}


def test_notes_apply_where_they_are_true():
    rungs = {rung.name: rung for rung in ladder(TASK, room())}
    assert notes_of(rungs["batch 1"], room()) == []
    assert notes_of(rungs["stage 2"], room()) == [CHECKPOINTING]
    assert notes_of(rungs["16-bit states, ours"], room()) == [CHECKPOINTING, NARROW]
    assert notes_of(rungs["batch 1"], room(device=None)) == [GLIBC]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "7C", "--machine", "h100x4"), "unknown model '7C': did you mean"),
        (("--model", "7B", "--machine", "h10x4"), "unknown machine 'h10x4'"),
        (("--model", "7B"), "--machine is missing"),
        (("--model", "7B", "--gpu-memory", 24), "--machine is missing"),
        (("--model", "no.json", "--machine", "h100x4"), "no.json: cannot be read"),
    ],
)
def test_a_wrong_argument_is_named(capsys, words, message):
    error = advise(capsys, *words, "--gpus", 4, code=2).err
    assert message in error
    assert error.count("\n") == 1
