"""The model that megatron-core builds from the paper's flags."""

import itertools
from pathlib import Path

import pytest
from processes import python_path
from ranks import run_script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
PAPER_SUBGROUPS = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from launch.train_loop import megatron_cpu, model
from configs.study import default_study
Point = default_study().point_type
megatron_cpu.apply()
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
from megatron.core import parallel_state
parallel_state.initialize_model_parallel()
with torch.device("meta"):
    gpt = model.make_gpt(Point(model=default_study().load_model("7B")[0]), on_cpu=True)
sizes, size = [], 0
for parameter in gpt.parameters():
    size += parameter.numel()
    if size >= 10_000_000:
        sizes.append(size)
        size = 0
from deep_optimizer_states.predict.gpt import parameters_of
small = dict(name="m", hidden=96, ffn=200, layers=3, heads=6, kv_heads=3)
for architecture in ("llama", "gpt2"):
    point = Point(model={**small, "architecture": architecture})
    with torch.device("meta"):
        made = [tuple(each.shape) for each in model.make_gpt(point, on_cpu=True).parameters()]
    counted = parameters_of(point.model)
    order = [*counted.before, *counted.layer * 3, *counted.after]
    assert made == order, (architecture, made, order)
    assert point.model.num_parameters() == sum(map(torch.Size.numel, map(torch.Size, made)))
print(sum(sizes), size, *sizes, file=RESULTS)
"""
KEPT = (
    PAPER_SUBGROUPS.partition('with torch.device("meta")')[0]
    + """
from kept_memory import saved_bytes
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from configs.study import make_point
from launch.simulate.workloads import gpt_of
model_parallel_cuda_manual_seed(1)
sizes = dict(hidden=96, ffn=200, layers=3, heads=6, kv_heads=6, seq_length=64, vocab_size=300)
for attention in ("sdpa", "local"):
    for dtype in ("bf16", "fp32"):
        point = make_point({
            "model": {"name": "x", "architecture": "gpt2", **sizes}, "dp": 1, "dtype": dtype,
            "attention": attention, "activation_checkpointing": False,
        })
        gpt = model.make_gpt(point, True).to(model.DTYPES[dtype]).train()
        found, size = gpt_of(point), 4 if dtype == "fp32" else 2
        assert sorted(found.tensors()) == sorted(p.numel() for p in gpt.parameters())
        ids = torch.randint(0, 300, (2, 64))
        places = torch.arange(64).expand(2, 64).contiguous()
        mask = model.causal_mask(point, torch.device("cpu"))
        saved = saved_bytes(gpt, lambda: gpt(ids, places, mask, labels=ids).sum())
        sample = found.kept_of()(size, 64, attention == "sdpa")
        # The loss keeps the exponentials of the logits in fp32.
        kept = 2 * (3 * sample.layer + sample.head + 64 * 4 * found.padded_vocab_size())
        print(kept / saved, file=RESULTS)
"""
)


ROTARY = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
import torch
from configs.study import default_study, make_point
from launch.ds_json import deepspeed_config
from launch.train_loop import deepspeed_adapter
from launch.train_loop.runfile import RunFile, ranks_from_environment
from launch.train_loop.runtime import distributed
ranks_from_environment({}).export(__import__("os").environ)
point = make_point({"model": "tiny", "device": "cpu"})
run = RunFile(Path(), point, deepspeed_config(point), Path(), Path())
with distributed(point, ranks_from_environment({})) as device:
    gpt = deepspeed_adapter.build_model(run, deepspeed_adapter.parallel_state(), device)
    angles = gpt.rotary_pos_emb(128)[:, 0, 0, :]
    weights = {str(p.dtype) for p in gpt.parameters()}
parts = sum(hasattr(p, "ds_id") for p in gpt.parameters())
print(parts, angles.dtype, angles[100, 1].item(), *weights, file=RESULTS)
"""


def test_rotary_angles_are_fp32_and_weights_bf16() -> None:
    _, dtype, angle, *weights = run_script(ROTARY, PYTHONPATH=python_path(ROOT))
    # The second of 16 frequencies at position 100; bf16 would be off by up to 0.4%.
    assert float(angle) == pytest.approx(100 * 10000 ** (-1 / 16), rel=1e-6)
    assert dtype == "torch.float32"
    assert weights == ["torch.bfloat16"]


WHOLE = ROTARY.replace(
    'point = make_point({"model": "tiny", "device": "cpu"})',
    """
from configs.study import study_from
study = default_study()
table = study.as_table()
table["engines"]["stock"]["zero_init"] = sys.argv[1] == "partitioned"
tiny = study.load_model("tiny")[0].model_dump()
point = study_from(table, "test").make_point({"model": tiny, "dp": 1, "device": "cpu"})
""",
)


@pytest.mark.parametrize("how", ["partitioned", "whole"])
def test_an_engine_may_ask_for_a_model_that_is_made_whole(how: str) -> None:
    parts, *_ = run_script(WHOLE, how, PYTHONPATH=python_path(ROOT))
    assert (parts != "0") == (how == "partitioned")


def test_a_gpt2_keeps_what_is_predicted() -> None:
    ratios = run_script(KEPT, PYTHONPATH=python_path(ROOT, ROOT / "tests" / "support"))
    assert list(map(float, ratios)) == pytest.approx([1.0] * 4, rel=0.035)


def test_parameters_are_those_of_megatron_core_in_its_and_the_papers_order() -> None:
    printed = run_script(PAPER_SUBGROUPS, PYTHONPATH=python_path(ROOT))
    total, rest, *sizes = map(int, printed)
    # DeepSpeed's subgroups of 10M elements, as the authors' 7B log lists them.
    layer = [16_781_312, 20_971_520, 90_181_632, 45_088_768]
    layers = list(itertools.chain.from_iterable([layer] * 32))
    assert (total, rest) == (5_948_837_888, 0)
    assert sizes == [206_045_184, *layers, 206_049_280]
