"""The program's parts: batches, encoder, masked mean, strategies, and the faults that stay out."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from later import Later

from configs.study import load_study
from launch.frameworks.imdb.reviews import TokenizedReviews
from launch.train_loop.recorder import Recorder
from launch.train_loop.runfile import RunFile, ranks_from_environment

module, train = Later("launch.frameworks.imdb.module"), Later("launch.frameworks.imdb.train")
PAD, END = 1, 2
SHAPE = {"hidden": 16, "ffn": 32, "layers": 2, "heads": 4, "max_length": 12, "dropout": 0.0}


def review(*tokens, label=0):
    return np.array(tokens, dtype=np.int32), label


def made(count, mark):
    """Reviews that hold a token that no other split has."""
    return [review(0, mark, 10 + number, END, label=number % 2) for number in range(count)]


@pytest.fixture
def reviews():
    splits = {"train": made(7, 5), "validation": made(3, 6), "test": made(4, 7)}
    return TokenizedReviews(splits, PAD, END, 32, "a test")


@pytest.fixture
def encoder():
    torch.manual_seed(1)
    return module.SentimentEncoder(32, PAD, module.Shape(**SHAPE)).eval()


def batch_of(found):
    return module.collate(found, pad_id=PAD, end_id=END, max_length=12)


def test_every_loader_reads_its_own_split(reviews):
    """A loader that hands out training reviews for validation or test measures memory alone."""
    data = module.ReviewsData(reviews, batch_size=2, max_length=12)
    for loader, mark, count in (
        (data.train_dataloader(), 5, 6),
        (data.val_dataloader(), 6, 3),
        (data.test_dataloader(), 7, 4),
    ):
        batches = list(loader)
        assert {int(tokens) for batch in batches for tokens in batch.tokens[:, 1]} == {mark}
        assert sum(len(batch.labels) for batch in batches) == count


def test_training_reviews_alone_are_shuffled(reviews):
    data = module.ReviewsData(reviews, batch_size=2, max_length=12)

    def order(loader):
        return [int(token) for batch in loader for token in batch.tokens[:, 2]]

    loader = data.train_dataloader()
    orders = set()
    for epoch in range(6):
        loader.sampler.set_epoch(epoch)
        orders.add(tuple(order(loader)))
    assert len(orders) > 1
    assert order(data.train_dataloader()) == order(data.train_dataloader())
    assert order(data.test_dataloader()) == [10, 11, 12, 13]


def test_ranks_share_the_training_reviews_out(reviews):
    seen = []
    for rank in (0, 1):
        data = module.ReviewsData(reviews, batch_size=1, max_length=12)
        data.trainer = SimpleNamespace(world_size=2, global_rank=rank)
        seen.append([int(batch.tokens[0, 2]) for batch in data.train_dataloader()])
    assert [len(tokens) for tokens in seen] == [4, 4]
    # Seven reviews: one of them fills the second share up.
    assert set(seen[0] + seen[1]) == set(range(10, 17))
    assert len(set(seen[0]) & set(seen[1])) == 1


def test_a_token_that_equals_the_padding_is_still_a_token():
    """The mask comes from lengths: RoBERTa's <s> has id 0, with which careless code pads."""
    batch = batch_of([review(0, PAD, END), review(0, 5, 6, END)])
    assert batch.mask.sum(1).tolist() == [3, 4]
    assert batch.tokens[0].tolist() == [0, PAD, END, PAD]


@pytest.mark.parametrize("length", [11, 12, 13, 500])
def test_long_reviews_are_truncated_and_still_end(length):
    (found,) = batch_of([review(0, *[5] * (length - 2), END)]).tokens.tolist()
    assert len(found) == min(length, 12)
    assert (found[0], found[-1]) == (0, END)


def test_scores_depend_neither_on_how_far_a_review_is_padded_nor_on_what_stands_there(encoder):
    """Fails where attention or the mean takes padding in."""
    short, long = review(0, 5, 6, END), review(0, *range(10, 20), END)
    alone, beside = batch_of([short]), batch_of([short, long])
    expected = encoder(alone.tokens, alone.mask)[0]
    torch.testing.assert_close(encoder(beside.tokens, beside.mask)[0], expected)
    beside.tokens[~beside.mask] = 9
    torch.testing.assert_close(encoder(beside.tokens, beside.mask)[0], expected)


def test_the_order_of_words_counts(encoder):
    one, other = batch_of([review(0, 5, 6, END)]), batch_of([review(0, 6, 5, END)])
    assert not torch.allclose(encoder(one.tokens, one.mask), encoder(other.tokens, other.mask))


def test_padding_never_gets_an_embedding(encoder):
    batch = batch_of([review(0, 5, END), review(0, 5, 6, 7, END)])
    encoder(batch.tokens, batch.mask).sum().backward()
    assert encoder.embedding.weight[PAD].abs().sum() == 0
    assert encoder.embedding.weight.grad[PAD].abs().sum() == 0


def test_the_rate_falls_to_six_tenths_after_every_epoch(encoder):
    found = module.SentimentModule(encoder, 2e-4).configure_optimizers()
    optimizer, schedule = found["optimizer"], found["lr_scheduler"]
    assert type(optimizer) is torch.optim.Adam
    assert optimizer.defaults["weight_decay"] == 0
    rates = []
    for _ in range(3):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([2e-4, 2e-4 * module.DECAY, 2e-4 * module.DECAY**2])
    assert module.DECAY == 0.6


def test_iterations_epochs_and_phases_are_timed_with_accumulation(monkeypatch):
    """Two micro-batches an update: the clock ticks once at every look at it."""
    ticks, written, evaluated = iter(range(1000)), [], []
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    trainer = SimpleNamespace(
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
        accumulate_grad_batches=2,
        num_training_batches=4,
        model=None,
        optimizers=[SimpleNamespace(param_groups=[{"lr": 1.0}])],
        callback_metrics={"validation_loss": torch.tensor(0.5), "validation_accuracy": 0.75},
    )
    recorder = SimpleNamespace(
        timer=lambda *_: None,
        iteration=written.append,
        evaluation=lambda *told: evaluated.append(told),
    )
    timing = train.Recording(recorder)
    timing.on_train_epoch_start(trainer, None)
    for batch in range(4):
        timing.on_train_batch_start(trainer, None, None, batch)
        timing.on_before_backward(trainer, None, None)
        timing.on_after_backward(trainer, None)
        timing.on_train_batch_end(trainer, None, {"loss": torch.tensor(1.0)}, None, batch)
    phases = dict.fromkeys(("forward_ms", "backward_ms", "update_ms"), 2000.0)
    assert [iteration.phases_ms for iteration in written] == [phases] * 2
    assert [iteration.seconds for iteration in written] == timing.iterations_s
    assert len(timing.epochs_s) == 1
    assert timing.epochs_s[0] >= sum(timing.iterations_s)
    timing.on_validation_end(trainer, None)
    assert evaluated == [(2, 0.5, 0.75)]


@pytest.mark.parametrize(
    ("config", "on_gpu", "num_ranks", "expected"),
    [
        ({"zero_optimization": {"stage": 2}}, False, 1, "CpuDeepSpeedStrategy"),
        ({"zero_optimization": {"stage": 2}}, True, 1, "DeepSpeedStrategy"),
        ({}, False, 1, "SingleDeviceStrategy"),
        ({}, False, 2, "DDPStrategy"),
    ],
)
def test_the_strategy_is_lightnings_own_but_for_deepspeed_on_a_cpu(
    config, on_gpu, num_ranks, expected
):
    found = module.strategy_of(config, on_gpu=on_gpu, num_ranks=num_ranks)
    assert type(found).__name__ == expected
    if config:
        assert found.config["zero_optimization"] == {"stage": 2}


def test_every_machine_has_as_many_devices_as_ranks(monkeypatch, tmp_path):
    fields = {"model": "tiny", "dp": 4, "device": "cpu", "global_batch_size": 128}
    point = load_study("imdb").make_point(fields)
    run = SimpleNamespace(point=point, ds_config={}, run_dir=tmp_path, log_to=())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr("lightning.pytorch.Trainer", lambda **given: given)
    given = train.make_trainer(run, SimpleNamespace(num_ranks=4), False, None)
    assert (given["devices"], given["num_nodes"]) == (2, 2)


def test_an_update_that_deepspeed_leaves_out_is_written_as_skipped(tmp_path, capfd):
    """Else an fp16 run that never updates would be told as one that trains."""
    point = load_study("imdb").make_point({"model": "tiny"})
    run = RunFile(tmp_path, point, {}, tmp_path / "x", tmp_path / "metrics.jsonl")
    engine = SimpleNamespace(skipped_steps=0, get_global_grad_norm=lambda: 1.0)
    trainer = SimpleNamespace(
        model=engine,
        accumulate_grad_batches=1,
        num_training_batches=99,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    with Recorder(run, ranks_from_environment({}), counts_tokens=False) as recorder:
        recording = train.Recording(recorder)
        for skipped_so_far in (0, 1, 1, 2):
            engine.skipped_steps = skipped_so_far
            recording.on_train_batch_end(trainer, None, {"loss": torch.tensor(1.0)}, None, 0)
    written = [json.loads(line)["skipped"] for line in run.metrics_path.read_text().splitlines()]
    assert written == [False, True, False, True]
    lines = [line for line in capfd.readouterr().out.splitlines() if "lm loss" in line]
    assert sum("skipped iterations:   1 |" in line for line in lines) == 2
