import functools
import sys
from importlib import metadata
from pathlib import Path

import pytest

from configs.errors import ConfigError
from configs.study import default_study, load_study, make_point, study_from
from configs.sweep import load_sweep
from deep_optimizer_states.predict.memory import GIB
from launch import feasibility, links
from launch.backends import OWN_TRAINER, TRAINERS
from launch.backends.megatron_deepspeed import MegatronDeepSpeed
from launch.backends.own import OwnTrainer
from launch.feasibility import (
    HALF_TYPES,
    NO_PRODUCT,
    Host,
    ask_half_types,
    estimate,
    lacks,
    largest_model_that_fits,
    refuse_what_cannot_run,
)
from launch.identity import settings_key
from launch.launchers import Launcher
from launch.sweep import build_parser, make_plan
from launch.task import RunOptions

LAPTOP = Host(host_free_bytes=12 * GIB)
H100_NODE = Host(host_free_bytes=480 * GIB, gpu_free_bytes=(79 * GIB,) * 4)
SMALL_GPU = Host(host_free_bytes=480 * GIB, gpu_free_bytes=(16 * GIB,))
NO_SUCH = (
    "needs no-such>=1, and no-such is not installed; `make setup-tests` installs what shipped "
    "studies need"
)


predict, shortages, memory_text = (
    functools.partial(function, trainer=OWN_TRAINER)
    for function in (feasibility.needed_bytes, feasibility.shortages, feasibility.memory_text)
)


def refuse_if_short(point, machine):
    feasibility.refuse_what_cannot_run(point, machine, RunOptions(Path("r"), "s"))


def point(model, **fields):
    return make_point({"model": model, "dp": 1, **fields})


def test_a_model_that_does_not_fit_is_refused_with_what_is_needed_and_free():
    with pytest.raises(ConfigError, match=r"7B .* \d+\.\d GiB of host memory needed, 12\.0 GiB"):
        refuse_if_short(point("7B"), LAPTOP)
    with pytest.raises(ConfigError, match=r"GiB of GPU memory needed, 16\.0 GiB free"):
        refuse_if_short(point("7B"), SMALL_GPU)


def test_more_ranks_than_gpus_are_refused_and_the_remedy_is_fewer(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "needs 1 GPUs, 0 found" in shortages(point("tiny", device="cuda"), LAPTOP)[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    needs = r"tp 1 x pp 1 x dp 4 needs 4 GPUs, 1 found \(CUDA_VISIBLE_DEVICES=3\)"
    with pytest.raises(ConfigError, match=rf"{needs}; give --dp 1 or --device cpu, or more"):
        refuse_if_short(make_point({"model": "7B", "dp": 4}), SMALL_GPU)


def test_what_host_memory_lacks_counts_as_the_gpus_where_the_engine_puts_it_there():
    place = Host(80 * GIB, (139 * GIB,))
    assert "GiB of host memory needed" in shortages(point("7B", engine="stock"), place)[0]
    assert "GiB of host memory needed" in shortages(point("7B", engine="all-host"), place)[0]
    assert shortages(point("7B", engine="auto"), place) == []
    host, device = predict(point("7B", engine="auto"), place)
    whole = predict(point("7B", engine="auto"), Host(400 * GIB, (139 * GIB,)))
    assert host < 80 * GIB < whole[0]
    assert device > whole[1]


@pytest.mark.parametrize(
    ("machine", "model"),
    [
        (H100_NODE, "20B"),
        (SMALL_GPU, "3B"),
        (Host(120 * GIB, (139 * GIB,)), "3B"),
        (Host(160 * GIB, (139 * GIB,)), "7B"),
        (Host(4 * GIB, (139 * GIB,)), None),
    ],
)
def test_auto_takes_the_largest_model_that_fits(machine, model):
    def choose():
        return largest_model_that_fits(
            default_study().model_names(), lambda name: [point(name)], machine, OWN_TRAINER
        )

    if model is None:
        with pytest.raises(ConfigError, match="tiny"):
            choose()
    else:
        assert choose() == model


def test_a_pipelines_memory_is_not_predicted_which_is_said():
    trainer = TRAINERS["megatron-pipeline"]()
    staged = load_study("optimus-cc").make_point({"model": "tiny", "device": "cuda", "pp": 2})
    text = feasibility.memory_text(staged, H100_NODE, trainer)
    assert text == "not predicted: --trainer megatron-pipeline: its memory is not predicted"
    assert "; tp 1 x pp 2 x dp 2 needs 4 GPUs, 0 found" in feasibility.memory_text(
        staged, LAPTOP, trainer
    )


INSTALLED = metadata.version("deepspeed")
MEGATRON, OWN = MegatronDeepSpeed.name, OwnTrainer.name
CPU = Host(20 * GIB)
GPU = Host(160 * GIB, (80 * GIB,))
GPUS = Host(500 * GIB, (80 * GIB,) * 4)


@pytest.fixture
def options(tmp_path):
    return RunOptions(tmp_path, "s")


def mine(row, **fields):
    """A point of the default study, whose engine `mine` is the given row."""
    table = default_study().model_dump(mode="json", exclude_unset=True)
    table["engines"]["mine"] = {"title": "mine", **row}
    study = study_from({**table, "name": "mine"}, "here")
    return study.make_point({"model": "tiny", "engine": "mine", **fields})


@pytest.fixture
def models(monkeypatch):
    """Studies that came with runs have no models of their own."""
    tiny, defaults = default_study().load_model("tiny")
    monkeypatch.setattr("configs.study.Study.load_model", lambda _self, _name: (tiny, defaults))


@pytest.mark.usefixtures("models")
class TestNeeds:
    @pytest.mark.parametrize(
        ("needs", "machine", "fields", "words"),
        [
            (["gpu"], CPU, {}, ["needs a GPU, and this run has none"]),
            (["gpu"], GPU, {"device": "cpu"}, ["needs a GPU, and this run has none"]),
            (["gpu"], GPU, {}, []),
            (["two-ranks"], CPU, {}, ["needs two ranks or more, and tp x pp x dp is one"]),
            (["two-ranks"], CPU, {"tp": 2}, []),
            (["deepspeed>=0.1"], CPU, {}, []),
            (
                ["deepspeed>=99"],
                CPU,
                {},
                [f"needs deepspeed>=99, and {INSTALLED} is installed"],
            ),
            (["no-such>=1"], CPU, {}, [NO_SUCH]),
        ],
    )
    def test_what_a_machine_lacks_is_named(self, options, needs, machine, fields, words):
        assert lacks(mine({"needs": needs}, **fields), machine, options) == words

    def test_hosts_that_are_not_this_one_are_not_judged_by_it(self, options, monkeypatch):
        monkeypatch.setattr(Launcher, "is_far", True)
        assert lacks(mine({"needs": ["gpu", "no-such>=1"]}), CPU, options) == []

    def test_fp16_is_refused_where_deepspeed_has_none(self, options, monkeypatch):
        slow = Host(20 * GIB, half_types=lambda: frozenset({"bf16"}))
        half, others = mine({}, dtype="fp16"), [mine({}, dtype=t) for t in ("bf16", "fp32")]
        words = "dtype = 'fp16': DeepSpeed has no fp16 on this processor; give 'bf16' or 'fp32'"
        assert lacks(half, slow, options) == [words]
        assert [lacks(one, slow, options) for one in others] == [[], []]
        assert lacks(half, CPU, options) == lacks(half, GPU, options) == []
        monkeypatch.setattr(Launcher, "is_far", True)
        assert lacks(half, slow, options) == []

    def test_the_trainer_of_a_row_is_the_only_one_that_runs_it(self, options):
        assert lacks(mine({"trainer": OWN}), CPU, options) == []
        with pytest.raises(ConfigError, match=rf"engine 'mine': needs --trainer {MEGATRON}"):
            refuse_what_cannot_run(mine({"trainer": MEGATRON}), CPU, options)


class TestLinks:
    @pytest.fixture(autouse=True)
    def possible(self, monkeypatch):
        monkeypatch.setattr(links, "unavailable", lambda: "")

    @staticmethod
    def lack(machine=CPU, options=None, **fields):
        point = make_point({"model": "tiny", "dp": 2, "global_batch_size": 4, **fields})
        return lacks(point, machine, RunOptions(Path("r"), "s", **(options or {})))

    def test_there_is_no_reason_where_links_can_be_made_or_are_not_asked_for(self, monkeypatch):
        assert self.lack(link_mbit=20) == []
        assert self.lack(GPU, device="cpu", link_mbit=20) == []
        monkeypatch.setattr(links, "unavailable", lambda: "only root may")
        assert self.lack(GPU) == []

    @pytest.mark.parametrize(
        ("fields", "machine", "launcher", "reason"),
        [
            ({"dp": 1}, CPU, Launcher(), "one rank has no link to another; give a dp or pp above"),
            ({}, CPU, Launcher(nnodes=2), "links are shaped between ranks that torchrun starts on"),
            ({}, CPU, Launcher("deepspeed"), "leave out --launcher, --hostfile and --nnodes"),
            ({}, GPU, Launcher(), "GPUs of one machine exchange through its memory"),
            ({"device": "cuda"}, CPU, Launcher(), "give device = 'cpu'"),
        ],
    )
    def test_one_reason_names_field_value_and_remedy(self, fields, machine, launcher, reason):
        (found,) = self.lack(machine, {"launcher": launcher}, link_mbit=20, **fields)
        assert found.startswith("link_mbit = 20: ")
        assert reason in found
        assert found.endswith("; link_mbit = 0 leaves links as they are")

    def test_what_the_machine_lacks_is_said_before_anything_starts(self, monkeypatch):
        monkeypatch.setattr(links, "unavailable", lambda: "only root may")
        assert self.lack(link_mbit=20) == [
            "link_mbit = 20: only root may; link_mbit = 0 leaves links as they are"
        ]


BASIC = load_sweep("basic")
SLOW = Host(20 * GIB, half_types=frozenset)
NATIVE = Host(20 * GIB, half_types=lambda: frozenset({"bf16"}))
UNASKED = Host(20 * GIB, half_types=lambda: pytest.fail("torch was asked for nothing"))
UNASKED_GPU = Host(160 * GIB, (80 * GIB,), UNASKED.half_types)


def planned(machine, *arguments, sweep=BASIC):
    given = build_parser(sweep.study).read(arguments)
    return make_plan(sweep, given, machine)


def chosen(plan):
    """The types of a plan's points, and why those that this machine decided have theirs."""
    types, reasons = {p.dtype for p in plan.points}, plan.options.dtype_reasons
    assert set(reasons) in (set(), {p.name for p in plan.points})
    return types, set(reasons.values())


@pytest.mark.parametrize(
    ("machine", "arguments", "expected"),
    [
        (SLOW, [], ({"fp32"}, {NO_PRODUCT})),
        (SLOW, ["--engines", "stock,dynamic,auto"], ({"fp32"}, {NO_PRODUCT})),
        (NATIVE, [], ({"bf16"}, set())),
        (UNASKED, ["--dtype", "bf16"], ({"bf16"}, set())),
        (UNASKED, ["--dtype", "fp16"], ({"fp16"}, set())),
        (UNASKED, ["--model", "1.3B"], ({"bf16"}, set())),
        (UNASKED_GPU, ["--size", "tiny"], ({"bf16"}, set())),
    ],
)
def test_the_small_form_has_the_type_that_the_processor_multiplies(machine, arguments, expected):
    assert chosen(planned(machine, *arguments)) == expected


def test_types_that_a_study_names_stay():
    imdb = load_study("imdb")
    assert chosen(planned(UNASKED, sweep=load_sweep("strategies", imdb))) == ({"fp32"}, set())
    ladder = load_sweep("ladder", load_study("zero-ladder"))
    assert chosen(planned(UNASKED, sweep=ladder)) == ({"fp32", "bf16", "fp16"}, set())


def test_a_config_of_the_users_own_decides_the_type(tmp_path):
    config = tmp_path / "mine.json"
    config.write_text('{"bf16": {"enabled": true}}')
    plan = planned(SLOW, "--deepspeed-config", str(config))
    assert chosen(plan) == ({"bf16"}, set())
    assert not any(map(plan.options.trainer.refuse, plan.points))


def test_other_hosts_are_not_judged_by_this_one(monkeypatch):
    monkeypatch.setattr(Launcher, "is_far", True)
    assert chosen(planned(UNASKED)) == ({"bf16"}, set())


def test_the_installed_torch_knows_the_questions():
    import torch

    for name in HALF_TYPES:
        assert getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")() in (True, False)
    if hasattr(torch.cpu, "get_capabilities"):
        known = torch.cpu.get_capabilities()
        names = {"avx512_bf16", "amx_bf16", "avx_ne_convert"}
        assert known["architecture"] != "x86_64" or names <= known.keys()


BF16 = "class mkldnn: _is_mkldnn_bf16_supported = lambda: True"
X86 = "class cpu: get_capabilities = lambda: {'architecture': 'x86_64',"


@pytest.mark.parametrize(
    ("torch", "found"),
    [
        (BF16, {"bf16"}),
        (
            "class mkldnn: _is_mkldnn_fp16_supported = _is_mkldnn_bf16_supported = lambda: True",
            HALF_TYPES,
        ),
        ("class mkldnn:\n  def _is_mkldnn_bf16_supported(): raise RuntimeError", set()),
        ("class mkldnn: pass", set()),
        (f"{BF16}\n{X86} 'avx512_f': True, 'avx512_bf16': False, 'amx_bf16': False}}", set()),
        (f"{BF16}\n{X86} 'avx512_f': True, 'avx512_bf16': True, 'amx_bf16': False}}", {"bf16"}),
        (f"{BF16}\n{X86} 'avx512_f': False, 'avx_ne_convert': True}}", {"bf16"}),
        ("raise ImportError", HALF_TYPES),
    ],
)
def test_torch_is_asked_in_a_process_of_its_own(torch, found, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(f"{torch}\nclass ops: mkldnn = mkldnn\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    loaded = "torch" in sys.modules
    assert ask_half_types.__wrapped__() == found
    assert ("torch" in sys.modules) == loaded


def test_the_environment_keeps_torchs_answer_while_nothing_that_decides_it_changes(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)

    def ask(answer):
        """Whether a torch that answers so is asked, and what is then known."""
        told = f"open({str(tmp_path / 'asked')!r}, 'w')\nclass ops:\n  class mkldnn:\n    "
        told += f"_is_mkldnn_bf16_supported = _is_mkldnn_fp16_supported = lambda: {answer}\n"
        (tmp_path / "torch.py").write_text(told)
        (tmp_path / "asked").unlink(missing_ok=True)
        types = ask_half_types.__wrapped__()
        return (tmp_path / "asked").exists(), types

    assert ask(True) == (True, HALF_TYPES)
    assert ask(False) == (False, HALF_TYPES)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert ask(False) == (True, frozenset())
    assert ask(True) == (False, frozenset())
    monkeypatch.setattr("launch.identity.metadata.version", lambda package: "another")
    assert ask(True) == (True, HALF_TYPES)
    for damaged in ('{"asked": ', "[]", '{"types": 1}'):
        (tmp_path / "half-types.json").write_text(damaged)
        assert ask(True) == (True, HALF_TYPES)


def seconds(machine=CPU, **fields):
    return estimate(make_point({"model": "tiny", **fields}), machine).seconds


@pytest.mark.parametrize(
    ("least", "more", "less"),
    [
        (1.1, {"iterations": 40}, {"iterations": 20}),
        (
            1.1,
            {"global_batch_size": 16, "micro_batch_size": 1},
            {"global_batch_size": 16, "micro_batch_size": 16},
        ),
        (100, {"model": "7B"}, {}),
        # Ranks that share a core start one after the other.
        (1.9, {"dp": 8, "global_batch_size": 16, "iterations": 1}, {"iterations": 1}),
    ],
)
def test_more_work_takes_longer_on_a_cpu(least, more, less, monkeypatch):
    monkeypatch.setattr(feasibility, "usable_cores", lambda: 4)
    assert seconds(**more) > least * seconds(**less)


def test_more_work_takes_longer_on_gpus():
    assert seconds(GPUS, model="7B", iterations=40) > seconds(GPUS, model="7B")
    assert seconds(GPUS, model="7B", accumulation=8) > seconds(GPUS, model="7B")
    assert seconds(GPUS, model="7B", hog_share=0.8) > seconds(GPUS, model="7B")
    assert seconds(GPUS, model="7B") < seconds(CPU, model="7B") / 10


def test_bf16_takes_longer_where_torch_has_no_product_of_it():
    slow = Host(20 * GIB, half_types=frozenset)
    assert seconds(slow, dtype="bf16") > 1.5 * seconds(CPU, dtype="bf16")
    assert seconds(slow, dtype="fp32") == seconds(CPU, dtype="fp32")


def test_what_ran_before_goes_before_any_prediction():
    class Before:
        point_key = f"{settings_key(make_point({'model': 'tiny'}))}-data"
        status = "ok"
        seconds = 12.5

    found = estimate(make_point({"model": "tiny"}), CPU, [Before()])
    assert (found.seconds, found.how) == (12.5, "as it took before")
