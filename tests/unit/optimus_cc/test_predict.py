"""The event model of 1F1B: against closed forms, hand-computed cases, and the other packages."""

import csv
import dataclasses
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings as hypothesis_settings, strategies as st

from configs.schema import Model as TrainedModel
from optimus_cc.__main__ import main
from optimus_cc.backpropagation import num_epilogue_messages
from optimus_cc.predict import cli, schemes
from optimus_cc.predict.cluster import load_cluster, load_model
from optimus_cc.predict.fit import FREE, fit, read_run
from optimus_cc.predict.fluid import Resource, Simulation
from optimus_cc.predict.pipeline import Links, Times, predict
from optimus_cc.predict.workload import Model, PredictionError, Workload
from optimus_cc.settings import Settings

ROOT = Path(__file__).resolve().parents[3]
MODEL = Model(
    name="m", hidden=8, layers=6, heads=2, ffn=16, seq_length=4, vocab_size=128, kv_heads=2
)
ALL_MESSAGES = Settings(inter_grad_comp=True, inter_grad_comp_rank=1)
EPILOGUE = dataclasses.replace(ALL_MESSAGES, inter_grad_comp_epilogue_only=True)
STAGES = st.integers(2, 6)
COUNTS = st.integers(1, 9)
quickly = hypothesis_settings(max_examples=30, deadline=None)


def workload(pp=2, count=1, dp=1, **changes):
    fields = {"model": MODEL, "pp": pp, "dp": dp, "tp": 1, "micro_batch_size": 2}
    return Workload(**{**fields, "num_micro_batches": count, "element_bytes": 4, **changes})


def times(pp, forward=1.0, backward=2.0, **changes):
    none = [0.0] * pp
    fields = {"reduction_s": none, "update_s": none, **changes}
    return Times(forward_s=[forward] * pp, backward_s=[backward] * pp, **fields)


@quickly
@given(pp=STAGES, count=COUNTS, dp=st.integers(1, 3), forward=st.floats(0.1, 2))
def test_on_free_links_an_iteration_is_the_closed_form(pp, count, dp, forward):
    found = predict(workload(pp, count, dp), Settings(), times(pp, forward), FREE)
    assert found.iteration_s == pytest.approx((pp - 1 + count) * (forward + 2.0))
    assert found.phases_s["compute"] == pytest.approx([count * (forward + 2.0)] * pp)


@quickly
@given(pp=STAGES, count=COUNTS, dp=st.integers(1, 2))
def test_the_epilogue_compresses_as_many_messages_as_it_has(pp, count, dp):
    """Counted by the calls of the schedule, and by the formula that the stages agree by."""
    found = predict(workload(pp, count, dp), EPILOGUE, times(pp), FREE)
    expected = {link: dp * num_epilogue_messages(link, pp, count) for link in range(pp - 1)}
    assert found.num_compressed == expected
    found = predict(workload(pp, count, dp), ALL_MESSAGES, times(pp), FREE)
    assert found.num_compressed == dict.fromkeys(range(pp - 1), dp * count)


def test_two_stages_by_hand():
    """Every transfer in its turn; a message is 256 bytes, and the embedding 4096."""
    one = workload()
    links = Links(bytes_per_s=64.0, latency_s=0.5)
    found = predict(one, Settings(), times(2, update_s=[3.0, 3.0]), links)
    assert (one.message_bytes(), one.embedding) == (256, (128, 8))
    there = 1 + 256 / 64 + 0.5  # the first forward, and its activation's arrival
    back = there + 1 + 2 + 256 / 64 + 0.5
    reduced = back + 2 + 4096 / 64 + 2 * 0.5
    assert found.iteration_s == pytest.approx(reduced + 2 * 0.5 + 3)
    assert found.sent_bytes == {"forward": 256, "backward": 256, "gradients": 0, "embedding": 8192}


def test_a_compressed_message_costs_its_pair_and_the_work_at_both_ends():
    links = Links(bytes_per_s=64.0, latency_s=0.0)
    whole = predict(workload(), Settings(), times(2), links)
    compressed = predict(workload(), EPILOGUE, times(2, pack_s=0.25, restore_s=0.5), links)
    pair = 4 * (8 + 8)
    saved = (256 - pair) / 64 - 0.75
    assert whole.iteration_s - compressed.iteration_s == pytest.approx(saved)
    assert compressed.phases_s["compression"] == pytest.approx([0.5, 0.25])


def test_a_sender_waits_for_what_its_buffer_does_not_take():
    """The first stage computes its second forward while the system sends the first's message."""
    found = [
        predict(workload(3, 2), Settings(), times(3), Links(64.0, 0.0, buffer)).spans
        for buffer in (0.0, 64.0, 1e6)
    ]
    seconds = [[s for s in spans if s[:2] == (0, "forward")][1][2] for spans in found]
    assert seconds == pytest.approx([1 + 4, 1 + 3, 1])


def test_ranks_share_cores():
    """Two replicas on one core take twice as long as alone, and on two as long."""
    one, two = (
        predict(workload(2, 1, 2), Settings(), times(2, cores=cores), FREE).iteration_s
        for cores in (1, 2)
    )
    assert (one, two) == (pytest.approx(12.0), pytest.approx(6.0))


def transfers(*works, burst=0.0):
    """When transfers over one link end, given when each begins and how large it is."""
    simulation, link, ends = Simulation(), Resource(10.0, burst), []

    def one(begin, work):
        if begin:
            yield [simulation.pause(begin)]
        yield [simulation.start(work, link)]
        ends.append(simulation.now_s)

    for begin, work in works:
        simulation.follow(one(begin, work))
    simulation.run()
    return ends


def test_transfers_share_a_link():
    assert transfers((0, 10), (0, 20)) == pytest.approx([2.0, 3.0])
    assert transfers((0, 10), (1, 20)) == pytest.approx([1.0, 3.0])


def test_a_token_bucket_fills_again_in_a_pause():
    """5 at once; 0.25 s after the first's end half of that again, and after a long pause all."""
    assert transfers((0, 15), (1.25, 10), (9, 15), burst=5.0) == pytest.approx([1, 2, 10])


def test_fused_embedding_saves_what_the_formulas_say():
    """V (3 D - 2) / D of each rank that has the embedding, and V (2 D - 1) / D when fused."""
    for dp in (1, 2, 4):
        one = workload(3, 2, dp)
        size = 4 * math.prod(one.embedding)
        apart, fused = (
            predict(one, Settings(emb_comm_opt=is_fused), times(3), FREE).sent_bytes
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
        predict(workload(pp, count), chosen, times(pp), Links(rate, 0.01)).iteration_s
        for chosen in (Settings(), EPILOGUE, ALL_MESSAGES)
    ]
    assert found == pytest.approx(sorted(found, reverse=True))
    assert found[0] > found[1]


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("name", ["335M", "2.5B", "8.3B", "175B"])
def test_shipped_models_have_the_parameters_of_the_trained_ones(name, tp):
    model = load_model(name)
    one = Workload(model, 4, 2, tp, 8, 32, 4)
    trained = TrainedModel(
        architecture="gpt2", **{**dataclasses.asdict(model), "kv_heads": model.heads}
    )
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


def write_run(folder, fields_of_events, **changes):
    folder.mkdir()
    point = {
        "model": {**dataclasses.asdict(MODEL), "architecture": "gpt2"},
        "pp": 2, "dp": 2, "tp": 1, "micro_batch_size": 2, "global_batch_size": 16,
        "dtype": "fp32", "activation_checkpointing": False, "iterations": 6, **changes,
    }  # fmt: skip
    settings = {"inter_grad_comp": True, "inter_grad_comp_rank": 1}
    run = {"point": point, "provenance": {"cpu": {"cores_usable": 2}}}
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "ds_config.json").write_text(json.dumps({"optimus_cc": settings}))
    fields = dict.fromkeys(("forward_bytes", "backward_bytes"), 0)
    fields |= dict.fromkeys(("gradients_bytes", "embedding_bytes"), 0)
    event = {"event": "iteration", "iteration_ms": 50.0, **fields, **fields_of_events}
    lines = [json.dumps({**event, "iteration": n}) for n in range(1, 7)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def known():
    """Times of a rank alone, with an unequal last stage."""
    none = (0.0, 0.0)
    update = [0.004 * workload().numel(stage) / workload().numel(0) for stage in range(2)]
    return Times([0.002, 0.005], [0.004, 0.010], [0.003] * 2, update, 1e-4, 3e-5, none, 5e-4, 2)


@pytest.fixture
def folder(tmp_path, known):
    """A run whose phases are those that the model predicts for known times."""
    found = predict(workload(2, 4, 2), ALL_MESSAGES, known, FREE)
    stages = {name: [1e3 * s for s in seconds] for name, seconds in found.phases_s.items()}
    stages |= {"gradients": stages.pop("reduction"), "embedding": [0.0, 0.0]}
    event = {"stages_ms": stages, "iteration_ms": 1e3 * found.iteration_s}
    return write_run(tmp_path / "run", event)


def test_a_fit_finds_the_times_that_a_run_was_made_of(folder, known):
    """Four ranks on two cores: phases are longer than what the ranks compute."""
    run = read_run(folder)
    assert run.stages_ms["compute"][1] > 1.2e3 * 4 * (0.005 + 0.010)
    found = fit(run, run.cores)
    for name in ("forward_s", "backward_s", "reduction_s", "update_s"):
        assert getattr(found.times, name) == pytest.approx(getattr(known, name), rel=0.02)
    assert found.times.exchange_s == pytest.approx(known.exchange_s, rel=0.05)


def test_what_cannot_be_fitted_is_refused(tmp_path):
    with pytest.raises(PredictionError, match=r"metrics.jsonl has no stages_ms.*run it again"):
        fit(read_run(write_run(tmp_path / "old", {})), 2)
    with pytest.raises(PredictionError, match="link_mbit = 20: times are taken from"):
        fit(read_run(write_run(tmp_path / "shaped", {}, link_mbit=20)), 2)
    with pytest.raises(PredictionError, match="tp = 2: exchanges of shards"):
        read_run(write_run(tmp_path / "shards", {}, tp=2))
    with pytest.raises(PredictionError, match="no run folder of the trainer"):
        read_run(tmp_path)
    with pytest.raises(PredictionError, match="no iteration after the first 3; train more"):
        read_run(write_run(tmp_path / "short", {"event": "evaluation"}))
    other = write_run(tmp_path / "other", {})
    metrics = other / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("embedding_bytes", "something"))
    with pytest.raises(PredictionError, match="no run folder of the trainer"):
        read_run(other)


def test_the_cluster_is_the_published_one_and_its_source_says_what_is_assumed():
    cluster = load_cluster("a100x64")
    one = cluster.workload(load_model("8.3B"), "fp32")
    assert (one.pp, one.dp, one.tp, one.num_micro_batches) == (4, 2, 8, 32)
    assert "Assumed" in cluster.source
    half = predict(one, Settings(), cluster.times(one, Settings(), "fp32"), cluster.links(1, 8))
    full = predict(one, Settings(), cluster.times(one, Settings(), "fp32"), cluster.links(2, 8))
    assert half.iteration_s == pytest.approx(2 * full.iteration_s, rel=0.05)


def run_command(capsys, *words):
    code = main(["predict", *words])
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
    _, text, _ = run_command(capsys, *words, "--json")
    table = json.loads(text)
    assert table["simulated"] is True
    _, text, _ = run_command(capsys, *words, "--csv")
    slow = list(csv.DictReader(io.StringIO(text)))[1]
    assert (slow["link"], slow["scheme"], slow["best"]) == ("0.1 Gb/s", "cb+fe", "best")
    assert float(slow["times_faster"]) == table["rows"][1]["times_faster"] > 1


def test_the_command_predicts_from_a_run_and_sets_a_shaped_one_beside_it(capsys, folder, tmp_path):
    shaped = write_run(tmp_path / "shaped", {}, link_mbit=20, engine="name")
    trace = tmp_path / "trace.json"
    code, text, _ = run_command(
        capsys, "--run", str(folder), "--link-mbit", "20", "--compare", str(shaped),
        "--timeline", str(trace), "--json",
    )  # fmt: skip
    assert code == 0
    *predicted, beside = json.loads(text)["rows"]
    assert [row["scheme"] for row in predicted] == list(schemes.ALL)
    assert (beside["kind"], beside["scheme"]) == ("simulated, measured", "name")
    assert (beside["measured_ms"], beside["same_bytes"]) == (50.0, False)
    assert beside["run"] == str(shaped)
    spans = json.loads(trace.read_text())
    assert {span["tid"] for span in spans} == {0, 1, 2, 3}
    assert all("simulated" in span["name"] for span in spans)
    words = ("--run", str(folder), "--link-mbit", "20", "--compare", str(shaped), "--markdown")
    first, second = (table.splitlines() for table in run_command(capsys, *words)[1].split("\n\n"))
    assert "seconds, simulated" in first[0]
    assert [row.split(" | ")[0] for row in first[2:]] == [f"| {name}" for name in schemes.ALL]
    assert second[0].endswith(": ms, measured / simulated / error | 20 Mbit/s |")
    assert second[2].startswith("| name | 50 / ")


DOCUMENT = (ROOT / "docs" / "optimus_cc.md").read_text(encoding="utf-8")
PRINTED = re.findall(
    r"```bash\npython -m optimus_cc (predict [^\n]*--markdown)\n```\n\n((?:(?:\|[^\n]*)?\n)+)",
    DOCUMENT,
)
"""Commands of the document, and the tables below each."""


@pytest.mark.parametrize(("command", "tables"), PRINTED)
def test_the_documents_tables_are_those_that_its_commands_print(capsys, command, tables):
    if "_RUN" not in command:
        assert tables.strip() == run_command(capsys, *command.split()[1:])[1].strip()
        return
    # Nobody has the shaped runs any more: their values are printed again.
    for table in tables.strip().split("\n\n"):
        head, _, *lines = ([c.strip() for c in row.split("|")[1:-1]] for row in table.splitlines())
        name, pp, dp, tp = re.match(r"(\w+), PP (\d), DP (\d), TP (\d): ", head[0]).groups()
        rows = [
            {"link": link, "scheme": line[0], "measured_ms": measured, "iteration_ms": simulated}
            for line in lines
            for link, cell in zip(head[1:], line[1:], strict=True)
            for measured, simulated in [map(float, cell.split(" / ")[:2])]
        ]
        model = dataclasses.replace(MODEL, name=name)
        made = workload(pp=int(pp), dp=int(dp), tp=int(tp), model=model)
        assert cli.markdown(made, rows).strip() == table


def test_the_documents_tables_all_come_from_commands():
    assert [command.split()[1] for command, _ in PRINTED] == ["--run", "--model", "--model"]
    predicted = DOCUMENT.partition("## What slow links cost")[2]
    assert predicted.count("\n| --- ") == sum(text.count("\n| --- ") for _, text in PRINTED) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--model or --run: give one of them"),
        (("--model", "8.3"), "--model 8.3: not known; did you mean '8.3B'?"),
        (("--model", "8.3B", "--cluster", "a100"), "did you mean 'a100x64'?"),
        (("--model", "8.3B", "--scheme", "cb+fee"), "'fee' is not known; put together"),
        (("--model", "8.3B", "--link-mbit", "5"), "go with --run"),
        (("--run", "nowhere"), "nowhere: no run folder"),
        (("--model", "8.3B", "--selective_grad_comp_way", "9"), "has 4 stages"),
    ],
)
def test_a_wrong_argument_is_named(capsys, words, message):
    code, _, said = run_command(capsys, *words)
    assert code == 2
    assert message in said


def test_predicting_needs_no_torch():
    code = "import sys, optimus_cc.predict.cli; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT / "src")})
