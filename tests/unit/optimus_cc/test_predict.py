"""The event model of 1F1B: against closed forms, hand-computed cases, and shaped runs."""

import csv
import dataclasses
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from configs.schema import Model as TrainedModel
from deep_optimizer_states.predict.model import Model
from optimus_cc import predict as module
from optimus_cc.predict import (
    Costs,
    PredictionError,
    Workload,
    load_cluster,
    load_gpt2,
    main,
    predict,
)
from optimus_cc.settings import Settings
from optimus_cc.sizes import num_epilogue_messages

ROOT = Path(__file__).resolve().parents[3]
MODEL = Model(
    architecture="gpt2",
    name="m",
    hidden=8,
    layers=6,
    heads=2,
    ffn=16,
    seq_length=4,
    vocab_size=128,
    kv_heads=2,
)
ALL_MESSAGES = Settings(inter_grad_comp=True, inter_grad_comp_rank=1)
EPILOGUE = dataclasses.replace(ALL_MESSAGES, inter_grad_comp_epilogue_only=True)
STAGES = st.integers(2, 6)
COUNTS = st.integers(1, 9)
quickly = hypothesis_settings(max_examples=30, deadline=None)


def workload(pp=2, count=1, dp=1, **changes):
    fields = {"model": MODEL, "pp": pp, "dp": dp, "tp": 1, "micro_batch_size": 2}
    return Workload(**{**fields, "num_micro_batches": count, "element_bytes": 4, **changes})


def costs(pp, forward=1.0, backward=2.0, **changes):
    """Costs on links that take no time, unless changed."""
    none = [0.0] * pp
    fields = {"reduction_s": none, "update_s": none, **changes}
    return Costs(forward_s=[forward] * pp, backward_s=[backward] * pp, **fields)


@quickly
@given(pp=STAGES, count=COUNTS, dp=st.integers(1, 3), forward=st.floats(0.1, 2))
def test_on_free_links_an_iteration_is_the_closed_form(pp, count, dp, forward):
    found = predict(workload(pp, count, dp), Settings(), costs(pp, forward))
    assert found.iteration_s == pytest.approx((pp - 1 + count) * (forward + 2.0))


@quickly
@given(pp=STAGES, count=COUNTS, dp=st.integers(1, 2))
def test_the_epilogue_compresses_as_many_messages_as_it_has(pp, count, dp):
    """By the calls of the schedule, and by the formula that the stages agree by."""
    one = workload(pp, count, dp)
    saved = 256 - 4 * (8 + 8)
    whole = predict(one, Settings(), costs(pp)).sent_bytes["backward"]
    late = whole - predict(one, EPILOGUE, costs(pp)).sent_bytes["backward"]
    links = range(pp - 1)
    assert late == saved * dp * sum(num_epilogue_messages(link, pp, count) for link in links)
    every = whole - predict(one, ALL_MESSAGES, costs(pp)).sent_bytes["backward"]
    assert every == saved * dp * count * len(links)


def test_two_stages_by_hand():
    """Every transfer in its turn; a message is 256 bytes, and the embedding 4096."""
    one = workload()
    slow = {"bytes_per_s": 64.0, "latency_s": 0.5}
    found = predict(one, Settings(), costs(2, update_s=[3.0, 3.0], **slow))
    assert (one.message_bytes, one.embedding) == (256, (128, 8))
    there = 1 + 256 / 64 + 0.5  # the first forward, and its activation's arrival
    back = there + 1 + 2 + 256 / 64 + 0.5
    reduced = back + 2 + 4096 / 64 + 2 * 0.5
    assert found.iteration_s == pytest.approx(reduced + 2 * 0.5 + 3)
    assert found.sent_bytes == {"forward": 256, "backward": 256, "gradients": 0, "embedding": 8192}


def test_a_compressed_message_costs_its_pair_and_the_work_at_both_ends():
    whole = predict(workload(), Settings(), costs(2, bytes_per_s=64.0))
    work = costs(2, bytes_per_s=64.0, pack_s=0.25, restore_s=0.5)
    compressed = predict(workload(), EPILOGUE, work)
    pair = 4 * (8 + 8)
    saved = (256 - pair) / 64 - 0.75
    assert whole.iteration_s - compressed.iteration_s == pytest.approx(saved)


def test_ranks_share_cores():
    """Two replicas on one core take twice as long as alone, and on two as long."""
    one, two = (
        predict(workload(2, 1, 2), Settings(), costs(2, cores=cores)).iteration_s
        for cores in (1, 2)
    )
    assert (one, two) == (pytest.approx(12.0), pytest.approx(6.0))


def test_fused_embedding_saves_what_the_formulas_say():
    """V (3 D - 2) / D of each rank that has the embedding, and V (2 D - 1) / D when fused."""
    for dp in (1, 2, 4):
        one = workload(3, 2, dp)
        size = 4 * math.prod(one.embedding)
        apart, fused = (
            predict(one, Settings(emb_comm_opt=is_fused), costs(3)).sent_bytes
            for is_fused in (False, True)
        )
        stages = [p for stage in range(3) for p in one.parameters(stage)]
        others = 2 * (dp - 1) * 4 * sum(map(math.prod, stages))
        sent = [sum(b[kind] for kind in ("gradients", "embedding")) for b in (apart, fused)]
        assert sent[0] - others == 2 * size * (3 * dp - 2)
        assert sent[1] - others == 2 * size * (2 * dp - 1)


@quickly
@given(pp=STAGES, count=COUNTS, rate=st.floats(10, 1e4))
def test_sending_less_is_never_slower_where_compressing_is_free(pp, count, rate):
    """Where every sender waits: one that runs ahead can put its messages in another's way."""
    found = [
        predict(
            workload(pp, count), chosen, costs(pp, bytes_per_s=rate, latency_s=0.01)
        ).iteration_s
        for chosen in (Settings(), EPILOGUE, ALL_MESSAGES)
    ]
    assert found == pytest.approx(sorted(found, reverse=True))
    assert found[0] > found[1]


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("name", ["335M", "2.5B", "8.3B", "175B"])
def test_shipped_models_have_the_parameters_of_the_trained_ones(name, tp):
    model = load_gpt2(name)
    one = Workload(model, 4, 2, tp, 8, 32, 4)
    sizes = {
        field.name: getattr(model, field.name) for field in dataclasses.fields(model) if field.init
    }
    trained = TrainedModel(**sizes)
    shapes = [shape for stage in range(4) for shape in one.parameters(stage)]
    # Of a layer its norms and two biases, the last norm, and the positions are on every shard.
    whole = model.hidden * (6 * model.layers + 2 + model.seq_length)
    total = (sum(map(math.prod, [*shapes, one.embedding])) - whole) * tp + whole
    assert total == trained.num_parameters(tp)


@pytest.mark.parametrize(
    ("layers", "pp", "expected"),
    [(24, 4, (6, 6, 6, 6)), (10, 4, (2, 3, 3, 2)), (7, 4, (2, 2, 2, 1)), (5, 2, (3, 2))],
)
def test_stages_are_those_of_the_trainer(layers, pp, expected):
    model = dataclasses.replace(MODEL, layers=layers)
    assert workload(pp, model=model).layers_of_stages == expected


def test_the_cluster_is_the_published_one_and_its_source_says_what_is_assumed():
    cluster = load_cluster("a100x64")
    one = cluster.workload(load_gpt2("8.3B"), "fp32")
    assert (one.pp, one.dp, one.tp, one.num_micro_batches) == (4, 2, 8, 32)
    assert "Assumed" in cluster.source
    half, full = (
        predict(one, Settings(), cluster.costs(one, Settings(), "fp32", gbit, 8)) for gbit in (1, 2)
    )
    assert half.iteration_s == pytest.approx(2 * full.iteration_s, rel=0.05)


def run_command(capsys, *words):
    code = main(words)
    return code, *capsys.readouterr()


def test_the_command_marks_everything_as_simulated(capsys):
    words = ("--model", "2.5B", "--links", "0.1,200", "--scheme", "uncompressed,cb+fe")
    code, text, _ = run_command(capsys, *words)
    first, _, _, head, *rows = text.splitlines()
    assert code == 0
    assert first.startswith("simulated, not run: 2.5B")
    assert head.split()[:3] == ["kind", "link", "scheme"]
    assert len(rows) == 4
    assert all(row.startswith("simulated") for row in rows)
    kind, link, unit, scheme, _, faster, best, *_ = rows[1].split()
    assert (kind, link, unit, scheme, best) == ("simulated", "0.1", "Gb/s", "cb+fe", "best")
    assert float(faster) > 1


def test_a_scheme_alone_is_compared_with_no_compression(capsys):
    both = run_command(capsys, "--model", "2.5B", "--links", "1", "--scheme", "uncompressed,cb")
    alone = run_command(capsys, "--model", "2.5B", "--links", "1", "--scheme", "cb")
    assert alone[1].splitlines()[-1].split() == both[1].splitlines()[-1].split()


@pytest.mark.parametrize("rate", ["1e-320", "1e305"])
def test_links_that_no_node_has_are_refused(capsys, rate):
    code, _, said = run_command(capsys, "--model", "2.5B", "--links", rate)
    assert code == 2
    assert "cannot be simulated: give 1e-06 to 1e+06 Gb/s" in said
    # A cluster's own link is another way there.
    own = dataclasses.replace(load_cluster("two-cores"), link_gbit=float(rate))
    work = own.workload(load_gpt2("2.5B"), "fp32")
    with pytest.raises(PredictionError, match="cannot be simulated"):
        own.costs(work, Settings(), "fp32")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "8.3"), "--model 8.3: not known; did you mean '8.3B'?"),
        (("--model", "8.3B", "--cluster", "a100"), "did you mean 'a100x64'?"),
        (("--model", "8.3B", "--scheme", "cb+fee"), "'fee' is not known; put together"),
        (("--model", "none.toml"), "--model none.toml: "),
        (("--model", "8.3B", "--selective_grad_comp_way", "9"), "has 4 stages"),
    ],
)
def test_a_wrong_argument_is_named(capsys, words, message):
    code, _, said = run_command(capsys, *words)
    assert code == 2
    assert message in said


def test_predicting_needs_no_torch():
    code = "import sys, optimus_cc.predict; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT / "src")})


PAGE = (ROOT / "docs" / "studies" / "optimus-cc.md").read_text(encoding="utf-8")
LINES = Path(__file__).with_name("shaped_links.csv").read_text().splitlines()
MEASURED = list(csv.DictReader(line for line in LINES if not line.startswith("#")))


@pytest.fixture(scope="module")
def errors():
    """Errors of every simulated iteration beside the one that was measured over shaped links."""
    found = []
    for row in MEASURED:
        cluster = dataclasses.replace(
            load_cluster("two-cores"), pp=int(row["pp"]), dp=int(row["dp"])
        )
        workload = cluster.workload(load_gpt2("tiny"), "fp32")
        chosen = module.settings_of(row["scheme"], inter_grad_comp_rank=4, grad_comp_rank=8)
        for gbit, name in ((0.02, "slow_ms"), (0.05, "fast_ms")):
            costs = cluster.costs(workload, chosen, "fp32", gbit)
            simulated_ms = 1e3 * predict(workload, chosen, costs).iteration_s
            found.append(round(100 * (simulated_ms / int(row[name]) - 1)))
    return found


def test_iterations_over_shaped_links_are_as_far_off_as_the_page_says(errors):
    assert len(errors) == 18
    assert f"nine rows at two rates: {min(errors)} to +{max(errors)} %" in PAGE


def test_the_pages_table_is_what_its_command_prints(capsys):
    pattern = r"```\n\$ python -m optimus_cc (predict [^\n]*)\n(.*?)```"
    ((command, table),) = re.findall(pattern, PAGE, flags=re.DOTALL)
    code, text, _ = run_command(capsys, *command.split()[1:])
    assert (code, text.partition("\n\n")[2]) == (0, table)
