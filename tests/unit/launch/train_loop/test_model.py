"""Parts of the model that replace megatron-core's."""

import math
from types import SimpleNamespace

import pytest
import torch

from configs.schema import Model
from configs.study import default_study
from launch.train_loop.model import SdpaAttention, causal_mask

Point = default_study().point_type

MODEL = Model(name="m", hidden=64, ffn=96, layers=2, heads=4, kv_heads=2, seq_length=16)
POINT = Point(model=MODEL, micro_batch_size=2, global_batch_size=2)
CPU = torch.device("cpu")


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_sdpa_attends_as_materialised_scores_do(kv_heads):
    torch.manual_seed(0)
    query = torch.randn(16, 3, 4, 8)
    key, value = torch.randn(2, 16, 3, kv_heads, 8)
    module = SdpaAttention(SimpleNamespace(attention_dropout=0.0))
    ours = module(query, key, value, None)
    wide_key, wide_value = (t.repeat_interleave(4 // kv_heads, dim=2) for t in (key, value))
    scores = torch.einsum("sbnd,tbnd->bnst", query, wide_key) / math.sqrt(8)
    weights = scores.masked_fill(causal_mask(POINT, CPU), -torch.inf).softmax(dim=-1)
    expected = torch.einsum("bnst,tbnd->sbnd", weights, wide_value).reshape(16, 3, 32)
    torch.testing.assert_close(ours, expected)


def test_sdpa_needs_no_mask_and_refuses_dropout():
    assert causal_mask(POINT.model_copy(update={"attention": "sdpa"}), CPU) is None
    with pytest.raises(ValueError, match="attention_dropout"):
        SdpaAttention(SimpleNamespace(attention_dropout=0.1))
