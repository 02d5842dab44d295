import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from configs.errors import ConfigError
from configs.schema import Model, Point
from launch.trainer.clock import PeakMemory, PhaseClock
from launch.trainer.log import IterationResult
from launch.trainer.metrics import MetricsFile, iteration_fields
from launch.trainer.model import SdpaAttention, causal_mask, rotary_frequencies
from launch.trainer.runtime import eager_imports

MODEL = Model(name="m", hidden=64, ffn=96, layers=2, heads=4, kv_heads=2, seq_length=16)
POINT = Point(model=MODEL, micro_batch_size=2, global_batch_size=2)
CPU = torch.device("cpu")


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_sdpa_attends_as_materialised_scores_do(kv_heads: int) -> None:
    torch.manual_seed(0)
    query = torch.randn(16, 3, 4, 8)
    key, value = torch.randn(2, 16, 3, kv_heads, 8)
    module = SdpaAttention(SimpleNamespace(attention_dropout=0.0))
    ours = module(query, key, value, None)
    wide_key, wide_value = (t.repeat_interleave(4 // kv_heads, dim=2) for t in (key, value))
    scores = torch.einsum("sbnd,tbnd->bnst", query, wide_key) / math.sqrt(8)
    mask = causal_mask(POINT, CPU)
    assert mask is not None
    weights = scores.masked_fill(mask, -torch.inf).softmax(dim=-1)
    expected = torch.einsum("bnst,tbnd->sbnd", weights, wide_value).reshape(16, 3, 32)
    torch.testing.assert_close(ours, expected)


def test_sdpa_needs_no_mask_and_refuses_dropout() -> None:
    assert causal_mask(POINT.model_copy(update={"attention": "sdpa"}), CPU) is None
    with pytest.raises(ValueError, match="attention_dropout"):
        SdpaAttention(SimpleNamespace(attention_dropout=0.1))


def test_rotary_frequencies_are_full_precision() -> None:
    frequencies = rotary_frequencies(MODEL, CPU)
    assert frequencies.dtype == torch.float32
    expected = [10000 ** (-2 * k / 16) for k in range(8)]
    assert frequencies.tolist() == pytest.approx(expected, rel=1e-6)


def _fields(loss: float, grad_norm: float | None) -> dict[str, object]:
    result = IterationResult(3, 0.25, loss, 3e-4, skipped=False)
    phases_ms = {"forward_ms": 1.0, "backward_ms": 2.0, "update_ms": 3.0}
    return iteration_fields(POINT, result, phases_ms, grad_norm, None)


def test_an_iterations_loss_comes_back_exactly() -> None:
    fields = json.loads(json.dumps(_fields(0.1 + 0.2, 1.5)))
    assert fields["loss"] == 0.1 + 0.2
    assert "loss_text" not in fields
    assert (fields["iteration"], fields["iteration_ms"], fields["tokens"]) == (3, 250.0, 96)
    assert fields["host_memory_bytes"] > 1_000_000
    assert fields["device_memory_bytes"] is None


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_null_with_its_text(loss: float) -> None:
    fields = _fields(loss, math.inf)
    assert (fields["loss"], fields["loss_text"], fields["grad_norm"]) == (None, str(loss), None)


def test_events_are_on_disk_at_once_and_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        assert not path.exists()
        metrics.write("start", {"seed": 1})
        assert path.read_text() == '{"event": "start", "seed": 1}\n'
        with pytest.raises(ValueError, match="JSON"):
            metrics.write("iteration", {"loss": math.nan})
    with MetricsFile(path) as again, pytest.raises(ConfigError, match="already there"):
        again.write("start", {})
    with MetricsFile(None) as nobody:
        nobody.write("start", {})


def test_a_phase_is_summed_until_it_is_taken() -> None:
    clock = PhaseClock(CPU)
    for _ in range(2):
        with clock.phase("backward"):
            sum(range(10_000))
    first = clock.take()
    assert first["backward_ms"] > 0
    assert first["forward_ms"] == first["update_ms"] == 0.0
    assert clock.take()["backward_ms"] == 0.0
    assert PeakMemory(CPU).take() is None


def test_imports_are_eager_only_inside_the_context() -> None:
    compiler = torch.compile
    with eager_imports():

        @torch.compile(mode="max-autotune")
        def decorated() -> int:
            return 1

        assert torch.compile(decorated) is decorated
    assert torch.compile is compiler
    assert decorated() == 1
