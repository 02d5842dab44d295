"""``plan`` as a person uses it."""

import json
import subprocess
import sys

import pytest

from deep_optimizer_states import __main__
from deep_optimizer_states.__main__ import main
from deep_optimizer_states.predict import cli
from deep_optimizer_states.predict.machine import MACHINES_DIR, load_machine
from deep_optimizer_states.predict.memory.offload import ahead_room_bytes
from deep_optimizer_states.predict.model import load_model
from deep_optimizer_states.predict.predict import predict
from deep_optimizer_states.predict.workload import STOCK, Workload


def plan(*words):
    return main(["plan", *words])


def test_json_holds_what_is_promised(capsys):
    assert plan("--model", "13B", "--machine", "h100x4", "--engine", "zero3", "--json") == 0
    got = json.loads(capsys.readouterr().out)
    expected = predict(Workload(load_model("13B")[0], STOCK, dp=4), load_machine("h100x4"))
    for name in ("iteration_s", "forward_s", "backward_s", "update_s"):
        assert got["predicted"][name] == getattr(expected, name)
    assert set(got["memory"]) == {
        "device_bytes",
        "host_bytes",
        "page_locked_bytes",
        "device_grads_bytes",
    }
    assert got["fits"] is True
    assert got["binding"] == "host Adam"
    assert 0 < got["bound_s"] < got["predicted"]["iteration_s"]
    assert got["simulated"] is True
    assert got["machine"]["kinds"]["h2d_bytes_per_s"] == "fitted"
    assert got["machine"]["residuals"]["rows"] > 0


def test_text_can_be_read(capsys):
    assert plan("--model", "7B", "--machine", "h100x4") == 0
    out = capsys.readouterr().out
    for words in ("predicted, not run", "update bound by", "policy auto:", "advice", "fits", "GiB"):
        assert words in out
    assert "fit: " in out  # how far the profile can be trusted


def test_it_says_first_what_a_gpu_with_room_for_all_state_does(capsys):
    assert plan("--model", "7B", "--machine", "h200x1") == 0
    first, empty, *rest = capsys.readouterr().out.splitlines()
    assert plan("--model", "7B", "--machine", "h200x1", "--json") == 0
    got = json.loads(capsys.readouterr().out)
    seconds, whole = got["all_resident"]["iteration_s"], got["predicted"]["iteration_s"]
    assert first.startswith("all optimizer state fits on the GPU: ratio 0 takes ")
    assert f"takes {seconds:.3f} s an iteration ({whole / seconds:.1f} times faster than" in first
    assert first.endswith("of 139.7 GiB; predicted, not run")
    assert empty == ""
    assert f"{whole:.3f} s   predicted, not run" in "\n".join(rest)
    assert plan("--model", "7B", "--machine", "h200x1", "--ratio", "0") == 0
    assert "all optimizer state fits" not in capsys.readouterr().out
    assert plan("--model", "20B", "--machine", "h200x1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["all_resident"] is None


def test_nothing_is_faster_than_a_run_that_does_not_fit(tmp_path, capsys):
    # More host memory than there is, while the GPU has room for all.
    small = tmp_path / "small.toml"
    text = (MACHINES_DIR / "h200x1.toml").read_text()
    small.write_text(text.replace("host_memory_bytes = 137e9", "host_memory_bytes = 90e9"))
    assert plan("--model", "7B", "--machine", str(small), "--engine", "zero3") == 0
    out = capsys.readouterr().out
    assert "DOES NOT FIT" in out
    assert "all optimizer state fits on the GPU: ratio 0 takes" in out
    assert "times faster than" not in out.splitlines()[0]


def test_every_option_reaches_the_workload(capsys):
    options = {
        "--dp": 2, "--tp": 2, "--micro-batch": 3, "--accumulation": 5, "--ratio": 0.5,
        "--stride": 3, "--subgroup": 10**7, "--sequence-length": 1024, "--tile": 2**20,
        "--hog-share": 0.25, "--global-batch": 30, "--dtype": "fp16",
    }  # fmt: skip
    words = [str(word) for pair in options.items() for word in pair]
    flags = ["--no-just-in-time", "--no-checkpointing", "--flash-attention", "--json",
             "--no-device-grads", "--weights-on-host", "--prefetch-memory", "auto"]  # fmt: skip
    assert plan("--model", "7B", "--machine", "h100x4", *words, *flags) == 0
    assert json.loads(capsys.readouterr().out)["workload"] == {
        "engine": "ours", "dp": 2, "tp": 2, "micro_batch_size": 3, "accumulation": 5,
        "global_batch_size": 30, "sequence_length": 1024, "offload_ratio": 0.5, "stride": 3,
        "policy": "stride", "just_in_time_forward": False, "keeps_device_grads": False,
        "subgroup_numel": 10**7, "tile_numel": 2**20, "activation_checkpointing": False,
        "materialized_attention": False,
        "hog_share": 0.25, "dtype": "fp16", "weights_on_host": True, "step_before_norm": False,
        "prefetch_memory_bytes": "auto",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "9B"], "unknown model '9B': did you mean"),
        (["--machine", "h100"], "unknown machine 'h100': did you mean 'h100x4'"),
        (["--engine", "zero"], "--engine = 'zero': did you mean 'zero3'"),
        (["--ratio", "1.5"], "--ratio = 1.5"),
        (["--prefetch-memory", "-1"], "--prefetch-memory = -1: give bytes"),
        (["--prefetch-memory", "9", "--engine", "zero3"], "engine 'zero3' has no such setting"),
        (["--micro-batch", "0"], "--micro-batch = 0"),
        (["--sequence-length", "-1"], "--sequence-length = -1"),
        (["--subgroup", "0"], "--subgroup = 0"),
        (["--tile", "17"], "--tile = 17"),
        (["--hog-share", "1"], "--hog-share = 1.0"),
        (["--dp", "65537"], "--dp = 65537: makes 65,537 ranks, of which at most 65,536"),
        (["--dp", "3", "--global-batch", "4"], "--global-batch = 4: dp 3 x --micro-batch 1"),
        (["--stride", "2", "--policy", "all-host"], "--stride = 2: policy 'all-host' has no"),
        (["--tile", "16"], "--tile = 16: cuts a rank's 1,487,"),
        (["--dtype", "fp32"], "--dtype = 'fp32': machine 'h100x4' has a rate for 16-bit"),
        (["--dp", "8", "--global-batch", "4"], "more ranks than the global batch"),
        (["--dp", "0"], "--dp = 0"),
        (["--stride", "0"], "--stride = 0"),
        (["--engine", "zero3", "--stride", "2"], "--stride = 2: engine 'zero3'"),
        (["--engine", "zero3", "--policy", "dynamic"], "engine 'zero3' has its own"),
        (["--engine", "paper"], "--engine = 'paper': did you mean 'zero3'? known: zero3, ours"),
        (["--policy", "dynamo"], "did you mean 'dynamic'"),
    ],
)
def test_a_wrong_argument_is_one_line_and_status_2(capsys, words, message):
    given = {"--model": "7B", "--machine": "h100x4"}
    given |= dict(zip(words[::2], words[1::2], strict=True))
    assert plan(*[word for pair in given.items() for word in pair]) == 2
    got = capsys.readouterr()
    assert got.out == ""
    assert message in got.err
    assert got.err.count("\n") == 1


@pytest.mark.parametrize("model", ["7B", "8.3B", "10B", "13B", "20B", "tiny"])
def test_ranks_are_the_gpus_of_one_node_unless_given(capsys, model):
    def ranks(machine, *words):
        assert plan("--model", model, "--machine", machine, "--json", *words) == 0
        got = json.loads(capsys.readouterr().out)["workload"]
        return got["dp"], got["tp"]

    assert ranks("h100x4") == (4, 1)
    assert ranks("h100x4", "--tp", "2") == (2, 2)
    assert ranks("h200x1") == (1, 1)
    assert ranks("cpu-only") == (1, 1)


def test_several_nodes_are_said_and_what_is_not_modelled(capsys):
    words = "nodes of 4 GPUs; the network between them is not modelled"
    assert plan("--model", "7B", "--machine", "h100x4", "--dp", "9") == 0
    assert f"3 {words}" in capsys.readouterr().out
    assert plan("--model", "7B", "--machine", "h100x4") == 0
    assert words not in capsys.readouterr().out


def test_whole_numbers_may_be_written_with_an_exponent(capsys):
    same = ["--model", "7B", "--machine", "h100x4", "--json"]
    assert plan(*same, "--subgroup", "5e7") == 0
    assert json.loads(capsys.readouterr().out)["workload"]["subgroup_numel"] == 50_000_000
    for wrong in ("2.5", "many", "inf", "nan"):
        with pytest.raises(SystemExit, match="2"):
            plan(*same, "--subgroup", wrong)
        assert f"'{wrong}': give a whole number" in capsys.readouterr().err


def test_json_shows_the_batch_and_sequence_that_are_predicted(capsys):
    words = ["--micro-batch", "2", "--accumulation", "3", "--json"]
    assert plan("--model", "7B", "--machine", "h100x4", *words) == 0
    got = json.loads(capsys.readouterr().out)["workload"]
    assert (got["global_batch_size"], got["sequence_length"]) == (24, 2048)


def test_help_names_the_defaults(capsys):
    with pytest.raises(SystemExit, match="0"):
        plan("--help")
    out = " ".join(capsys.readouterr().out.split())
    for words in ("the GPUs of one node", "(default: 100000000)", "(default: 33554432)", "bf16)"):
        assert words in out


def test_ctrl_c_is_one_line_and_status_130(capsys, monkeypatch):
    def pressed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "predict", pressed)
    assert plan("--model", "7B", "--machine", "h100x4") == 130
    assert capsys.readouterr().err == "plan: interrupted\n"


@pytest.mark.parametrize("engine", ["ours", "zero3"])
def test_a_machine_without_gpus_is_not_told_of_any(capsys, engine):
    assert plan("--model", "20B", "--machine", "cpu-only", "--engine", engine) == 0
    out = capsys.readouterr().out
    assert "the GPU" not in out
    assert "GPU 0" not in out
    assert "use a smaller model, or fewer ranks (dp)" in out
    assert "nodes" not in out
    assert "offload ratio" not in out


def test_a_profile_with_a_missing_rate_says_what_measures_it(tmp_path, capsys):
    path = tmp_path / "half a machine.toml"
    path.write_text(
        'name = "half"\nsource = "here"\ngpus = 1\ncores = 8\nhost_memory_bytes = 64e9\n'
        "device_memory_bytes = 80e9\n[rates]\nh2d_bytes_per_s = 20e9\n"
    )
    assert plan("--model", "7B", "--machine", str(path)) == 2
    err = capsys.readouterr().err
    assert "machine 'half' has no rates." in err
    assert "calibrate" in err


def test_commands_are_named(capsys):
    assert main(["--help"]) == 0
    assert "calibrate" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["plans"]) == 2
    assert "unknown command 'plans'" in capsys.readouterr().err


def test_a_package_that_is_missing_is_named_with_what_to_do(monkeypatch, capsys):
    def import_module(name):
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr(__main__.importlib, "import_module", import_module)
    missing = "psutil.of_another"
    assert main(["calibrate"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("calibrate: not installed for ")
    assert line.endswith(": psutil; give `pip install psutil`")
    missing = "deep_optimizer_states.calibrate"  # ours: a mistake, not the user's
    with pytest.raises(ModuleNotFoundError):
        main(["calibrate"])


def test_help_names_all_packages_that_are_missing(monkeypatch, capsys):
    monkeypatch.setattr(__main__.importlib.util, "find_spec", lambda _name: None)
    assert main(["--help"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("`pip install torch deepspeed pydantic numpy psutil`")


def test_planning_imports_neither_torch_nor_deepspeed():
    code = (
        "import sys; from deep_optimizer_states.__main__ import main; "
        "assert main(['plan', '--model', 'tiny', '--machine', 'cpu-only']) == 0; "
        "assert not {'torch', 'deepspeed'} & set(sys.modules), 'imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def advice_of(capsys, *words):
    assert plan("--json", *words) == 0
    got = json.loads(capsys.readouterr().out)
    return {text.partition(":")[0]: text for text in got["advice"]}, got


def test_advice_has_a_figure_in_every_sentence(capsys):
    advice, _ = advice_of(capsys, "--model", "20B", "--machine", "h100x4")
    assert list(advice) == ["engine", "ratio", "subgroup size", "pinned memory", "threads"]
    assert all(any(char.isdigit() for char in sentence) for sentence in advice.values())


def test_advice_on_the_ratio_is_a_better_prediction_that_fits(capsys):
    words = ["--model", "7B", "--machine", "h100x4", "--policy", "all-host"]
    advice, got = advice_of(capsys, *words)
    ratio = advice["ratio"].removeprefix("ratio: ").split()[0]
    _, better = advice_of(capsys, *words, "--ratio", ratio)
    assert better["fits"]
    assert better["predicted"]["iteration_s"] < got["predicted"]["iteration_s"]
    assert f"{better['predicted']['iteration_s']:.3f} s" in advice["ratio"]


def test_advice_warns_of_prefetch_memory_that_is_not_there(capsys):
    workload = Workload(load_model("20B")[0], dp=4, policy="dynamic")
    room = int(sum(ahead_room_bytes(workload, load_machine("h100x4"), "dynamic")))
    words = ["--model", "20B", "--machine", "h100x4", "--policy", "dynamic", "--prefetch-memory"]
    for limit, warns in [(room + 1, True), (room, False), ("auto", False)]:
        assert ("prefetch memory" in advice_of(capsys, *words, str(limit))[0]) == warns


def test_threads_of_a_rank_with_one_core_are_not_compared(capsys):
    words = ["--model", "tiny", "--machine", "cpu-only", "--dp"]
    alone, both = (advice_of(capsys, *words, ranks)[0]["threads"] for ranks in "21")
    assert alone.startswith("threads: a rank has one core, so OMP_NUM_THREADS=1;")
    assert "with one thread" in both
