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
    NodeMemory,
    Training,
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
TASK = Training(model_of_config(LLAMA), 2048, 4, "bf16")
NAMES = [
    "stage 0",
    "stage 1",
    "stage 2",
    "stage 3",
    "stage 3 + parameter offload",
    "stage 2 + optimizer offload, ours",
    "stage 1 + optimizer offload, ours",
    "stage 3 + optimizer offload, ours",
    "stage 2 + optimizer offload",
    "stage 1 + optimizer offload",
    "stage 3 + optimizer offload",
    "stage 3 + both offloads, ours",
    "stage 3 + both offloads",
    "smaller buckets",
    "half precision",
    "16-bit states, ours",
    "16-bit states + parameter offload, ours",
    "optimizer on NVMe",
    "parameters on NVMe",
]
CHANGED = {name for name in NAMES if "16-bit" in name or "NVMe" in name or name == "half precision"}
"""Those in which fp32 is not trained as it was asked for."""


def room(gpus=1, device=24, host=128, **fields):
    return NodeMemory(gpus, gpus, device and device * GIB, host * GIB, **fields)


def advise(capsys, *words, code=0):
    assert explain_or_advise(["advise", *words]) == code
    return capsys.readouterr()


def as_json(capsys, *words, code=0):
    return json.loads(advise(capsys, *words, "--json", code=code).out)


def of_name(rungs, name):
    (found,) = (rung for rung in rungs if rung.name == name)
    return found


def test_the_ladder_has_every_rung():
    rungs = ladder(dataclasses.replace(TASK, dtype="fp32"), room(device=9000, host=9000, nvme="/d"))
    assert [rung.name for rung in rungs] == NAMES  # no times are known, and all fit
    assert {rung.name for rung in rungs if not rung.is_exact} == CHANGED
    rungs = ladder(TASK, room(gpus=8))
    # A smaller batch is made up for by accumulation.
    assert {rung.config["train_batch_size"] for rung in rungs} == {32}
    assert {rung.name for rung in rungs} == set(NAMES[:14] + NAMES[15:17])


@pytest.mark.parametrize(
    ("gpus", "device", "host", "name", "batch"),
    [
        (1, 192, 64, "stage 0", "batch 4"),
        (8, 40, 256, "stage 2", "batch 4, checkpointing"),
        (1, 40, 128, "stage 2 + optimizer offload, ours", "batch 4, checkpointing"),
        (1, 14, 160, "stage 3 + both offloads, ours", "batch 4, checkpointing"),
        (1, 8, 160, "stage 3 + both offloads", "batch 1, checkpointing"),
        (1, 12, 96, "16-bit states + parameter offload, ours", "batch 4, checkpointing"),
        (1, 24, 56, None, ""),
    ],
)
def test_the_first_that_fits_is_taken_in_the_way_that_costs_least(gpus, device, host, name, batch):
    first = ladder(TASK, room(gpus, device, host))[0]
    assert ((first.fits and first.name) or None, first.batch if name else "") == (name, batch)


@pytest.mark.parametrize(
    ("gpus", "machine", "given"),
    [
        (1, "h200x1", ()),
        (1, "h200x1", ("--gpu-memory", 24, "--host-memory", 256)),
        (4, "h100x4", ("--gpu-memory", 40)),
        (4, "h100x4", ("--gpu-memory", 24, "--micro-batch", 1)),
        (2, "cpu-only", ("--model", "tiny")),
    ],
)
def test_the_fastest_of_those_that_fit_comes_first(capsys, gpus, machine, given):
    words = ("--model", "7B", "--gpus", gpus, "--machine", machine, *given)
    rungs = as_json(capsys, *words)["rungs"]
    fitting = [rung for rung in rungs if rung["fits"]]
    assert rungs[: len(fitting)] == fitting
    exact = [rung for rung in fitting if rung["is_exact"]]
    assert fitting[: len(exact)] == exact
    timed = [rung["iteration_s"] for rung in exact if rung["iteration_s"] is not None]
    assert [rung["iteration_s"] for rung in exact[: len(timed)]] == timed
    in_two_digits = [float(f"{seconds:.2g}") for seconds in timed]
    assert in_two_digits == sorted(in_two_digits)
    without = {rung["name"] for rung in rungs if rung["iteration_s"] is None}
    assert without == {"smaller buckets"}
    assert all(bool(rung["no_time"]) == (rung["iteration_s"] is None) for rung in rungs)


def test_of_times_that_are_as_good_as_equal_the_one_that_offloads_less_comes_first(capsys):
    words = ("--model", "7B", "--gpus", 1, "--machine", "h200x1", "--gpu-memory", 24)
    rungs = as_json(capsys, *words, "--host-memory", 256)["rungs"][:2]
    assert [rung["name"] for rung in rungs] == [
        "stage 3 + optimizer offload, ours",
        "stage 3 + both offloads, ours",
    ]
    assert rungs[0]["iteration_s"] > rungs[1]["iteration_s"]


def test_offload_of_stock_s_stage_2_is_never_put_before_what_is_faster_and_leaner(capsys):
    words = ("--model", "7B", "--gpus", 1, "--machine", "h200x1", "--gpu-memory", 40)
    found = as_json(capsys, *words, "--host-memory", 256)
    stock, ours = (
        next(rung for rung in found["rungs"] if rung["name"] == f"stage 2 + optimizer offload{who}")
        for who in ("", ", ours")
    )
    assert ours["iteration_s"] < stock["iteration_s"]
    assert ours["host_bytes"] < stock["host_bytes"]
    assert found["chosen"] != stock["name"]
    assert found["rungs"].index(ours) < found["rungs"].index(stock)


def test_the_configuration_names_the_policy_whose_time_is_told(capsys):
    words = ("--model", "7B", "--gpus", 1, "--gpu-memory", 24, "--host-memory", 110)
    told = as_json(capsys, *words, "--machine", "h200x1", "--micro-batch", 1)
    assert told["config"]["deep_optimizer_states"]["policy"] in ("all-host", "dynamic", "stride")
    words = ("--model", "7B", "--gpus", 1, "--gpu-memory", 24, "--host-memory", 128)
    assert as_json(capsys, *words)["config"]["deep_optimizer_states"]["policy"] == "auto"


def test_activations_that_are_not_known_are_said_in_one_line(tmp_path, capsys):
    """XLM asserts on a value; its states are known all the same."""
    path = tmp_path / "config.json"
    sizes = {"emb_dim": 64, "n_layers": 2, "n_heads": 2, "n_words": 300}
    path.write_text(json.dumps({"model_type": "xlm", **sizes, "dtype": "float32"}))
    words = ("--model", path, "--gpus", 1, "--machine", "h200x1", "--sequence-length", 32)
    found = as_json(capsys, *words)
    (note,) = (note for note in found["notes"] if note.startswith("xlm: activations are not known"))
    assert "weights, states, gradients and buckets alone" in note
    assert "its code asks for values" in note
    for rung in found["rungs"]:  # the leanest way: nothing says how much less another would leave
        assert (rung["micro_batch"], rung["checkpointing"]) == (1, True)
    printed = advise(capsys, *words)
    assert f"note: {note}\n" in printed.out
    assert "Traceback" not in printed.out + printed.err


@pytest.mark.parametrize("name", ["stage 3 + both offloads", "stage 2"])
def test_every_phase_of_every_rank_has_to_fit(name):
    """Each rank reads the whole model before stage 2 cuts its state, which takes most there."""

    def rung(host):
        return of_name(ladder(TASK, room(8, 80, host)), name)

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
    words = ("--model", path, "--gpus", 1, "--gpu-memory", 24, "--host-memory", 56)
    found = as_json(capsys, *words, code=1)
    (note,) = found["notes"]
    assert note in advise(capsys, *words, code=1).out
    nearest = next(rung for rung in found["rungs"] if rung["name"] == "16-bit states, ours")
    lack = nearest["short_bytes"]["host"]
    assert set(nearest["short_bytes"]) == {"host"}
    assert lack == pytest.approx(nearest["host_bytes"] - 0.97 * 56 * GIB, abs=1)
    assert note.startswith(
        f"'16-bit states, ours' comes nearest: host memory is short by {lack / GIB:.1f} GiB "
        f"({nearest['host_bytes'] / GIB:.1f} needed, 54.3 may be taken); try --nvme FOLDER"
    )
    for more in (("--nvme", tmp_path), ("--gpus", 2, "--gpus-per-node", 1)):
        assert as_json(capsys, *words, *more)["chosen"]


def test_what_a_rung_costs_is_printed(capsys):
    words = ("--model", "7B", "--gpus", 4, "--machine", "h100x4")
    found, text = as_json(capsys, *words), advise(capsys, *words).out
    for rung in found["rungs"]:
        (line,) = (line for line in text.splitlines() if line.startswith(f"  {rung['name']:40s}"))
        seconds = rung["iteration_s"]
        assert ("unknown" if seconds is None else f" {seconds:.2f} s ") in line
        assert f"{rung['device_bytes'] / GIB:.1f} " in line
        assert f"{rung['host_bytes'] / GIB:.1f}" in line
        assert ("does not fit: " in line) is not rung["fits"]
        host = [phase["host_bytes"] for phase in rung["phases"].values()]
        assert max(host) == rung["host_bytes"]
    assert "no time of smaller buckets: no profile has a rate of the start of a collective" in text


@pytest.mark.parametrize("idx", [0, 3, 5, 12, 15, 16, -1])
def test_deepspeed_s_own_loader_and_explain_take_the_configuration(tmp_path, capsys, idx):
    """Explain asks DeepSpeed itself; of the rungs these differ most."""
    rungs = ladder(dataclasses.replace(TASK, dtype="fp32"), room(nvme=str(tmp_path)))
    rung = of_name(rungs, NAMES[idx])
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
        assert len(reasons) == 2
        assert any("the performance model knows GPTs with SwiGLU" in reason for reason in reasons)


def test_notes_apply_where_they_are_true():
    large, small = ladder(TASK, room(device=192)), ladder(TASK, room())
    assert notes_of(of_name(large, "stage 0"), room()) == []
    assert notes_of(of_name(small, "stage 2"), room()) == [CHECKPOINTING]
    assert notes_of(of_name(small, "16-bit states, ours"), room()) == [CHECKPOINTING, NARROW]
    assert notes_of(of_name(large, "stage 0"), room(device=None)) == [GLIBC]


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
