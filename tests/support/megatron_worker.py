"""Rank of the tests on megatron-core, not a test itself: four gloo ranks, all layouts in one start.

    python megatron_worker.py OUT

Writes ``OUT/RANK.pt``, results by name.
"""

import contextlib
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch import distributed as dist

from configs.schema import Model
from configs.study import default_study
from launch.train_loop import megatron_cpu
from launch.train_loop.model import make_gpt
from optimus_cc import (
    GradientReduction,
    Kind,
    Settings,
    SettingsError,
    Stage,
    Traffic,
    low_rank,
    traffic as traffic_module,
)
from optimus_cc.backpropagation import BackwardCompressor
from optimus_cc.gradients import Place, TiedEmbedding, make_group
from optimus_cc.megatron import CompressedCommunicator, FinalizeGradients

Point = default_study().point_type

HIDDEN, LENGTH, VOCABULARY, MICRO_BATCH = 16, 8, 32, 2
CPU = torch.device("cpu")
MODEL = Model(
    name="m", hidden=HIDDEN, ffn=64, layers=4, heads=2, kv_heads=2, seq_length=LENGTH,
    vocab_size=VOCABULARY, architecture="gpt2",
)  # fmt: skip


def gpt(tp, groups):
    """This rank's part of a small GPT-2 with a tied embedding; the same for every call."""
    torch.manual_seed(1)
    pp = groups.pp.size()
    point = Point(model=MODEL, tp=tp, pp=pp, dtype="fp32", activation_checkpointing=False)
    return make_gpt(point, on_cpu=True, stage=groups.pp.rank())


def forward_step(batches, model):
    """What megatron-core's schedule calls for every micro-batch."""
    tokens = next(batches)
    positions = torch.arange(LENGTH).expand_as(tokens)
    mask = torch.ones((1, 1, LENGTH, LENGTH), dtype=torch.bool).triu(1)
    output = model(tokens, positions, mask, labels=tokens.roll(-1, 1))
    return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})


class Training:
    """A model and all that one rank's iterations need."""

    def __init__(self, tp, pp, settings, *, stock=False, shard=None, seed=0):
        """``shard``: which part of the vocabulary the embedding's group takes this rank to have."""
        self.groups = ProcessGroupCollection.use_mpu_process_groups()
        self.model = gpt(tp, self.groups)
        self.config = self.model.config
        self.traffic = Traffic(CPU)
        self.stage = self.groups.pp.rank()
        has_embedding = self.stage in (0, pp - 1)
        shard = self.groups.tp.rank() if shard is None else shard
        place = Place(shard, self.groups.dp.rank(), has_embedding)
        group = make_group(place, settings.emb_comm_opt)
        self.weight = self.model.shared_embedding_or_output_weight() if has_embedding else None
        tied = None
        if has_embedding:
            tied = TiedEmbedding(self.weight, group, settings.emb_comm_opt)
        self.local = None
        reduction = GradientReduction(
            self.model.parameters(),
            Stage(self.stage, pp, self.groups.dp),
            settings,
            num_iterations=10,
            tied=tied,
            traffic=self.traffic,
        )
        finalize = FinalizeGradients(reduction)
        self.config.finalize_model_grads_func = self._remembering(finalize)
        if stock:
            self.communicator = P2PCommunicator(self.groups.pp, self.config)
        else:
            self.communicator = CompressedCommunicator(
                self.groups.pp, self.config, settings, CPU, traffic=self.traffic
            )
            self.communicator.compressor = BackwardCompressor(settings, self.traffic, seed)

    def _remembering(self, finalize):
        def remember_and_reduce(*arguments, **options):
            if self.weight is not None:
                self.local = self.weight.grad.clone()
            finalize(*arguments, **options)

        return remember_and_reduce

    def iteration(self, number, num_micro_batches):
        self.model.zero_grad()
        generator = torch.Generator().manual_seed(100 * number + self.groups.dp.rank())
        shape = (num_micro_batches, MICRO_BATCH, LENGTH)
        batches = torch.randint(0, VOCABULARY, shape, generator=generator)
        losses = schedules.forward_backward_pipelining_without_interleaving(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=self.model,
            num_microbatches=num_micro_batches,
            seq_length=LENGTH,
            micro_batch_size=MICRO_BATCH,
            p2p_communicator=self.communicator,
            pg_collection=self.groups,
        )
        return [loss["loss"].item() for loss in losses]

    def run(self, num_micro_batches=6, iterations=1, rate=0.0):
        losses = []
        for number in range(iterations):
            losses += self.iteration(number, num_micro_batches)
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter -= rate * parameter.grad
        names = [name for name, _ in self.model.named_parameters()]
        sent = self.traffic.sent
        return {
            "stage": self.stage,
            "losses": losses,
            "gradients": dict(
                zip(names, [p.grad.clone() for p in self.model.parameters()], strict=True)
            ),
            "weights": {name: p.detach().clone() for name, p in self.model.named_parameters()},
            "embedding": None if self.weight is None else self.weight.detach().clone(),
            "embedding_gradient": None if self.weight is None else self.weight.grad.clone(),
            "local_embedding_gradient": self.local,
            "messages": sent[Kind.BACKWARD].messages,
            "compressed": sent[Kind.BACKWARD].compressed,
            "bytes": {kind.value: sent[kind].sent_bytes for kind in Kind},
        }


def backward(rank, **settings):
    return Settings(inter_grad_comp=True, inter_grad_comp_rank=rank, **settings)


def four_stages():
    late = backward(2, inter_grad_comp_epilogue_only=True)
    results = {
        "stock": Training(1, 4, Settings(), stock=True).run(),
        "whole": Training(1, 4, Settings()).run(),
        "full": Training(1, 4, backward(HIDDEN)).run(),
        "all": Training(1, 4, backward(2)).run(),
    }
    for count in (1, 2, 3, 4, 7):
        results[f"late-{count}"] = Training(1, 4, late).run(count)
    return results


def two_shards_two_stages():
    rank = dist.get_rank()
    fused = Settings(emb_comm_opt=True)
    return {
        "shards-unfused": Training(2, 2, Settings()).run(),
        "shards-fused": Training(2, 2, fused).run(),
        "shards-spanned": Training(2, 2, fused, shard=0).run(),
        "shards-compressed": Training(2, 2, backward(2)).run(),
        "shards-other-seeds": Training(2, 2, backward(2), seed=rank).run(),
    }


def two_replicas_two_stages():
    late = {"inter_grad_comp_epilogue_only": True, "use_error_feedback": True}
    everything = backward(
        2, **late, emb_comm_opt=True, grad_comp=True, grad_comp_rank=2, selective_grad_comp=True,
        selective_grad_comp_way=1,
    )  # fmt: skip
    return {
        "replicas-unfused": Training(1, 2, Settings()).run(),
        "replicas-fused": Training(1, 2, Settings(emb_comm_opt=True)).run(),
        "replicas-all-schemes": Training(1, 2, everything).run(iterations=5, rate=0.1),
        "replicas-none": Training(1, 2, Settings()).run(iterations=5, rate=0.1),
        "times-of-all-schemes": timed(everything),
        "times-of-none": timed(Settings()),
    }


class MadeUpClock:
    """Stands still but in the calls that communicate or compress, and notes what they took."""

    def __init__(self, stage):
        self.now, self.took, self.stage = 0.0, Counter(), stage

    def perf_counter(self):
        return self.now

    def pass_by(self, kind, seconds):
        self.now += seconds
        self.took[kind] += seconds

    def exchange(self, operations):
        """Of two stages: what the first one sends and the last one receives goes forward."""
        works = EXCHANGE(operations)
        sent = [operation.op is dist.isend for operation in operations]
        kinds = ["forward" if is_send == (self.stage == 0) else "backward" for is_send in sent]
        for kind, is_send, work in zip(kinds, sent, works, strict=True):
            self.pass_by(kind, 1.0 if is_send else 2.0)
            wait = mock.Mock(side_effect=lambda kind=kind, wait=work.wait: self.wait(kind, wait))
            yield mock.Mock(wait=wait)

    def wait(self, kind, wait):
        wait()
        self.pass_by(kind, 4.0)

    def reduce(self, tensor, *others, group, **options):
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) > 1:  # The loss is added over the tensor-parallel ranks, of which one is.
            stages = {rank // 2 for rank in ranks}
            self.pass_by("gradients" if len(stages) == 1 else "embedding", 8.0)
        return REDUCE(tensor, *others, group=group, **options)

    def compress(self, matrices):
        self.pass_by("compression", 16.0)
        return ORTHONORMAL(matrices)

    def in_place(self):
        """The calls, each of which takes its time on this clock and is otherwise as it was."""
        return (
            mock.patch.object(traffic_module, "time", self),
            mock.patch.object(dist, "batch_isend_irecv", lambda ops: list(self.exchange(ops))),
            mock.patch.object(dist, "all_reduce", self.reduce),
            mock.patch.object(low_rank, "orthonormal", self.compress),
        )


EXCHANGE, REDUCE, ORTHONORMAL = dist.batch_isend_irecv, dist.all_reduce, low_rank.orthonormal


def timed(settings):
    """What two iterations took by kind: as counted in the calls, and as the traffic has it."""
    training = Training(1, 2, settings)
    clock = MadeUpClock(training.stage)
    with contextlib.ExitStack() as stack:
        for patch in clock.in_place():
            stack.enter_context(patch)
        training.run(iterations=2)
        return {"took": dict(clock.took), "timed": training.traffic.seconds()}


def refused(groups, **changes):
    """What a model is told whose schedule or messages cannot be compressed."""
    config = gpt(1, groups).config
    for name, value in changes.items():
        setattr(config, name, value)
    try:
        CompressedCommunicator(groups.pp, config, backward(2), CPU)
    except SettingsError as error:
        return str(error)
    return ""


def main(out):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    megatron_cpu.apply(pipelines=True)
    results = {}
    layouts = ((1, 4, four_stages), (2, 2, two_shards_two_stages), (1, 2, two_replicas_two_stages))
    for tp, pp, cases in layouts:
        parallel_state.initialize_model_parallel(tp, pp, create_gloo_process_groups=False)
        model_parallel_cuda_manual_seed(1)
        results |= cases()
        if pp == 4:
            groups = ProcessGroupCollection.use_mpu_process_groups()
            results["interleaved"] = refused(groups, virtual_pipeline_model_parallel_size=2)
            results["variable"] = refused(groups, variable_seq_lengths=True)
        parallel_state.destroy_model_parallel()
    torch.save(results, Path(out) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
