"""Illnesses are found in logs of sick runs, and healthy runs stay without."""

import json
import random
import tomllib
from pathlib import Path

import pytest
from programs import parse_logs as main

from parse.diagnose import diagnose
from parse.illnesses import known
from parse.records import LogError

ROOT = Path(__file__).resolve().parents[3]
LOGS = ROOT / "tests" / "golden" / "diagnose"
PUBLISHED = ROOT / ".." / "shared" / "data" / "logs"
EXPECTED = {
    f"{kind}/{name}": set(names)
    for kind, table in tomllib.loads((LOGS / "expected.toml").read_text()).items()
    for name, names in table.items()
}


def names(path):
    return {illness.name for illness in diagnose(path).illnesses}


@pytest.mark.parametrize(("name", "illnesses"), EXPECTED.items(), ids=EXPECTED)
def test_illnesses_are_those_that_the_run_had(name, illnesses):
    assert names(LOGS / f"{name}.log") == illnesses


def test_every_log_is_expected_something_of():
    files = {f"{path.parent.name}/{path.stem}" for path in LOGS.glob("*/*.log")}
    assert files == EXPECTED.keys()
    sick = [name for name, found in EXPECTED.items() if found and name.startswith("caused/")]
    assert len(sick) >= 30


PREFIXES = (
    "node-1: ",
    "[rank0]: ",
    "0: ",
    "2026-01-01T10:00:00.123Z gpu12.cluster: ",
    "10.0.0.7: ",
)


@pytest.mark.parametrize(("at", "name"), [*enumerate(EXPECTED)], ids=EXPECTED)
def test_a_prefix_before_every_line_changes_nothing(tmp_path, at, name):
    path = tmp_path / "run.log"
    lines = (LOGS / f"{name}.log").read_text().splitlines()
    path.write_text("".join(f"{PREFIXES[at % len(PREFIXES)]}{line}\n" for line in lines))
    assert names(path) == EXPECTED[name]


def test_evidence_is_of_the_line_it_names():
    for name in ("written/nccl_timeout", "written/device_load", "written/allocator_flushes"):
        lines = (LOGS / f"{name}.log").read_text().splitlines()
        for illness in diagnose(LOGS / f"{name}.log").illnesses:
            assert illness.evidence[:60] == " ".join(lines[illness.line - 1].split())[:60]


# What each published log shows, looked at one by one: losses, timers and the last lines.
FROZEN, NAN, DIVERGED = {"loss-frozen"}, {"loss-nan"}, {"loss-diverging"}
UNSTABLE = {"loss-unstable"}
SLOW = {"step-over-half"}
OF_PUBLISHED = {
    "artifact/*prefetch0-flush_async0-opt_gaps0": UNSTABLE,
    "artifact/*prefetch1-flush_async1-opt_gaps2": FROZEN | SLOW,
    "results/act-output-7B-scale-DP/*dp1*prefetch0-flush_async0*": DIVERGED,
    "results/act-output-7B-scale-DP/*dp1*prefetch0-flush_async1*": DIVERGED | SLOW,
    "results/act-output-7B-scale-DP/*dp1*prefetch1-flush_async1*": NAN | SLOW,
    "results/act-output-7B-scale-DP/*dp2*": NAN,
    "results/act-output-7B-scale-GA-single-GPU/*": UNSTABLE,
    "results/act-output-7B-scale-TP-motivation/*": UNSTABLE,
    "results/act-output-8B-scale-gaps-a100/*flush_async0*": UNSTABLE | SLOW,
    "results/act-output-8B-scale-gaps-a100/*prefetch0-flush_async1*": UNSTABLE | SLOW,
    "results/act-output-8B-scale-gaps-a100/*prefetch1*": FROZEN | SLOW,
    "results/act-output-scale-models-twinflow-0.8/act-output-7B/*flush_async0*": UNSTABLE,
    "results/act-output-scale-models-twinflow-0.8/act-output-7B/*prefetch0-flush_async1*": UNSTABLE
    | SLOW,
    "results/act-output-scale-models-twinflow-0.8/act-output-7B/*prefetch1*": FROZEN,
    "results/act-output-scale-models-twinflow-0.8/act-output-8.3B/*flush_async0*": UNSTABLE,
    "results/act-output-scale-models-twinflow-0.8/act-output-8.3B/*prefetch0-flush_async1*": {
        *UNSTABLE,
        *SLOW,
        "abort-at-exit",
    },
    "results/act-output-scale-models-twinflow-0.8/act-output-8.3B/*prefetch1*": FROZEN,
}


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="the published logs are not here")
@pytest.mark.parametrize(("pattern", "illnesses"), OF_PUBLISHED.items(), ids=OF_PUBLISHED)
def test_published_logs_are_judged_as_they_are(pattern, illnesses):
    (path,) = PUBLISHED.glob(f"{pattern}.log")
    assert names(path) == illnesses


def test_exit_codes_and_text(tmp_path, capsys):
    healthy, sick = LOGS / "written/healthy_megatron.log", LOGS / "written/device_load.log"
    assert main(["diagnose", str(healthy)]) == 0
    assert "no illness found" in capsys.readouterr().out
    assert main(["diagnose", str(healthy), str(sick)]) == 1
    text = capsys.readouterr().out
    assert f"device-memory-load, line {len(sick.read_text().splitlines())}: " in text
    assert known()["device-memory-load"].remedy in text
    assert main(["diagnose", str(sick), str(tmp_path / "none.log")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_no_line_is_wider_than_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    logs = sorted((LOGS / "caused").glob("*.log"))
    assert main(["diagnose", *map(str, logs)]) == 1
    wide = [line for line in capsys.readouterr().out.splitlines() if len(line) > 100]
    assert [line for line in wide if " " in line.strip()] == []


def test_json_has_name_line_evidence_and_remedy(capsys):
    path = LOGS / "written/dropped_by_release.log"
    assert main(["diagnose", "--json", str(path)]) == 1
    found = json.loads(capsys.readouterr().out)
    (illness,) = found["illnesses"]
    assert illness["name"] == "dropped-gradients"
    assert illness["line"] == 4
    assert "0.16.5" in illness["evidence"]
    assert "0.19.0" in illness["remedy"]
    (log,) = found["logs"]
    assert log["software"] == ["DeepSpeed", "Hugging Face Trainer"]
    assert log["steps"] == 12


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"Dear diary, today it rained.\n" * 20, "nothing in it is known here"),
        ("step 1 loss: 2.0\n".encode("utf-16"), "UTF-16"),
    ],
)
def test_what_is_no_log_ends_with_2(tmp_path, capsys, data, words):
    path = tmp_path / "run.log"
    path.write_bytes(data)
    assert main(["diagnose", str(path)]) == 2
    assert words in capsys.readouterr().err


def test_a_log_of_throughput_alone_is_read_and_what_it_lacks_is_said(tmp_path, capsys):
    """DeepSpeed prints how fast it trains by itself, and the loss never."""
    lines = (LOGS / "written/healthy_throughput.log").read_text().splitlines()
    kept = [line for line in lines if "SamplesPerSec" in line]
    path = tmp_path / "throughput.log"
    path.write_text("\n".join(kept) + "\n")
    assert main(["diagnose", str(path)]) == 0
    text = capsys.readouterr().out
    assert "lines of DeepSpeed" in text
    assert f"no loss that is known here ({len(kept)} lines of DeepSpeed's own progress)" in text
    assert "print the loss of each step" in text


def test_a_folder_is_searched(tmp_path, capsys):
    (tmp_path / "log-a.log").write_text((LOGS / "written/one_process.log").read_text())
    assert main(["diagnose", str(tmp_path)]) == 1
    with pytest.raises(LogError, match="cannot be read"):
        diagnose(tmp_path)


def test_what_is_no_log_in_a_folder_is_left_out_with_a_line(tmp_path, capsys):
    (tmp_path / "a.log").write_text("hello\n")
    assert main(["diagnose", str(tmp_path)]) == 2
    assert f"error: {tmp_path}: no training log in it\n" in capsys.readouterr().err
    (tmp_path / "b.log").write_text((LOGS / "written/one_process.log").read_text())
    assert main(["diagnose", str(tmp_path)]) == 1
    told = capsys.readouterr()
    assert "b.log: 13 lines" in told.out
    why = "nothing in it is known here: not a training log?"
    assert told.err == f"parse diagnose: {tmp_path / 'a.log'}: {why}; left out\n"
    assert main(["diagnose", str(tmp_path / "a.log")]) == 2


def test_a_mistyped_diagnose_is_asked_for(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["diagnos", "run.log"]) == 2
    assert "'diagnos': no such file or folder: did you mean 'diagnose'?" in capsys.readouterr().err
    Path("diagnos").mkdir()
    assert main(["diagnos", "--out", "tables"]) == 2
    assert "diagnos: no training log found" in capsys.readouterr().err


def test_norms_beside_a_log_are_named(tmp_path):
    path = tmp_path / "run.log"
    path.write_text(plain([2.0, 1.9, 1.8]))
    events = [
        {"event": "iteration", "iteration": at, "loss": 2.0, "grad_norm": None} for at in (1, 2, 3)
    ]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    assert not [note for note in diagnose(path).not_judged if str(metrics) in note]
    events[0]["grad_norm"] = 1.0
    metrics.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    assert [note for note in diagnose(path).not_judged if str(metrics) in note]
    assert not [note for note in diagnose(metrics).not_judged if "norms" in note]


def test_what_cannot_be_judged_is_said(tmp_path):
    path = tmp_path / "run.log"
    path.write_text("[2026-01-01] [INFO] Setting ds_accelerator to cuda (auto detect)\n")
    found = diagnose(path)
    assert not found.illnesses
    said = " ".join(found.not_judged)
    for word in ("learns", "clipping", "share of the optimizer step", "DeepSpeed's version"):
        assert word in said


def plain(losses):
    return "".join(f"step {at} loss: {loss}\n" for at, loss in enumerate(losses, 1))


FALLING = [2.0 - 0.01 * at for at in range(40)]
OF_LOSSES = {
    "falls": (FALLING, set()),
    "nan at the end": ([*FALLING, "nan"], {"loss-nan"}),
    "still with many digits": ([*FALLING, *["0.9123456"] * 3], {"loss-frozen"}),
    "equal three times with few digits": (
        [f"{2 - 0.002 * (at // 3):.3f}" for at in range(42)],
        set(),
    ),
    "still with few digits": ([*FALLING, *["0.693"] * 20], {"loss-frozen"}),
    "falls to 0 by itself": (
        [f"{2 * 0.7**at:.3f}" for at in range(30)] + ["0.000"] * 30,
        set(),
    ),
    "0 at once": ([*FALLING, *["0.0"] * 30], {"loss-frozen"}),
    "rises": ([1 + 0.1 * at for at in range(40)], {"loss-diverging"}),
    "two points only": ([1, 9], set()),
}


@pytest.mark.parametrize(("losses", "illnesses"), OF_LOSSES.values(), ids=OF_LOSSES)
def test_losses_are_judged(tmp_path, losses, illnesses):
    path = tmp_path / "run.log"
    path.write_text(plain(losses))
    assert names(path) == illnesses


def hugging_face(*pairs):
    """Lines of a run whose loss falls and whose norm is about 1, and then of pairs of the two."""
    good = [(round(2 - 0.013 * at, 4), 1 + 0.01 * at) for at in range(18)]
    return "".join(
        f"{{'loss': {loss}, 'grad_norm': {norm}, 'learning_rate': 1e-05, 'epoch': {at / 10}}}\n"
        for at, (loss, norm) in enumerate([*good, *pairs])
    )


OVERFLOWED = (
    "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768\n"
)
OF_NORMS = {
    "to the end, loss 0": (hugging_face(*[(0.0, "nan")] * 8), {"norm-nan"}),
    "to the end, frozen loss": (hugging_face(*[(1.7654, "nan")] * 8), {"norm-nan"}),
    "to the end": (hugging_face((1.7, "nan"), (1.8, "nan"), (1.6, "nan")), {"norm-nan"}),
    "twice": (hugging_face((1.7, "nan"), (1.71, "nan")), {"norm-nan"}),
    "twice in fp16": ("fp16=True\n" + hugging_face((1.7, "nan"), (1.71, "nan")), set()),
    "once, loss 0": (hugging_face((0.0, "nan")), {"norm-nan"}),
    "once in fp16, loss 0": ("fp16=True\n" + hugging_face((0.0, "nan")), {"norm-nan"}),
    "once after a spike": (hugging_face((7.5, 250.0), (7.1, "nan")), {"norm-nan"}),
    "once": (hugging_face((1.7, "nan")), set()),
    "infinite once": (hugging_face((1.7, "inf")), set()),
    "skipped": (hugging_face() + OVERFLOWED + "{'loss': 0.0, 'grad_norm': nan}\n", set()),
    "once in the middle": (hugging_face((1.7, "nan"), (1.69, 1.0), (1.68, 1.0)), set()),
    "none, frozen loss": (hugging_face(*[(1.7654, 1.0)] * 9), {"loss-frozen"}),
    "none, a loss that stays at a round figure": (hugging_face(*[(0.9, 1.0)] * 13), set()),
    "as tensors": (hugging_face((0.0, "tensor(nan, device='cuda:0')")), {"norm-nan"}),
    "as JSON": ('{"step": 1, "loss": 2.1, "grad_norm": 1.0}\n'
                '{"step": 2, "loss": 0.0, "grad_norm": NaN}\n', {"norm-nan"}),
}  # fmt: skip


@pytest.mark.parametrize(("text", "illnesses"), OF_NORMS.values(), ids=OF_NORMS)
def test_norms_that_are_not_finite_are_judged(tmp_path, text, illnesses):
    path = tmp_path / "run.log"
    path.write_text(text)
    assert names(path) == illnesses


@pytest.mark.parametrize("value", ["nan", "NaN", "-nan", "-nan(ind)", "nan.0", "inf", "-inf",
                                   "Infinity", "1.#QNAN", "-1.#IND", "tensor(nan)"])  # fmt: skip
def test_every_wording_of_a_loss_that_is_not_finite(tmp_path, value):
    path = tmp_path / "run.log"
    for line in ("step 41 loss: {}", "{{'loss': {}, 'epoch': 1.0}}", '{{"loss": {}, "step": 41}}'):
        path.write_text(plain(FALLING) + line.format(value) + "\n")
        assert names(path) == {"loss-nan"}, line


def test_what_makes_a_run_worthless_comes_before_what_makes_it_slow(tmp_path):
    path = tmp_path / "run.log"
    timers = "time (ms) | fwd: 1.00 | bwd: 1.00 | step: 9.00\n"
    still = "".join(f"step {at} loss: 2.1234567\n" for at in range(9))
    path.write_text("[INFO] Reduce bucket size 1000000000\n" + timers * 9 + still)
    order = [illness.name for illness in diagnose(path).illnesses]
    assert order == ["loss-frozen", "buckets-1e9", "step-over-half"]


def test_of_several_ranks_one_tells_of_the_steps_and_each_of_a_loss_that_is_nan(tmp_path):
    path = tmp_path / "run.log"
    of_ranks = [[f"{rank}: step {at} loss: {1.9 - 0.01 * at + rank:.4f}\n" for at in range(20)]
                for rank in (0, 1)]  # fmt: skip
    path.write_text("".join(of_ranks[0] + of_ranks[1]))
    found = diagnose(path)
    assert (found.num_steps, found.illnesses) == (20, [])
    path.write_text("".join(of_ranks[0]) + "1: step 7 loss: nan\n")
    assert names(path) == {"loss-nan"}
    path.write_text("".join(of_ranks[0]) + "".join(f"2: {line}" for line in of_ranks[1] * 7))
    assert diagnose(path).num_steps > 20  # the first rank has gone


def test_the_loss_of_a_rewarded_policy_says_nothing(tmp_path):
    path = tmp_path / "run.log"
    path.write_text("{'loss': 0.0, 'grad_norm': 0.3, 'reward': 0.1, 'kl': 0.0}\n" * 40)
    assert not names(path)


def test_the_same_step_of_several_ranks_counts_once(tmp_path):
    path = tmp_path / "run.log"
    path.write_text("".join(f"step {at} loss: {2 - 0.1 * at:.6f}\n" * 4 for at in range(1, 11)))
    found = diagnose(path)
    assert found.num_steps == 10
    assert not found.illnesses


@pytest.mark.parametrize(
    ("version", "stage", "device", "accumulation", "is_ill"),
    [
        ("0.15.1", 2, "cpu", 4, False),
        ("0.15.2", 1, "cpu", 4, True),
        ("0.18.9", 2, "cpu", 4, True),
        ("0.19.0", 2, "cpu", 4, False),
        ("0.17.0", 3, "cpu", 4, False),
        ("0.17.0", 2, "none", 4, False),
        ("0.17.0", 2, "cpu", 1, False),
        ("0.17.0", 2, "cpu", None, True),
    ],
)
def test_dropped_gradients_need_release_stage_device_and_accumulation(
    tmp_path, version, stage, device, accumulation, is_ill
):
    path = tmp_path / "run.log"
    steps = f'    "gradient_accumulation_steps": {accumulation},\n' if accumulation else ""
    path.write_text(
        f"[INFO] [Rank 0] DeepSpeed info: version={version}, git-hash=unknown\n{steps}"
        f'    "zero_optimization": {{\n        "stage": {stage}, \n'
        f'        "offload_optimizer": {{\n            "device": "{device}"\n        }}\n    }}\n'
        + plain(FALLING)
    )
    assert ("dropped-gradients" in names(path)) == is_ill


@pytest.mark.parametrize(("name", "is_ill"), [("Reduce", True), ("Allgather", False)])
def test_a_large_bucket_is_one_that_is_allocated(tmp_path, name, is_ill):
    path = tmp_path / "run.log"
    line = f"[INFO] [stage_1_and_2.py:237:__init__] {name} bucket size 1000000000\n"
    path.write_text(line + plain(FALLING))
    assert ("buckets-1e9" in names(path)) == is_ill


def test_an_error_that_training_survived_is_not_told(tmp_path):
    path = tmp_path / "run.log"
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    path.write_text(plain(FALLING[:5]) + error + plain(FALLING[5:]))
    assert not names(path)
    path.write_text(plain(FALLING) + error)
    assert names(path) == {"device-memory"}


@pytest.mark.parametrize("seed", range(3))
def test_damaged_logs_are_read_to_their_end(tmp_path, seed):
    rng = random.Random(seed)
    path = tmp_path / "run.log"
    for name in EXPECTED:
        data = bytearray((LOGS / f"{name}.log").read_bytes())
        for _ in range(30):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data[rng.randrange(max(len(data) // 2, 1)) :])
        diagnose(path)
