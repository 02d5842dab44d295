"""``plan`` as a person uses it."""

import subprocess
import sys

import pytest

from deep_optimizer_states import __main__
from deep_optimizer_states.__main__ import main
from deep_optimizer_states.predict import cli
from deep_optimizer_states.predict.machine import load_machine
from deep_optimizer_states.predict.model import load_model
from deep_optimizer_states.predict.predict import predict
from deep_optimizer_states.predict.workload import STOCK, Workload


def plan(*words):
    return main(["plan", *words])


def test_it_prints_what_is_predicted(capsys):
    assert plan("--model", "13B", "--machine", "h100x4", "--engine", "stock") == 0
    out = capsys.readouterr().out
    expected = predict(Workload(load_model("13B")[0], STOCK, dp=4), load_machine("h100x4"))
    for name in ("iteration", "forward", "backward", "update"):
        assert f"{getattr(expected, f'{name}_s'):.3f} s" in out
    for words in ("predicted, not run", "update bound by host Adam", "fits", "GiB", "10 fitted"):
        assert words in out
    assert "fit: 55 rows" in out  # how far the profile can be trusted


def test_every_option_reaches_the_workload():
    options = {
        "--dp": 2, "--tp": 2, "--micro-batch": 3, "--accumulation": 5, "--ratio": 0.5,
        "--stride": 3, "--subgroup": 10**7, "--sequence-length": 1024,
        "--dtype": "fp16",
    }  # fmt: skip
    words = [str(word) for pair in options.items() for word in pair]
    flags = ["--no-just-in-time", "--no-checkpointing", "--flash-attention",
             "--weights-on-host"]  # fmt: skip
    assert workload_of("--model", "7B", *words, *flags) == Workload(
        load_model("7B")[0], dp=2, tp=2, micro_batch_size=3, accumulation=5, sequence_length=1024,
        offload_ratio=0.5, stride=3, policy="stride", just_in_time_forward=False,
        subgroup_numel=10**7,
        activation_checkpointing=False, materialized_attention=False, dtype="fp16",
        weights_at="cpu", device_memory_bytes="auto",
    )  # fmt: skip


def test_what_limits_and_what_would_gain_is_told_where_it_is_asked_for(capsys):
    words = ("--model", "7B", "--machine", "h200x1", "--engine", "stock", "--flash-attention")
    assert plan(*words) == 0
    assert "what limits" not in capsys.readouterr().out
    assert plan(*words, "--explain") == 0
    told = capsys.readouterr().out.partition("what limits each phase\n")[2].splitlines()
    assert [line.split()[0] for line in told[:3]] == ["forward", "backward", "update"]
    assert told[3] == "what would gain, one change at a time"
    assert " less a sample: the plugin (" in told[4]


def test_below_stage_3_subgroups_are_tiles_and_room_is_given_in_gib():
    flat = workload_of("--model", "7B", "--stage", "2")
    assert (flat.stage, flat.subgroup_numel) == (2, flat.tile_numel)
    assert workload_of("--model", "7B").subgroup_numel == 10**8
    assert workload_of("--model", "7B").device_memory_bytes == "auto"
    for words, room in (("auto", "auto"), ("0", 0.0), ("2", 2.0 * 2**30)):
        assert workload_of("--model", "7B", "--device-memory", words).device_memory_bytes == room
    for words in ("most", "-3", "inf"):
        with pytest.raises(SystemExit):
            workload_of("--model", "7B", "--device-memory", words)


def workload_of(*words, machine="h100x4"):
    given = cli._parser().parse_args([*words, "--machine", machine])
    return cli.workload_from(given, load_machine(machine))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "9B"], "unknown model '9B': did you mean"),
        (["--machine", "h100"], "unknown machine 'h100': did you mean 'h100x4'"),
        (["--engine", "zero"], "engine = 'zero': did you mean 'stock'"),
        (["--ratio", "1.5"], "plan: --ratio: offload_ratio = 1.5"),
        (["--sequence-length", "-1"], "sequence_length = -1"),
        (["--stride", "2", "--policy", "all-host"], "stride = 2: policy 'all-host' has no"),
        (["--dtype", "fp32"], "dtype = 'fp32': machine 'h100x4' has a rate for 16-bit"),
        (["--engine", "stock", "--stride", "2"], "stride = 2: engine 'stock'"),
        (["--engine", "stock", "--policy", "dynamic"], "engine 'stock' has its own"),
        (["--engine", "paper"], "engine = 'paper': did you mean 'plugin'? known: stock, plugin"),
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


def test_ranks_are_the_gpus_of_one_node_unless_given():
    def ranks(machine, *words):
        found = workload_of("--model", "7B", *words, machine=machine)
        return found.dp, found.tp

    assert ranks("h100x4") == (4, 1)
    assert ranks("h100x4", "--tp", "2") == (2, 2)
    assert ranks("h200x1") == (1, 1)
    assert ranks("cpu-only") == (1, 1)


def test_whole_numbers_may_be_written_with_an_exponent(capsys):
    assert workload_of("--model", "7B", "--subgroup", "5e7").subgroup_numel == 50_000_000
    for wrong in ("2.5", "many", "inf", "nan"):
        with pytest.raises(SystemExit, match="2"):
            workload_of("--model", "7B", "--subgroup", wrong)
        assert f"'{wrong}': give a whole number" in capsys.readouterr().err


def test_ctrl_c_is_one_line_and_status_130(capsys, monkeypatch):
    def pressed(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "predict", pressed)
    assert plan("--model", "7B", "--machine", "h100x4") == 130
    assert capsys.readouterr().err == "plan: interrupted\n"


def test_a_machine_without_gpus_is_not_told_of_any(capsys):
    assert plan("--model", "20B", "--machine", "cpu-only") == 0
    out = capsys.readouterr().out
    assert "the GPU" not in out
    assert "GPU 0" not in out
    assert "use a smaller model, or fewer ranks (dp)" in out
    assert "nodes" not in out
    assert "offload ratio" not in out
    assert "DOES NOT FIT" in out
    assert "host memory: " in out


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


def test_a_terminal_gets_lines_folded_and_a_file_gets_them_whole(capsys, monkeypatch):
    words = ["--model", "7B", "--machine", "h200x1", "--explain"]
    assert main(["plan", *words]) == 0
    whole = capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["plan", *words]) == 0
    folded = capsys.readouterr().out
    longest = [max(map(len, text.splitlines())) for text in (folded, whole)]
    assert longest[0] <= 100 < longest[1]
    assert folded.split() == whole.split()
