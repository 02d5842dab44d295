"""The rungs, the choice among them, its JSON and its figure."""

import dataclasses
import itertools
import json
import re

import pytest
from in_process import explain_or_advise

from configs.errors import ConfigError
from deep_optimizer_states.predict.huggingface import model_of_config
from deep_optimizer_states.predict.machine import load_machine
from deep_optimizer_states.predict.model import load_model
from deep_optimizer_states.units import GIB
from ds_config.advise import (
    CHECKPOINTING,
    GLIBC,
    NARROW,
    ORDER,
    SHARE,
    UNTIMED,
    adding_up,
    changes,
    notes_of,
    notes_of_times,
)
from ds_config.figure import draw
from ds_config.search import (
    ENGINES,
    HEADROOM,
    PLACES,
    STAGES,
    STATES,
    NodeMemory,
    Training,
    best,
    ladder,
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
SMALL = Training(load_model("1.3B")[0], 2048, 4, "bf16")
NAMES = [
    *(f"stage {stage}" for stage in range(4)),
    "stage 3, weights offloaded",
    *(f"stage {stage}, optimizer offloaded, plugin" for stage in (1, 2, 3)),
    *(f"stage {stage}, optimizer offloaded" for stage in (1, 2, 3)),
    "stage 3, optimizer + weights offloaded, plugin",
    "stage 3, optimizer + weights offloaded",
]
ON_DISK = ["optimizer to NVMe", "both, NVMe + host", "both to NVMe"]
NARROW_NAMES = [
    f"stage 3, {what} offloaded, plugin, 16-bit states"
    for what in ("optimizer", "optimizer + weights")
]


def room(gpus=1, device=24, host=128, **fields):
    return NodeMemory(gpus, gpus, device and device * GIB, host * GIB, **fields)


def advise(capsys, *words, code=0):
    assert explain_or_advise(["advise", *words]) == code
    return capsys.readouterr()


def as_json(capsys, *words, code=0):
    return json.loads(advise(capsys, *words, "--json", code=code).out)


@pytest.fixture(scope="module")
def llama():
    """A model of 7B, which `transformers` makes."""
    return Training(model_of_config(LLAMA), 2048, 4, "bf16")


def without_dtype(rungs):
    return [rung.name.replace(", bf16", "").replace(", fp32", "") for rung in rungs]


def test_the_rungs_are_the_product_of_a_few_lists():
    large = room(device=9000, host=9000)
    assert without_dtype(ladder(SMALL, large)) == NAMES + NARROW_NAMES  # no time is known
    with_disk = ladder(SMALL, dataclasses.replace(large, nvme="/d"))
    names = [*NAMES, *(f"stage 3, {what} offloaded" for what in ON_DISK)]
    assert without_dtype(with_disk) == names + NARROW_NAMES
    rungs = ladder(dataclasses.replace(SMALL, dtype="fp32"), large)
    assert without_dtype(rungs) == [*NAMES, *NAMES, *NARROW_NAMES]
    assert [rung.is_exact for rung in rungs] == [", fp32" in rung.name for rung in rungs]
    found = {(r.setting.stage, r.setting.engine, r.setting.states) for r in with_disk}
    assert found <= set(itertools.product(STAGES, ENGINES, STATES))
    assert {(r.setting.optimizer_at, r.setting.weights_at) for r in with_disk} == set(PLACES)


def test_a_batch_is_made_up_for_by_accumulation():
    task = dataclasses.replace(SMALL, samples=6)
    assert task.micro_batches == (3, 2, 1)
    rungs = ladder(task, room(gpus=8, device=16))
    assert {rung.config["train_batch_size"] for rung in rungs} == {48}
    for rung in rungs:
        sizes = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        assert rung.config[sizes[0]] * rung.config[sizes[1]] == 6


def batch(rung):
    size = rung.config["train_micro_batch_size_per_gpu"]
    return f"{size}, recomputed" if rung.checkpointing else f"{size}"


@pytest.mark.parametrize(
    ("gpus", "device", "host", "name", "way"),
    [
        (1, 192, 64, "stage 0", "4"),
        (8, 40, 256, "stage 2", "4, recomputed"),
        (1, 24, 128, "stage 2, optimizer offloaded, plugin", "4, recomputed"),
        (1, 14, 160, "stage 3, optimizer + weights offloaded, plugin", "4, recomputed"),
        (1, 6, 160, "stage 3, optimizer + weights offloaded, plugin", "1, recomputed"),
        (
            1,
            12,
            96,
            "stage 3, optimizer + weights offloaded, plugin, 16-bit states",
            "4, recomputed",
        ),
        (1, 24, 40, None, ""),
    ],
)
def test_the_first_that_fits_is_taken_in_the_way_that_costs_least(
    llama, gpus, device, host, name, way
):
    first = ladder(llama, room(gpus, device, host))[0]
    assert (without_dtype([first])[0] if first.fits else None) == name
    assert not name or batch(first) == way


def test_small_buckets_are_taken_where_deepspeeds_own_do_not_fit(llama):
    """Their time is not known, and with them a GPU of 5 GiB has room."""
    rungs = ladder(llama, room(1, 5, 160))
    assert rungs[0].has_small_buckets
    assert rungs[0].config["zero_optimization"]["reduce_bucket_size"] == 50_000_000
    assert not any(rung.has_small_buckets for rung in ladder(llama, room(1, 40, 160)) if rung.fits)


def test_a_half_empty_gpu_is_given_a_share_of_the_state():
    """The plugin finds the share when it starts, so the JSON fixes none."""
    half = NodeMemory(1, 1, 40 * GIB, 40 * GIB, machine=load_machine("h100x4"))
    task = dataclasses.replace(SMALL, model=load_model("3B")[0])
    (found,) = (
        r for r in ladder(task, half) if r.name == "stage 3, bf16, optimizer offloaded, plugin"
    )
    assert 0.3 < found.share < 1
    assert "ratio" not in found.config["deep_optimizer_states"]
    assert found.prediction.device_share >= 1 - found.share
    assert found.peaks.host_bytes <= HEADROOM * 40 * GIB
    assert found.fits
    assert notes_of(found, half) == [SHARE]


@pytest.mark.parametrize("machine", ["h200x1", "h100x4", "cpu-only"])
@pytest.mark.parametrize("device", [12, 40])
def test_the_first_alone_is_found_without_the_times_of_all(machine, device):
    profile = load_machine(machine)
    place = NodeMemory(1, 1, device * GIB if profile.gpus else None, 64 * GIB, machine=profile)
    task = dataclasses.replace(SMALL, dtype="bf16" if profile.gpus else "fp32")
    first, found = ladder(task, place)[0], best(task, place)
    assert found is None if not first.fits else found.name == first.name


@pytest.mark.parametrize(
    ("gpus", "machine", "given"),
    [
        (1, "h200x1", ("--gpu-memory", 16, "--host-memory", 256)),
        (4, "h100x4", ("--gpu-memory", 8, "--micro-batch", 1)),
        (2, "cpu-only", ("--model", "tiny")),
    ],
)
def test_the_fastest_of_those_that_fit_comes_first(capsys, gpus, machine, given):
    words = ("--model", "1.3B", "--gpus", gpus, "--machine", machine, *given)
    rungs = as_json(capsys, *words)["rungs"]
    fitting = [rung for rung in rungs if rung["fits"]]
    assert rungs[: len(fitting)] == fitting
    exact = [rung for rung in fitting if rung["is_exact"]]
    assert fitting[: len(exact)] == exact
    timed = [rung["iteration_s"] for rung in exact if rung["iteration_s"] is not None]
    assert [rung["iteration_s"] for rung in exact[: len(timed)]] == timed
    in_two_digits = [float(f"{seconds:.2g}") for seconds in timed]
    assert in_two_digits == sorted(in_two_digits)
    assert all(rung["small_buckets"] for rung in rungs if rung["iteration_s"] is None)
    assert all(bool(rung["no_time"]) == (rung["iteration_s"] is None) for rung in rungs)


def test_of_times_that_are_as_good_as_equal_the_one_that_offloads_less_comes_first():
    machine = load_machine("h200x1")
    even = dataclasses.replace(machine, costs=dataclasses.replace(machine.costs, grads_s=0.0))
    place = NodeMemory(1, 1, 80 * GIB, 256 * GIB, machine=even)
    rungs = without_dtype(found := ladder(SMALL, place))
    same = [f"{found[idx].iteration_s:.2g}" for idx in (0, 1, 2)]
    assert rungs[:3] == ["stage 0", "stage 1", "stage 2"]
    assert len({*same}) == 1


def test_state_stays_in_the_memory_that_was_given_and_not_in_the_profile_s():
    machine = load_machine("h200x1")
    small, large = (
        next(
            rung
            for rung in ladder(SMALL, NodeMemory(1, 1, gib * GIB, 256 * GIB, machine=machine))
            if rung.name.startswith("stage 2, ") and rung.name.endswith("offloaded, plugin")
        )
        for gib in (16, 140)
    )
    assert small.prediction.device_share < 0.5
    assert large.prediction.device_share == 1


def test_stock_s_offload_is_never_put_before_what_is_faster_and_leaner():
    place = NodeMemory(1, 1, 40 * GIB, 256 * GIB, machine=load_machine("h200x1"))
    rungs = ladder(dataclasses.replace(SMALL, model=load_model("3B")[0]), place)
    at = {name: idx for idx, name in enumerate(without_dtype(rungs))}
    for stage in (1, 2, 3):
        stock, ours = (at[f"stage {stage}, optimizer offloaded{who}"] for who in ("", ", plugin"))
        assert ours < stock
        assert rungs[ours].iteration_s < rungs[stock].iteration_s
        assert rungs[ours].peaks.host_bytes < rungs[stock].peaks.host_bytes


def test_the_configuration_leaves_the_policy_to_the_plugin(capsys):
    words = ("--model", "1.3B", "--gpus", 1, "--gpu-memory", 10, "--host-memory", 110)
    for machine in ((), ("--machine", "h200x1", "--micro-batch", 1)):
        told = as_json(capsys, *words, *machine)
        assert told["config"]["deep_optimizer_states"] == {"enabled": True}


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
    assert f"note: {note}" in " ".join(printed.out.split())
    assert "Traceback" not in printed.out + printed.err


@pytest.mark.parametrize("name", ["stage 3, optimizer + weights offloaded", "stage 2"])
def test_every_phase_of_every_rank_has_to_fit(llama, name):
    """Each rank reads the whole model before stage 2 cuts its state, which takes most there."""

    def rung(host):
        rungs = ladder(llama, room(8, 80, host))
        return rungs[without_dtype(rungs).index(name)]

    peaks = rung(10_000).peaks
    assert (peaks.load.host_bytes > 2 * peaks.train.host_bytes) == (name == "stage 2")
    need = 8 * peaks.host_bytes / 0.97 / GIB
    assert rung(need * 1.01).fits
    assert not rung(need * 0.99).fits


def test_7b_on_one_gpu_of_24_and_a_host_of_64_fits_with_eight_bytes_a_parameter(capsys):
    words = ("--model", "7B", "--gpus", 1, "--gpu-memory", 24, "--host-memory", 64)
    found = as_json(capsys, *words, "--micro-batch", 1)
    assert found["chosen"] == "stage 3, bf16, optimizer offloaded, plugin, 16-bit states"
    assert found["predicted"] is True
    keys = {"name", "device_bytes", "host_bytes", "fits", "iteration_s"}
    assert all(keys <= set(rung) for rung in found["rungs"])
    assert found["config"]["bf16"]["bf16_master_weights_and_grads"] is True
    assert found["config"]["optimizer"]["params"]["fp32_optimizer_states"] is False
    rung = next(rung for rung in found["rungs"] if rung["name"] == found["chosen"])
    assert rung["host_bytes"] - 5 * GIB == pytest.approx(8 * found["parameters"], rel=0.03)
    assert any("16-bit states round" in note for note in found["notes"])


def test_where_nothing_fits_it_is_said_what_is_short_and_what_to_try(tmp_path, capsys):
    words = ("--model", "1.3B", "--gpus", 1, "--gpu-memory", 6, "--host-memory", 17)
    found = as_json(capsys, *words, code=1)
    assert found["limited_by"] is None
    (note,) = found["notes"]
    assert note in " ".join(advise(capsys, *words, code=1).out.split())
    nearest = next(rung for rung in found["rungs"] if f"'{rung['name']}' comes" in note)
    words_of = {"host": "host memory", "device": "GPU memory"}
    for place, lack in nearest["leanest_short_bytes"].items():
        assert f"{words_of[place]} is short by {lack / GIB:.1f} GiB (" in note
    assert note.endswith("or more --gpus")
    assert (found["chosen"], found["config"]) == (None, None)
    assert as_json(capsys, *words, "--nvme", tmp_path)["chosen"]


def test_what_one_gpu_and_more_host_memory_would_change():
    place = NodeMemory(1, 1, 24 * GIB, 20 * GIB, machine=load_machine("h100x4"))
    taken = ladder(SMALL, place)[0]
    gpu, memory = changes(taken, SMALL, place)
    assert (gpu["what"], memory["what"]) == ("one GPU more", "100 GiB more of host memory")
    larger = dataclasses.replace(place, host_bytes=120 * GIB)
    assert memory["chosen"] == ladder(SMALL, larger)[0].name
    for one in (gpu, memory):
        gain = one["tokens_per_s"] * taken.iteration_s / (4 * 2048)
        assert one["speedup"] == pytest.approx(gain)
        assert gain > 1


@pytest.mark.parametrize(
    ("place", "ranks"),
    [
        (NodeMemory(4, 4, 1.0, 1.0), (5, 5)),  # all of a machine that is not known
        (NodeMemory(2, 2, 1.0, 1.0, gpus_a_node=4), (3, 3)),
        (NodeMemory(4, 4, 1.0, 1.0, gpus_a_node=4), (5, 4)),  # in a second node
        (NodeMemory(1, 1, 1.0, 1.0, gpus_a_node=1), (2, 1)),
        (NodeMemory(8, 4, 1.0, 1.0), (9, 4)),
    ],
)
def test_one_gpu_more_shares_its_node_where_there_is_a_place(place, ranks):
    assert (place.with_gpu().gpus, place.with_gpu().ranks_a_node) == ranks


def test_the_table_is_no_wider_than_a_terminal(capsys, tmp_path):
    words = ("--model", "tiny", "--gpus", 4, "--machine", "h100x4", "--nvme", tmp_path)
    lines = advise(capsys, *words).out.splitlines()
    assert max(map(len, lines)) <= 100


def test_the_figure_has_what_fits_in_colour_and_overwrites_nothing(tmp_path):
    place = NodeMemory(1, 1, 24 * GIB, 128 * GIB, machine=load_machine("h200x1"))
    file, rungs = tmp_path / "mine.svg", ladder(SMALL, place)
    assert {rung.fits for rung in rungs} == {True, False}
    assert draw(file, rungs, place, "1.3B") == file
    text = file.read_text()
    for words in ("predicted, not run", "simulated", "plugin, fits", "does not fit"):
        assert words in text
    with pytest.raises(ConfigError, match="is already there; give another name"):
        draw(file, rungs, place, "1.3B")
    with pytest.raises(ConfigError, match="none is no folder"):
        draw(tmp_path / "none" / "x", rungs, place, "1.3B")
    with pytest.raises(ConfigError, match="no rung has a time: memory alone is given"):
        draw(tmp_path / "x", ladder(SMALL, room()), room(), "1.3B")


def test_what_a_rung_costs_is_printed(capsys):
    words = ("--model", "tiny", "--gpus", 1, "--machine", "h100x4", "--gpu-memory", 3.3)
    found, text = as_json(capsys, *words), advise(capsys, *words).out
    begin = text.splitlines().index("") + 2
    rows = text.splitlines()[begin : begin + len(found["rungs"])]
    for rung, row in zip(found["rungs"], rows, strict=True):
        seconds = rung["iteration_s"]
        assert ("unknown" if seconds is None else f" {seconds:.2f} s ") in row
        for place in ("device", "host"):
            mark = "!" if place in rung["short_bytes"] else ""
            assert f" {rung[f'{place}_bytes'] / GIB:.1f}{mark}" in row
        host = [phase["host_bytes"] for phase in rung["phases"].values()]
        assert max(host) == rung["host_bytes"]
        parts = rung["parts_s"]
        assert (parts is None) == (seconds is None)
        assert parts is None or sum(parts.values()) == pytest.approx(seconds)
    assert {rung["parts_s"] is None for rung in found["rungs"]} == {True, False}
    assert rows[0].startswith("> ")
    assert not any(row.startswith(">") for row in rows[1:])


def lines_of(capsys, *words):
    text = advise(capsys, "--model", "tiny", "--gpus", 1, *words).out
    return text, " ".join(text.split())


def test_the_chosen_iteration_is_told_by_phases_that_add_up(capsys):
    words = ("--machine", "h100x4", "--gpu-memory", 14, "--host-memory", 64, "--batch", 8)
    text = advise(capsys, "--model", "1.3B", "--gpus", 1, *words).out
    flat = " ".join(text.split())
    found = re.search(
        r"the chosen iteration: (.*?) = ([\d.]+) s, predicted limited: (.*?)tok", flat
    )
    terms = re.findall(r"([-+]?) ?([\d.]+) (forward|backward|update|hidden|outside)", found[1])
    assert [name for *_, name in terms] == ["forward", "backward", "update", "hidden", "outside"]
    told = as_json(capsys, "--model", "1.3B", "--gpus", 1, *words)
    for (sign, value, name), (part, seconds) in zip(
        terms, told["rungs"][0]["parts_s"].items(), strict=True
    ):
        assert part.startswith(name)
        assert float(f"{sign}{value}") == pytest.approx(seconds, abs=0.01)
    limits = ", ".join(f"{phase} by {limit}" for phase, limit in told["limited_by"].items())
    assert f"limited: {limits} " in flat
    total = sum(float(f"{sign}{value}") for sign, value, _ in terms)
    assert total == pytest.approx(float(found[2]))
    assert f" {float(found[2]):.2f} s " in next(r for r in text.splitlines() if r.startswith(">"))
    for words in ("forward by ", "backward by ", "update by "):
        assert words in found[3]
    assert "tokens/s at 8 samples an update (--batch)" in flat


def test_rounded_parts_add_up_to_their_rounded_sum():
    parts = [0.004, 0.004, 0.004, -0.003]  # each by itself is 0
    assert adding_up(parts, 2) == [0.0, 0.01, 0.0, 0.0]
    assert sum(round(part, 2) for part in parts) != round(sum(parts), 2)


@pytest.mark.parametrize(
    "words", [("--machine", "h100x4"), ("--machine", "h200x1", "--gpu-memory", 0)]
)
def test_the_arrays_of_a_phase_and_the_rest_add_up(capsys, words):
    text, _ = lines_of(capsys, *words)
    for block in re.split(r"(?m)^while it ", text)[1:]:
        head, found = block.split(":\n", 1)[0], re.findall(r"([\d.]+) GiB  (device|host)", block)
        device, host = re.search(r"GPU ([\d.]+) GiB, host ([\d.]+)", head).groups()
        sums = dict.fromkeys(("device", "host"), 0.0)
        for size, place in found:
            sums[place] += float(size)
        if float(device):
            assert sums["device"] == pytest.approx(float(device), abs=0.06)
            assert sums["host"] == pytest.approx(float(host), abs=0.06)
        else:
            assert sum(sums.values()) == pytest.approx(float(host), abs=0.06)


def test_the_order_that_is_said_is_the_order_that_there_is(capsys):
    _, timed = lines_of(capsys, "--machine", "h100x4")
    assert ORDER in timed
    assert UNTIMED not in timed
    text, untimed = lines_of(capsys, "--gpu-memory", 80, "--host-memory", 64)
    assert UNTIMED in untimed
    assert ORDER not in untimed
    assert "the chosen iteration" not in text


@pytest.mark.parametrize(
    ("machine", "ranks", "found"),
    [("h100x4", 1, ["a guess", "assumed"]), ("h100x4", 4, ["assumed"]), ("h200x1", 1, [])],
)
def test_times_say_what_they_rest_on(machine, ranks, found):
    place = NodeMemory(ranks, ranks, GIB, GIB, machine=load_machine(machine))
    notes = notes_of_times(place)
    assert len(notes) == len(found)
    for note, words in zip(notes, found, strict=True):
        assert words in note
    assert notes_of_times(room()) == []


def test_deepspeed_s_own_loader_and_explain_take_the_configurations(tmp_path, capsys):
    """Explain asks DeepSpeed itself."""
    task = dataclasses.replace(SMALL, dtype="fp32")
    rungs = ladder(task, room(nvme=str(tmp_path)))
    small = [rung for rung in ladder(task, room(device=6)) if rung.has_small_buckets]
    assert small
    for number, rung in enumerate([*rungs[::3], *small[:2]]):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(rung.config))
        assert explain_or_advise(["explain", path]) == 0, capsys.readouterr().out
    assert "was not asked" not in capsys.readouterr().err


def test_the_winner_is_written_to_a_new_file_alone(tmp_path, capsys):
    path = tmp_path / "mine.json"
    words = ("--model", "3B", "--gpus", 1, "--gpu-memory", 24, "--host-memory", 128, "--out", path)
    found = as_json(capsys, *words)
    assert json.loads(path.read_text()) == found["config"]
    path.write_text("mine")
    assert f"--out {path}: is already there" in advise(capsys, *words, code=2).err
    assert path.read_text() == "mine"


def test_a_config_json_of_hugging_face_has_the_time_of_its_layers(tmp_path, capsys):
    small = {**LLAMA, "num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 2816}
    (tmp_path / "config.json").write_text(json.dumps(small))
    for given in (("--model", tmp_path), ("--config", tmp_path / "config.json")):
        found = as_json(capsys, *given, "--gpus", 1, "--machine", "h200x1")
        assert all(rung["iteration_s"] for rung in found["rungs"])
        assert any(note.startswith("times are those of megatron-core") for note in found["notes"])


def test_notes_apply_where_they_are_true(llama):
    large, small = ladder(llama, room(device=192)), ladder(llama, room())
    assert notes_of(large[0], room()) == []
    at = dict(zip(without_dtype(small), small, strict=True))
    assert notes_of(at["stage 2, optimizer offloaded, plugin"], room()) == [CHECKPOINTING]
    assert set(notes_of(at[NARROW_NAMES[0]], room())) >= {NARROW}
    assert notes_of(large[0], room(device=None)) == [GLIBC]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "7C", "--machine", "h100x4"), "unknown model '7C': did you mean"),
        (("--model", "7B", "--machine", "h10x4"), "unknown machine 'h10x4'"),
        (("--model", "7B"), "--machine is missing"),
        (("--model", "7B", "--gpu-memory", 24), "--machine is missing"),
        (("--model", "7B", "--machine", "h100x4", "--batch", 6), "give a multiple of --gpus 4"),
        (("--machine", "h100x4"), "one of the arguments --model --config is required"),
        (("--model", "no.json", "--machine", "h100x4"), "no.json: cannot be read"),
    ],
)
def test_a_wrong_argument_is_named(capsys, words, message):
    error = advise(capsys, *words, "--gpus", 4, code=2).err
    assert message in error
    assert error.count("\n") == 1
