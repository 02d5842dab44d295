"""The three schemes on megatron-core's 1F1B: four processes, a GPT-2 with a tied embedding.

Four stages; two vocabulary shards by two stages; two replicas by two stages.
"""

from pathlib import Path

import prepared
import pytest
import torch
from processes import python_path
from ranks import run_ranks

ROOT = Path(__file__).resolve().parents[3]
WORKER = ROOT / "tests" / "support" / "megatron_worker.py"
HIDDEN, LENGTH, MICRO_BATCH = 16, 8, 2
"""As in the worker, which imports megatron-core and is therefore not imported here."""
MESSAGE_BYTES = 4 * LENGTH * MICRO_BATCH * HIDDEN
PAIR_BYTES = 4 * 2 * (LENGTH * MICRO_BATCH + HIDDEN)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks")
    run_ranks(
        WORKER,
        out,
        num_ranks=4,
        modules=prepared.MEGATRON,
        PYTHONPATH=python_path(ROOT, ROOT / "src"),
    )
    return [torch.load(out / f"{rank}.pt", weights_only=False) for rank in range(4)]


def same(one, other):
    """Whether two ranks, or two runs, have the same bits by name."""
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def difference(results, name, other):
    return max(
        (rank[name]["gradients"][key] - rank[other]["gradients"][key]).abs().max().item()
        for rank in results
        for key in rank[name]["gradients"]
    )


@pytest.mark.parametrize("name", ["whole", "full"])
def test_without_compression_and_at_full_rank_it_is_megatrons_own_bit_for_bit(results, name):
    assert len(results[3]["stock"]["losses"]) == 6
    for rank in results:
        assert rank[name]["losses"] == rank["stock"]["losses"]
        assert same(rank[name]["gradients"], rank["stock"]["gradients"])


def test_low_rank_differs(results):
    """The last stage gets no gradient over a link, and is the only one to stay the same."""
    for rank in results:
        is_same = same(
            {k: v for k, v in rank["all"]["gradients"].items() if "output_layer" not in k},
            {k: v for k, v in rank["whole"]["gradients"].items() if "output_layer" not in k},
        )
        assert is_same == (rank["all"]["stage"] == 3)


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 4, 7])
def test_the_epilogue_has_one_message_for_every_stage_before_the_last(results, num_micro_batches):
    for rank in results[1:]:
        run = rank[f"late-{num_micro_batches}"]
        receiver = run["stage"] - 1
        late = min(num_micro_batches, 4 - receiver - 1)
        assert (run["messages"], run["compressed"]) == (num_micro_batches, late)
        whole = (num_micro_batches - late) * MESSAGE_BYTES
        assert run["bytes"]["backward"] == whole + late * PAIR_BYTES


def test_all_messages_are_compressed_when_not_only_those_of_the_epilogue(results):
    for rank in results[1:]:
        assert rank["all"]["compressed"] == rank["all"]["messages"] == 6
        assert rank["all"]["bytes"]["backward"] == 6 * PAIR_BYTES
    for rank in results[:3]:
        assert rank["all"]["bytes"]["forward"] == 6 * MESSAGE_BYTES


def test_every_shard_of_the_embedding_gets_the_unfused_sum(results):
    """Against what both stages had before, and against the unfused run."""
    for rank, result in enumerate(results):
        first, last = (results[stage * 2 + rank % 2]["shards-fused"] for stage in (0, 1))
        expected = first["local_embedding_gradient"] + last["local_embedding_gradient"]
        for name in ("shards-fused", "shards-unfused"):
            assert torch.equal(result[name]["embedding_gradient"], expected)
    shards = [results[rank]["shards-fused"]["embedding_gradient"] for rank in (0, 1)]
    assert not torch.equal(*shards)


def test_a_group_over_all_shards_gives_other_gradients(results):
    """What the published code did: right at one tensor-parallel rank only."""
    for rank in results:
        spanned, right = (
            rank[name]["embedding_gradient"] for name in ("shards-spanned", "shards-unfused")
        )
        assert (spanned - right).abs().max() > 1e-3


def replicated(result):
    """Parameters that every tensor-parallel rank holds whole."""
    names = ("norm", "position", "linear_proj.bias", "linear_fc2.bias")
    return {k: g for k, g in result["gradients"].items() if any(name in k for name in names)}


@pytest.mark.parametrize(
    ("name", "agree"), [("shards-compressed", True), ("shards-other-seeds", False)]
)
def test_tensor_parallel_ranks_get_the_same_message(results, name, agree):
    """With queries of their own, biases would drift apart from rank to rank."""
    first, second = results[0][name], results[1][name]
    assert replicated(first)
    assert same(replicated(first), replicated(second)) == agree


def test_fusing_over_replicas_gives_the_unfused_gradients_for_fewer_bytes(results):
    assert difference(results, "replicas-fused", "replicas-unfused") < 1e-6
    for rank in results:
        volume = 4 * rank["replicas-fused"]["embedding_gradient"].numel()
        fused, unfused = (
            rank[f"replicas-{name}"]["bytes"]["gradients"]
            + rank[f"replicas-{name}"]["bytes"]["embedding"]
            for name in ("fused", "unfused")
        )
        assert unfused - fused == volume / 2


@pytest.mark.parametrize("name", ["replicas-all-schemes", "replicas-none"])
def test_copies_stay_equal_and_the_loss_falls(results, name):
    """Five iterations: replicas of each stage, and both copies of the embedding."""
    runs = [rank[name] for rank in results]
    for first, second in ((0, 1), (2, 3)):
        assert runs[first]["stage"] == runs[second]["stage"]
        assert same(runs[first]["weights"], runs[second]["weights"])
    assert all(torch.equal(runs[0]["embedding"], run["embedding"]) for run in runs[1:])
    losses = runs[2]["losses"]
    assert sum(losses[-6:]) < sum(losses[:6])


def test_all_schemes_together_send_less_of_every_kind(results):
    for rank in results:
        schemes, none = rank["replicas-all-schemes"], rank["replicas-none"]
        assert (schemes["bytes"]["gradients"] < none["bytes"]["gradients"]) or schemes["stage"]
        assert (schemes["bytes"]["backward"] < none["bytes"]["backward"]) == bool(schemes["stage"])
        assert schemes["bytes"]["forward"] == none["bytes"]["forward"]


def test_every_call_counts_in_the_time_of_its_kind_and_in_no_other(results):
    """On a clock that stands still but in those calls."""
    for rank in results:
        schemes, none = (rank[f"times-of-{name}"] for name in ("all-schemes", "none"))
        assert schemes["timed"] == schemes["took"]
        assert none["timed"] == none["took"] | {"compression": 0.0}
        for kind in ("forward", "backward", "gradients", "embedding"):
            assert none["took"][kind] > 0


def test_what_cannot_be_compressed_is_refused_by_name(results):
    interleaved = results[0]["interleaved"]
    assert interleaved.startswith("virtual_pipeline_model_parallel_size = 2: the schedule is inter")
    assert results[0]["variable"].startswith("variable_seq_lengths = True: ")
