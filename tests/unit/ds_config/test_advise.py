"""The ladder, its choice, its JSON, and real runs of its rungs."""

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path

import in_process
import pytest
from processes import wait_for

from configs.overrides import apply_overrides
from configs.schema import read_toml
from configs.study import default_study
from deep_optimizer_states.predict.memory.architecture import architecture_of
from deep_optimizer_states.predict.memory.peaks import GIB
from deep_optimizer_states.predict.memory.setting import setting_of
from ds_config.__main__ import main
from ds_config.advise import _model, notes_of
from ds_config.attempts import Attempts
from ds_config.ladder import Room, Task, chosen, ladder
from launch.ds_json import deepspeed_config
from launch.trainers.user_json import read_user_json, with_user_json

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
TASK = Task(architecture_of(LLAMA), None, 2048, 4, "bf16")
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
    assert main(["advise", *map(str, words)]) == code
    return capsys.readouterr()


def as_json(capsys, *words, code=0):
    return json.loads(advise(capsys, *words, "--json", code=code).out)


def test_the_ladder_has_every_rung_of_the_guide_in_its_order():
    task = dataclasses.replace(TASK, dtype="fp32")
    assert [rung.name for rung in ladder(task, room(nvme="/disk"))] == FASTEST_FIRST
    names = [rung.name for rung in ladder(TASK, room())]
    assert names == [n for n in FASTEST_FIRST if "NVMe" not in n and n != "half precision"]


def test_a_smaller_batch_is_made_up_for_by_accumulation():
    sizes = {rung.config["train_batch_size"] for rung in ladder(TASK, room(gpus=8))}
    assert sizes == {32}


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


def test_every_phase_of_every_rank_has_to_fit():
    rungs = {rung.name: rung for rung in ladder(TASK, room(8, 80, 10_000))}
    both = rungs["stage 3 + both offloads"]
    need = 8 * both.peaks.host_bytes / 0.97 / GIB
    for host, fits in ((need * 1.01, True), (need * 0.99, False)):
        again = {rung.name: rung for rung in ladder(TASK, room(8, 80, host))}
        assert again[both.name].fits is fits
    # Each rank reads the whole model before stage 2 cuts its state: more than training takes there.
    stage2 = rungs["stage 2"].peaks
    assert stage2.load.host_bytes > 2 * stage2.train.host_bytes
    need = 8 * stage2.load.host_bytes / 0.97 / GIB
    for host, fits in ((need * 1.01, True), (need * 0.99, False)):
        again = {rung.name: rung for rung in ladder(TASK, room(8, 80, host))}
        assert again["stage 2"].fits is fits


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


def test_where_nothing_fits_it_is_said_what_is_short_and_what_would_help(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    words = ("--model", path, "--gpus", 1, "--gpu-memory", 24, "--host-memory", 64)
    found = as_json(capsys, *words, code=1)
    text = advise(capsys, *words, code=1).out
    assert all(note in text for note in found["notes"])
    nearest = next(rung for rung in found["rungs"] if rung["name"] == "16-bit states, ours")
    lack = nearest["short_bytes"]["host"]
    assert set(nearest["short_bytes"]) == {"host"}
    assert lack == pytest.approx(nearest["host_bytes"] - 0.97 * 64 * GIB, abs=1)
    first, *ways = found["notes"]
    assert first == (
        f"'16-bit states, ours' comes nearest: host memory is short by {lack / GIB:.1f} GiB "
        f"({nearest['host_bytes'] / GIB:.1f} needed, 62.1 may be taken)"
    )
    starts = ("--nvme FOLDER", "--micro-batch 1", "2 times as many such machines (--gpus 2)",
              "a machine with")  # fmt: skip
    assert [way.startswith(f"would help: {start}") for way, start in zip(ways, starts, strict=True)]
    # What is said to help does.
    for more in (("--nvme", tmp_path), ("--micro-batch", 1), ("--gpus", 2, "--gpus-per-node", 1)):
        name = as_json(capsys, *words, *more)["chosen"]
        assert any(way.startswith(f"would help: {more[0]} ") or str(more[0]) in way
                   for way in ways if f"'{name}' fits" in way)  # fmt: skip
    host = ways[-1].removeprefix("would help: a machine with ").split(" ")[0]
    as_json(capsys, *words, "--host-memory", float(host) + 1)


def test_what_would_not_help_is_not_named(capsys):
    words = ("--model", "70B", "--gpus", 1, "--gpu-memory", 2, "--host-memory", 8)
    notes = as_json(capsys, *words, code=1)["notes"]
    assert "GPU memory is short by" in notes[0]
    assert "host memory is short by" in notes[0]
    assert [note.startswith("would help: a machine with") for note in notes[1:]] == [True]


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
    assert main(["explain", str(path)]) == 0, capsys.readouterr().out
    assert "was not asked" not in capsys.readouterr().err


def test_the_winner_is_written_to_a_new_file_alone(tmp_path, capsys):
    path = tmp_path / "mine.json"
    words = ("--model", "7B", "--gpus", 1, "--gpu-memory", 24, "--host-memory", 128, "--out", path)
    found = as_json(capsys, *words)
    assert json.loads(path.read_text()) == found["config"]
    path.write_text("mine")
    assert f"--out {path}: is already there" in advise(capsys, *words, code=2).err
    assert path.read_text() == "mine"


def test_sizes_that_a_config_json_leaves_out_are_those_of_transformers(tmp_path):
    path = tmp_path / "config.json"
    left_out = ("num_attention_heads", "intermediate_size")
    path.write_text(json.dumps({key: LLAMA[key] for key in LLAMA if key not in left_out}))
    architecture, shape = _model(str(path))
    assert architecture.numel == architecture_of(LLAMA).numel, "32 heads and 11,008 units"
    assert shape is None, "its time is not predicted"


def test_a_config_json_of_hugging_face_is_a_model(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    words = ("--gpus", 1, "--machine", "h200x1")
    found = as_json(capsys, "--model", path, *words)
    assert found["parameters"] == 6_738_415_616  # Llama 2 7B's own count
    assert any(rung["iteration_s"] for rung in found["rungs"])
    path.write_text(json.dumps({**LLAMA, "model_type": "qwen2"}))
    found = as_json(capsys, "--model", tmp_path, *words)
    assert not any(rung["iteration_s"] for rung in found["rungs"])


def test_without_a_gpu_the_host_holds_all(capsys):
    words = ("--model", "tiny", "--gpus", 2, "--gpu-memory", 0, "--host-memory", 8)
    found = as_json(capsys, *words)
    assert {rung["device_bytes"] for rung in found["rungs"]} == {0}
    assert found["chosen"] == "stage 0, batch 4"


def test_notes_apply_where_they_are_true():
    odd = dataclasses.replace(TASK, architecture=architecture_of({**LLAMA, "vocab_size": 32001}))
    space = room(gpus=2)
    rungs = {rung.name: rung for rung in ladder(odd, space)}
    stage3 = notes_of(rungs["stage 3"], odd, space)
    assert stage3[0] == "not divisible by 16: vocabulary 32,001 (next: 32,016)"
    assert stage3[1].startswith("sub_group_size 100,000,000 in place of the default")
    assert "stage3_param_persistence_threshold 100,663,296" in stage3[2]
    assert notes_of(rungs["stage 2"], TASK, space) == []
    assert notes_of(rungs["stage 3 + parameter offload"], TASK, room()) == notes_of(
        rungs["stage 3"], TASK, room()
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "7C", "--machine", "h100x4"), "unknown model '7C': did you mean"),
        (("--model", "7B", "--machine", "h10x4"), "unknown machine 'h10x4'"),
        (("--model", "7B"), "--machine is missing"),
        (("--model", "7B", "--gpu-memory", 24), "--machine is missing"),
        (("--model", "no.json", "--machine", "h100x4"), "no.json: cannot be read"),
        (("--model", "7B", "--machine", "h100x4", "--try", "train.py"), "has no {config}"),
        (("--model", "7B", "--machine", "h100x4", "--try", "/no/such {config}"), "cannot be start"),
    ],
)
def test_a_wrong_argument_is_named(capsys, words, message):
    error = advise(capsys, *words, "--gpus", 4, code=2).err
    assert message in error
    assert error.count("\n") == 1


TRAINED = ("stage 2 + optimizer offload", "smaller buckets", "16-bit states, ours")


@pytest.mark.parametrize("name", TRAINED)
def test_this_projects_trainer_runs_the_very_rung(tmp_path, monkeypatch, name):
    """The rungs differ in what fields say, in sizes that only the JSON says, and in types."""
    monkeypatch.setattr("launch.trainers.user_json.ask", in_process.ask)
    study = default_study()
    architecture, shape = _model("tiny")
    rungs = ladder(Task(architecture, shape, 128, 2, "bf16"), room(gpus=2))
    rung = next(rung for rung in rungs if rung.name == name)
    words = Attempts("", "tiny", 1)._words(rung, tmp_path / "ds_config.json")
    given = dict(zip(words[4:-2:2], words[5:-2:2], strict=True))
    path = Path(given.pop("--deepspeed-config"))
    fields = {name[2:].replace("-", "_"): value for name, value in given.items()}
    table = read_toml(study.files("points")["tiny"])
    point = study.make_point(apply_overrides(table, fields, study))
    config = with_user_json(deepspeed_config(point), read_user_json(path), point, path)
    zero = rung.config["zero_optimization"]
    sizes = {name: size for name, size in zero.items() if isinstance(size, int)}
    assert sizes.items() <= config["zero_optimization"].items()
    assert ("deep_optimizer_states" in config) == ("ours" in name)
    setting = setting_of(config, architecture)
    dtype = "bf16" if "16-bit" in name else "fp32"
    assert (setting.masters, setting.moments) == (dtype, dtype)


# Ends as a run does that has too little memory for a stage: killed, or with CUDA's message.
SCRIPT = """
import json, os, signal, sys
config = json.load(open(sys.argv[1]))
zero = config["zero_optimization"]
print(zero["stage"], sys.argv[2], file=open(sys.argv[3], "a"))
if zero["stage"] < 2:
    os.kill(os.getpid(), signal.SIGKILL)
if "offload_optimizer" not in zero:
    sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
"""
ROOMY = ("--model", "tiny", "--gpus", 1, "--gpu-memory", 80, "--host-memory", 80)


def attempt(tmp_path, program, *more):
    script, seen = tmp_path / "train.py", tmp_path / "seen"
    script.write_text(program)
    seen.write_text("")
    command = f"{sys.executable} {script} {{config}} {{checkpointing}} {seen}"
    return (*ROOMY, "--try", command, *more), seen


def test_real_runs_move_on_when_memory_runs_out(tmp_path, capsys):
    out = tmp_path / "out.json"
    words, seen = attempt(tmp_path, SCRIPT, "--out", out)
    found = as_json(capsys, *words)
    assert found["chosen"] == "stage 2 + optimizer offload"
    assert seen.read_text() == "0 false\n0 false\n0 true\n1 true\n2 true\n2 true\n"
    assert [item["ended"] for item in found["tried"]] == [
        *["out of host memory (killed, -9)"] * 4,
        "out of memory (OutOfMemoryError)",
        "ran",
    ]
    assert json.loads(out.read_text())["zero_optimization"]["stage"] == 2


def test_real_runs_from_the_leanest_stop_at_the_first_that_does_not_fit(tmp_path, capsys):
    words, _seen = attempt(tmp_path, SCRIPT, "--from", "leanest")
    found = as_json(capsys, *words)
    names = [item["name"] for item in found["tried"]]
    assert names[0] == "16-bit states + parameter offload, ours"
    # Parameter offload alone has the optimizer on the device, which is too much for this script.
    assert found["chosen"] == "stage 3 + optimizer offload, ours"
    assert names[-1] == "stage 3 + parameter offload"


def test_bisecting_runs_fewer_rungs(tmp_path, capsys):
    words, _seen = attempt(tmp_path, SCRIPT, "--bisect")
    found = as_json(capsys, *words)
    assert len(found["tried"]) <= 4
    assert found["tried"][-1]["name"]
    assert found["chosen"] is not None


def test_a_run_that_fails_otherwise_ends_the_search(tmp_path, capsys):
    words, seen = attempt(tmp_path, "raise SystemExit('no such data set')")
    error = advise(capsys, *words, code=2).err
    assert "ended with status 1: no such data set" in error
    assert len(seen.read_text()) == 0


def test_a_run_that_goes_on_is_taken_to_fit(tmp_path, capsys):
    words, _ = attempt(tmp_path, "import time; time.sleep(100000)", "--try-seconds", 1)
    found = as_json(capsys, *words)
    assert found["tried"] == [{"name": "stage 0, batch 4", "ended": "ran for 1 s"}]


def test_nothing_is_chosen_when_every_run_runs_out(tmp_path, capsys):
    words, _ = attempt(tmp_path, "raise MemoryError")
    found = as_json(capsys, *words, code=1)
    assert found["chosen"] is None
    assert len(found["tried"]) == len(found["rungs"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_ends_with_the_command_that_started_it(tmp_path, number):
    program = "import os, sys, time; print(os.getpid(), file=open(sys.argv[3], 'a')); "
    words, seen = attempt(tmp_path, program + "sys.stdin.close(); time.sleep(100000)")
    command = [sys.executable, "-m", "ds_config", "advise", *map(str, words)]
    root = Path(__file__).resolve().parents[3]
    advising = subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: seen.read_text().strip())
        advising.send_signal(number)
        assert "interrupted" in advising.communicate()[1]
        assert advising.returncode == 130
    finally:
        advising.kill()
    assert not Path(f"/proc/{seen.read_text().strip()}").exists()
