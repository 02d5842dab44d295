"""The program's parts: batches, encoder, masked mean, strategies, and the faults that stay out."""

import json
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from configs.study import load_study
from launch.frameworks.imdb.encoder import (
    SentimentEncoder,
    Shape,
    masked_mean,
    sines,
)
from launch.frameworks.imdb.files import TokenizedReviews
from launch.frameworks.imdb.module import (
    DECAY,
    CpuDeepSpeedStrategy,
    ReviewsData,
    SecondsPerBatch,
    SentimentModule,
    collate,
    strategy_of,
    truncated,
)
from launch.frameworks.imdb.train import Recording, build, make_trainer
from launch.trainer.recorder import Recorder
from launch.trainer.runfile import RunFile, ranks_from_environment

PAD, END = 1, 2
SHAPE = Shape(hidden=16, ffn=32, layers=2, heads=4, max_length=12, dropout=0.0)


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
    return SentimentEncoder(32, PAD, SHAPE).eval()


batch_of = partial(collate, pad_id=PAD, end_id=END, max_length=12)


def test_every_loader_reads_its_own_split(reviews):
    """A loader that hands out training reviews for validation or test measures memory alone."""
    data = ReviewsData(reviews, batch_size=2, max_length=12)
    for loader, mark, count in (
        (data.train_dataloader(), 5, 6),
        (data.val_dataloader(), 6, 3),
        (data.test_dataloader(), 7, 4),
    ):
        batches = list(loader)
        assert {int(tokens) for batch in batches for tokens in batch.tokens[:, 1]} == {mark}
        assert sum(len(batch.labels) for batch in batches) == count


def test_training_reviews_alone_are_shuffled(reviews):
    data = ReviewsData(reviews, batch_size=2, max_length=12)

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
        data = ReviewsData(reviews, batch_size=1, max_length=12)
        data.trainer = SimpleNamespace(world_size=2, global_rank=rank)
        seen.append([int(batch.tokens[0, 2]) for batch in data.train_dataloader()])
    assert [len(tokens) for tokens in seen] == [4, 4]
    # Seven reviews: one of them fills the second share up.
    assert set(seen[0] + seen[1]) == set(range(10, 17))
    assert len(set(seen[0]) & set(seen[1])) == 1


def test_worker_processes_give_the_same_batches(reviews):
    with_workers = ReviewsData(reviews, batch_size=2, max_length=12, workers=2)
    without = ReviewsData(reviews, batch_size=2, max_length=12)
    pairs = zip(with_workers.test_dataloader(), without.test_dataloader(), strict=True)
    assert all(torch.equal(a.tokens, b.tokens) and torch.equal(a.mask, b.mask) for a, b in pairs)


@pytest.mark.parametrize("pad", [0, 1, 9])
def test_batches_are_padded_with_the_tokenizers_own_id(pad):
    batch = collate(
        [review(0, 5, END), review(0, 5, 6, 7, END)], pad_id=pad, end_id=END, max_length=9
    )
    assert batch.tokens.tolist() == [[0, 5, END, pad, pad], [0, 5, 6, 7, END]]
    assert batch.mask.tolist() == [[True] * 3 + [False] * 2, [True] * 5]


def test_a_token_that_equals_the_padding_is_still_a_token():
    """The mask comes from lengths: RoBERTa's <s> has id 0, with which careless code pads."""
    batch = batch_of([review(0, PAD, END), review(0, 5, 6, END)])
    assert batch.mask.sum(1).tolist() == [3, 4]


@pytest.mark.parametrize("length", [11, 12, 13, 500])
def test_long_reviews_are_truncated_and_still_end(length):
    tokens = [0, *[5] * (length - 2), END]
    found = truncated(tokens, END, 12)
    assert len(found) == min(length, 12)
    assert (found[0], found[-1]) == (0, END)
    assert batch_of([review(*tokens)]).tokens.shape[1] <= 12


def test_the_mean_is_over_tokens_and_not_over_padding():
    states = torch.tensor([[[1.0], [3.0], [100.0]], [[1.0], [3.0], [5.0]]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    assert masked_mean(states, mask).flatten().tolist() == [2.0, 3.0]


def test_scores_do_not_depend_on_how_far_a_review_is_padded(encoder):
    """Fails where attention or the mean takes padding in."""
    short, long = review(0, 5, 6, END), review(0, *range(10, 20), END)
    alone, beside = batch_of([short]), batch_of([short, long])
    torch.testing.assert_close(
        encoder(alone.tokens, alone.mask)[0], encoder(beside.tokens, beside.mask)[0]
    )


def test_whatever_stands_in_the_padding_changes_nothing(encoder):
    batch = batch_of([review(0, 5, 6, END), review(0, *range(10, 20), END)])
    other = batch.tokens.clone()
    other[~batch.mask] = 9
    torch.testing.assert_close(encoder(batch.tokens, batch.mask), encoder(other, batch.mask))


def test_the_order_of_words_counts(encoder):
    one, other = batch_of([review(0, 5, 6, END)]), batch_of([review(0, 6, 5, END)])
    assert not torch.allclose(encoder(one.tokens, one.mask), encoder(other.tokens, other.mask))


def test_positions_are_sines_and_cosines():
    table = sines(8, 10)
    assert table[0].tolist() == [0, 1] * 4
    torch.testing.assert_close(
        table[3, :2],
        torch.tensor([3.0, 3.0]).sin_().copy_(torch.tensor([np.sin(3.0), np.cos(3.0)])),
    )
    assert len({tuple(row.tolist()) for row in table}) == 10


def test_the_default_shape_is_the_texts():
    assert Shape() == Shape(hidden=256, ffn=1024, layers=6, heads=8, max_length=1024, dropout=0.2)
    encoder = SentimentEncoder(100, PAD)
    assert len(encoder.blocks) == 6
    linears = [part for part in encoder.classifier if isinstance(part, nn.Linear)]
    assert [part.out_features for part in linears] == [256, 2]


def test_padding_never_gets_an_embedding(encoder):
    batch = batch_of([review(0, 5, END), review(0, 5, 6, 7, END)])
    encoder(batch.tokens, batch.mask).sum().backward()
    assert encoder.embedding.weight[PAD].abs().sum() == 0
    assert encoder.embedding.weight.grad[PAD].abs().sum() == 0


def test_the_rate_falls_to_six_tenths_after_every_epoch(encoder):
    found = SentimentModule(encoder, 2e-4).configure_optimizers()
    optimizer, schedule = found["optimizer"], found["lr_scheduler"]
    assert type(optimizer) is torch.optim.Adam
    assert optimizer.defaults["weight_decay"] == 0
    rates = []
    for _ in range(3):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([2e-4, 2e-4 * DECAY, 2e-4 * DECAY**2])
    assert DECAY == 0.6


class Scores(nn.Module):
    """Takes tokens for scores."""

    def forward(self, tokens, mask):
        return tokens


def test_results_are_means_over_reviews_and_not_over_batches(monkeypatch):
    module = SentimentModule(Scores())
    monkeypatch.setattr(module, "log", lambda *_args, **_options: None)
    right, wrong = torch.tensor([[0.0, 9.0]]), torch.tensor([[9.0, 0.0]])
    losses = [
        float(module.training_step(SimpleNamespace(tokens=t, mask=None, labels=one), 0))
        for t, one in ((right.repeat(3, 1), torch.tensor([1, 1, 1])), (wrong, torch.tensor([1])))
    ]
    module.on_train_epoch_end()
    mean = (3 * losses[0] + losses[1]) / 4
    assert module.results == {"train_loss": pytest.approx(mean), "train_accuracy": 0.75}
    module.results.clear()
    module.on_train_epoch_end()
    assert module.results == {}, "an epoch begins anew"


def test_iterations_epochs_and_phases_are_timed_with_accumulation(monkeypatch):
    """Two micro-batches an update: the clock ticks once at every look at it."""
    ticks = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(ticks)))
    device = SimpleNamespace(root_device=torch.device("cpu"))
    trainer = SimpleNamespace(strategy=device, accumulate_grad_batches=2, num_training_batches=4)
    logged = []
    module = SimpleNamespace(log=lambda name, value, **_: logged.append((name, value)))
    timing = SecondsPerBatch()
    timing.on_train_epoch_start(trainer, module)
    for batch in range(4):
        timing.on_train_batch_start(trainer, module, None, batch)
        timing.on_before_backward(trainer, module, None)
        timing.on_after_backward(trainer, module)
        timing.on_train_batch_end(trainer, module, None, None, batch)
    assert len(timing.iterations_s) == 2
    assert [name for name, _ in logged] == ["seconds_per_batch"] * 2
    assert timing.phases_ms == dict.fromkeys(("forward_ms", "backward_ms", "update_ms"), 2000.0)
    assert len(timing.epochs_s) == 1
    assert timing.epochs_s[0] >= sum(timing.iterations_s)


class TestStrategies:
    CONFIG: ClassVar = {"zero_optimization": {"stage": 2}}

    def test_without_a_gpu_deepspeed_gets_the_strategy_for_cpus(self):
        found = strategy_of(self.CONFIG, on_gpu=False, num_ranks=1)
        assert type(found) is CpuDeepSpeedStrategy
        assert found.config["zero_optimization"] == {"stage": 2}

    def test_a_gpu_gets_lightnings_own(self):
        from lightning.pytorch.strategies import DeepSpeedStrategy

        assert type(strategy_of(self.CONFIG, on_gpu=True, num_ranks=1)) is DeepSpeedStrategy

    def test_without_deepspeed_one_device_or_data_parallel(self):
        from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

        assert type(strategy_of(None, on_gpu=False, num_ranks=1)) is SingleDeviceStrategy
        assert type(strategy_of(None, on_gpu=False, num_ranks=2)) is DDPStrategy

    def test_deepspeed_without_a_gpu_is_given_a_device_with_an_index(self, monkeypatch):
        found = strategy_of(self.CONFIG, on_gpu=False, num_ranks=2)
        monkeypatch.setattr(CpuDeepSpeedStrategy, "local_rank", 1)
        assert found.root_device == torch.device("cpu", 1)

    def test_every_machine_has_as_many_devices_as_ranks(self, monkeypatch, tmp_path):
        import lightning.pytorch as pl

        fields = {"model": "tiny", "dp": 4, "device": "cpu", "global_batch_size": 128}
        point = load_study("imdb").make_point(fields)
        run = SimpleNamespace(point=point, ds_config=self.CONFIG, run_dir=tmp_path)
        ranks = SimpleNamespace(num_ranks=4, rank=0, is_first=True)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        monkeypatch.setattr(pl, "Trainer", lambda **given: given)
        given = make_trainer(run, ranks, False, [])
        assert (given["devices"], given["num_nodes"]) == (2, 2)
        assert type(given["strategy"]) is CpuDeepSpeedStrategy


@pytest.mark.parametrize(
    ("engine", "offloads"), [("no-deepspeed", False), ("deepspeed-stage-2-offload", True)]
)
def test_the_hosts_adam_is_taken_where_the_optimizer_is_offloaded(engine, offloads, reviews):
    point = load_study("imdb").make_point({"model": "tiny", "engine": engine})
    module, _ = build(SimpleNamespace(point=point), reviews)
    assert module._on_host is offloads


def test_an_update_that_deepspeed_leaves_out_is_written_as_skipped(tmp_path, capfd):
    """Else an fp16 run that never updates would be told as one that trains."""
    point = load_study("imdb").make_point({"model": "tiny"})
    run = RunFile(tmp_path, point, {}, tmp_path / "x", tmp_path / "metrics.jsonl")
    timing = SimpleNamespace(iterations_s=[0.5], phases_ms={})
    engine = SimpleNamespace(skipped_steps=0, get_global_grad_norm=lambda: 1.0)
    trainer = SimpleNamespace(
        model=engine,
        accumulate_grad_batches=1,
        strategy=SimpleNamespace(root_device=torch.device("cpu")),
    )
    with Recorder(run, ranks_from_environment({}), {}, counts_tokens=False) as recorder:
        recording = Recording(recorder, timing)
        for skipped_so_far in (0, 1, 1, 2):
            engine.skipped_steps = skipped_so_far
            recording.on_train_batch_end(trainer, None, {"loss": torch.tensor(1.0)}, None, 0)
    written = [json.loads(line)["skipped"] for line in run.metrics_path.read_text().splitlines()]
    assert written == [False, True, False, True]
    lines = [line for line in capfd.readouterr().out.splitlines() if "lm loss" in line]
    assert sum("skipped iterations:   1 |" in line for line in lines) == 2
