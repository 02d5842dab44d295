import json
import sys

import pytest

from configs.study import load_study
from configs.sweep import load_sweep
from deep_optimizer_states.predict.memory import GIB
from launch.fit import HALF_TYPES, NO_PRODUCT, Machine, ask_half_types, dtype_text
from launch.hosts.launchers import Launcher
from launch.sweep import build_parser, make_plan

BASIC = load_sweep("basic")
SLOW = Machine(20 * GIB, half_types=frozenset)
NATIVE = Machine(20 * GIB, half_types=lambda: frozenset({"bf16"}))
UNASKED = Machine(20 * GIB, half_types=lambda: pytest.fail("torch was asked for nothing"))
GPU = Machine(160 * GIB, (80 * GIB,), UNASKED.half_types)


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
        (SLOW, ["--engines", "vanilla,dynamic,auto"], ({"fp32"}, {NO_PRODUCT})),
        (NATIVE, [], ({"bf16"}, set())),
        (UNASKED, ["--dtype", "bf16"], ({"bf16"}, set())),
        (UNASKED, ["--set", "dtype=bf16"], ({"bf16"}, set())),
        (UNASKED, ["--dtype", "fp16"], ({"fp16"}, set())),
        (UNASKED, ["--model", "1.3B"], ({"bf16"}, set())),
        (GPU, ["--size", "tiny"], ({"bf16"}, set())),
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


def leave_run(results, number, dtype, status="ok"):
    """A run of another machine, the newest of the sweep."""
    folder = results / "basic" / "stem" / f"run-{number:03d}"
    folder.mkdir(parents=True)
    point = {"name": "tiny vanilla", "engine": "vanilla", "dtype": dtype}
    started = f"2026-01-0{number}T00:00:00+00:00"
    table = {"point": point, "point_key": "other", "started": started}
    (folder / "run.json").write_text(json.dumps(table))
    (folder / "status.json").write_text(json.dumps({"status": status}))


@pytest.mark.parametrize("option", ["--keep", "--resume", "--rerun-failed", "--report-only"])
def test_results_that_stay_decide_the_type(option, tmp_path):
    words = [option, "--results-dir", str(tmp_path)]
    assert chosen(planned(SLOW, *words)) == ({"fp32"}, {NO_PRODUCT})
    leave_run(tmp_path, 1, "bf16")
    assert chosen(planned(SLOW, *words)) == ({"bf16"}, set())
    leave_run(tmp_path, 2, "fp32")
    leave_run(tmp_path, 3, "bf16", "failed")
    assert chosen(planned(NATIVE, *words)) == ({"fp32"}, {"the runs that stay are of this type"})
    # What is run again in any case need not be.
    assert chosen(planned(NATIVE, "--results-dir", str(tmp_path))) == ({"bf16"}, set())


def test_the_choice_is_said_in_a_line_with_the_way_to_another():
    assert dtype_text({}) == ""
    assert dtype_text({"a": NO_PRODUCT, "b": NO_PRODUCT}) == (
        "type: fp32 in place of bf16, since torch has no native bf16 matrix product on this "
        "processor; --dtype bf16 asks for it"
    )


def test_the_installed_torch_knows_the_questions():
    import torch

    for name in HALF_TYPES:
        assert getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")() in (True, False)


@pytest.mark.parametrize(
    ("torch", "found"),
    [
        ("class mkldnn: _is_mkldnn_bf16_supported = lambda: True", {"bf16"}),
        (
            "class mkldnn: _is_mkldnn_fp16_supported = _is_mkldnn_bf16_supported = lambda: True",
            HALF_TYPES,
        ),
        ("class mkldnn:\n  def _is_mkldnn_bf16_supported(): raise RuntimeError", set()),
        ("class mkldnn: pass", set()),
        ("raise ImportError", HALF_TYPES),
    ],
)
def test_torch_is_asked_in_a_process_of_its_own(torch, found, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(f"{torch}\nclass ops: mkldnn = mkldnn\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    loaded = "torch" in sys.modules
    assert ask_half_types.__wrapped__() == found
    assert ("torch" in sys.modules) == loaded
