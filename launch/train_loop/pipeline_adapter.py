"""megatron-core's GPT over TP, PP and DP without DeepSpeed, as the training loop takes it.

Communication may be compressed (``optimus_cc``).
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from configs.errors import ConfigError
from configs.schema import Point
from deep_optimizer_states.state_reader import digest
from launch.links import link_sent_bytes
from launch.train_loop import loop
from launch.train_loop.checkpoint import random_states, set_random_states
from launch.train_loop.data import MicroBatch, MicroBatches, build_samples
from launch.train_loop.loop import Digests, PeakMemory, PhaseClock, joined_over_ranks, learning_rate
from launch.train_loop.model import DTYPES, causal_mask, make_gpt
from launch.train_loop.recorder import Iteration, Recorder, finite_or_none, perplexity
from launch.train_loop.runfile import COMPRESSION as BLOCK, Ranks, RunFile
from optimus_cc import (
    COMPRESSION,
    GradientReduction,
    Kind,
    Settings,
    SettingsError,
    Stage,
    Traffic,
)
from optimus_cc.error_statistics import STATISTICS
from optimus_cc.gradients import Place, TiedEmbedding, gradient_of, make_group
from optimus_cc.low_rank import held_bytes

COMMUNICATION = {
    "forward_messages": Kind.FORWARD,
    "backward_messages": Kind.BACKWARD,
    "compression": COMPRESSION,
    "gradients": Kind.GRADIENTS,
    "embedding": Kind.EMBEDDING,
}
"""Phases of an iteration that are communication, and their names in :class:`optimus_cc.Traffic`."""
PHASES = ("compute", *COMMUNICATION, "update")
"""Parts of an iteration. In a pipeline one micro-batch's forward runs beside another's backward, so
that both are one part: what of the schedule is no communication."""
WORD_EMBEDDING = "embedding.word_embeddings.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def train(run: RunFile, ranks: Ranks) -> None:
    """Train a point as one rank of a pipeline; see :func:`loop.train`."""
    settings_of(run)  # what is wrong with it is said before anything slow
    loop.train(run, ranks, PipelineAdapter)


def settings_of(run: RunFile) -> Settings:
    """Return the compression of a run, none by default.

    Raises:
        ConfigError: a setting is not known, is wrong, or does not go with the pipeline or model.
    """
    block = run.ds_config.get(BLOCK, {})
    known = [field.name for field in dataclasses.fields(Settings)]
    if not isinstance(block, dict) or any(name not in known for name in block):
        wrong = sorted(set(block) - set(known)) if isinstance(block, dict) else block
        raise ConfigError(f"{BLOCK}: {wrong} not known; settings are {', '.join(known)}")
    try:
        settings = Settings(**block)
        settings.check_stages(run.point.pp)
    except SettingsError as error:
        raise ConfigError(f"{BLOCK}: {error}") from None
    if settings.emb_comm_opt and run.point.model.architecture != "gpt2":
        raise ConfigError(
            f"{BLOCK}: emb_comm_opt = True: architecture "
            f"'{run.point.model.architecture}' has no tied embedding; take 'gpt2', or leave it out"
        )
    return settings


class PipelineAdapter(loop.Adapter):
    """A rank's part of the model, and all that moves and reduces its gradients."""

    with_deepspeed = False
    packages = ("torch", "megatron-core", "numpy")

    def __init__(self, run: RunFile, device: torch.device, recorder: Recorder) -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection

        from optimus_cc.megatron import CompressedCommunicator, FinalizeGradients

        point, settings = run.point, settings_of(run)
        self.point, self.device = point, device
        self._epilogue_only = settings.inter_grad_comp_epilogue_only
        self.groups: Any = ProcessGroupCollection.use_mpu_process_groups()
        self.stage = self.groups.pp.rank()
        self.is_last = self.stage == point.pp - 1
        # Norms and learned positions are made in fp32, whatever the model's type.
        model = make_gpt(point, device.type == "cpu", self.stage).to(device, DTYPES[point.dtype])
        self.model = model
        self.traffic = Traffic(device)
        self.reduction = GradientReduction(
            model.parameters(),
            Stage(self.stage, point.pp, self.groups.dp),
            settings,
            num_iterations=point.iterations,
            tied=self._tied_embedding(settings),
            traffic=self.traffic,
        )
        model.config.finalize_model_grads_func = FinalizeGradients(self.reduction)
        self.communicator: Any = CompressedCommunicator(
            self.groups.pp, model.config, settings, device, traffic=self.traffic
        )
        tp_rank, dp_rank = self.groups.tp.rank(), self.groups.dp.rank()
        self.optimizer = Optimizer(
            named_weights(model), point, self.groups.mp, is_first_shard=tp_rank == 0
        )
        if dp_rank == 0:
            count = sum(p.numel() for p in model.parameters())
            recorder.parameters(count, tp_rank, self.stage)
        self._batches, self._validation = (
            MicroBatches(samples, point, dp_rank, device) for samples in build_samples(run)
        )
        self.mask = causal_mask(point, device)
        self._clock = PhaseClock(device, ("schedule", "update"))
        self._peak = PeakMemory(device)
        self._link_bytes = 0
        self._sent_bytes: Counter[str] = Counter()
        self._device_peak_bytes = 0
        # Sums and numbers of each link's statistics of what compression left out.
        self._errors = torch.zeros(2, point.pp - 1, len(STATISTICS), dtype=torch.float64)
        self._validation_loss: float | None = None

    def _tied_embedding(self, settings: Settings) -> TiedEmbedding | None:
        if self.point.model.architecture != "gpt2":
            return None
        has_embedding = self.stage == 0 or self.is_last
        place = Place(self.groups.tp.rank(), self.groups.dp.rank(), has_embedding)
        group = make_group(place, settings.emb_comm_opt)
        if group is None:
            return None
        weight = self.model.shared_embedding_or_output_weight()
        return TiedEmbedding(weight, group, settings.emb_comm_opt)

    def begin_timing(self) -> None:
        """Do nothing: an iteration begins when all ranks have brought the last one together."""

    def train(self, iteration: int) -> Iteration:
        link_before = link_sent_bytes(self.point)
        begin = time.perf_counter()
        self.model.zero_grad()
        self.traffic.reset()
        self._clock.begin()
        losses = self._run(self._batches.of_iteration(iteration))
        self._clock.end("schedule")
        norm = self.optimizer.step(iteration)
        self._clock.end("update")
        # After the norm, for which all ranks wait anyway: before, waiting for the last stage's
        # loss would look like computing.
        loss = self._mean(losses)
        sent_bytes, times_ms = self._over_ranks(time.perf_counter() - begin)
        # What was sent has arrived: all ranks have reduced their times.
        self._link_bytes += link_sent_bytes(self.point) - link_before
        self._sent_bytes.update(sent_bytes)
        iteration_ms, *phases = times_ms
        device_bytes = self._peak.take()
        self._device_peak_bytes = max(self._device_peak_bytes, device_bytes or 0)
        return Iteration(
            number=iteration,
            seconds=iteration_ms / 1e3,
            loss=loss,
            learning_rate=learning_rate(self.point, iteration),
            skipped=not math.isfinite(norm),
            grad_norm=norm,
            phases_ms={f"{name}_ms": ms for name, ms in zip(PHASES, phases, strict=True)},
            device_bytes=device_bytes,
            more={**sent_bytes, **self._errors_of_links()},
        )

    def _run(self, batches: Iterator[MicroBatch], *, forward_only: bool = False) -> list[Tensor]:
        """Run an iteration's micro-batches; gradients are reduced at the end, unless forward only.

        Returns:
            Loss of each micro-batch on the last stage, nothing on the others.
        """
        from megatron.core.pipeline_parallel.schedules import (
            forward_backward_pipelining_without_interleaving,
        )

        losses: list[Tensor] = forward_backward_pipelining_without_interleaving(
            forward_step_func=self._forward_step,
            data_iterator=batches,
            model=self.model,
            num_microbatches=self.point.accumulation,
            seq_length=self.point.model.seq_length,
            micro_batch_size=self.point.micro_batch_size,
            forward_only=forward_only,
            p2p_communicator=self.communicator,
            pg_collection=self.groups,
        )
        return losses

    def _forward_step(
        self, batches: Iterator[MicroBatch], model: Callable[..., Tensor]
    ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
        batch = next(batches)
        output = model(batch.tokens, batch.position_ids, self.mask, labels=batch.labels)
        return output, _mean_loss

    def _mean(self, losses: list[Tensor]) -> float:
        """Mean over the global batch; every rank waits for the last stage, which has the losses."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.is_last:
            total += torch.stack(losses).double().mean()
            dist.all_reduce(total, group=self.groups.dp)
        last = dist.get_process_group_ranks(self.groups.pp)[-1]
        dist.broadcast(total, src=last, group=self.groups.pp)
        return total.item() / self.point.dp

    def _over_ranks(self, seconds: float) -> tuple[dict[str, int], list[float]]:
        """Bring together what the ranks measured of an iteration, after which all begin the next.

        Stages wait for each other in different calls: the first for gradients, the last for
        activations. No single rank stands for the pipeline, so that the iteration and its phases
        are means over ranks. It is one all-reduce of some numbers, outside of what is timed.

        Returns:
            ``forward_bytes`` and so on, of all ranks together; and means over all ranks in ms: the
            iteration, then each of :data:`PHASES`.
        """
        clock, waited = self._clock.take(), self.traffic.seconds()
        communication = [1e3 * waited[kind] for kind in COMMUNICATION.values()]
        compute = clock["schedule_ms"] - sum(communication)
        times = [1e3 * seconds, compute, *communication, clock["update_ms"]]
        # Numbers of bytes are exact in this type up to 2^53.
        sent = [self.traffic.sent[kind].sent_bytes for kind in Kind]
        total = torch.tensor([*sent, *times], dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        of_all = total.tolist()
        sent_bytes = {
            f"{kind}_bytes": int(count) for kind, count in zip(Kind, of_all, strict=False)
        }
        return sent_bytes, [ms / self.point.num_ranks for ms in of_all[len(sent) :]]

    def _errors_of_links(self) -> dict[str, float | None]:
        """Means over an iteration's compressed messages, ``link_R_STATISTIC``, if asked for.

        Link ``R`` ends at stage ``R``. A link without such messages, or without one that another
        micro-batch followed, has no fields for what is missing.
        """
        statistics = self.communicator.compressor.statistics
        if statistics is None:
            return {}
        everything = torch.zeros_like(self._errors, device=self.device)
        mine = statistics.take()
        if self.stage > 0:
            everything[:, self.stage - 1] = mine.to(self.device)
        dist.all_reduce(everything)
        sums, counts = everything.cpu()
        means, known = sums / counts, counts > 0
        # Averages over a run are of sizes: links and iterations must not cancel each other out.
        self._errors += torch.stack([torch.where(known, means.abs(), 0.0), known.double()])
        return {
            f"link_{link}_{name}": finite_or_none(means[link, index].item())
            for link in range(len(means))
            for index, name in enumerate(STATISTICS)
            if known[link, index]
        }

    def evaluate(self) -> float:
        self.model.eval()
        count = self.point.eval_iterations
        with torch.no_grad():
            of_batches = map(self._validation.of_iteration, range(1, count + 1))
            losses = [self._mean(self._run(batch, forward_only=True)) for batch in of_batches]
        self.model.train()
        self._validation_loss = sum(losses) / count
        return self._validation_loss

    def _compression_state(self) -> dict[str, Any]:
        return {
            "messages": self.communicator.compressor.state_dict(),
            "reduction": self.reduction.state_dict(),
        }

    def save(self, folder: Path, when_whole: Callable[[], None]) -> bool:
        """Write this rank's file of a checkpoint: weights by names, and what merging them needs."""
        weights = named_weights(self.model)
        folder.mkdir(parents=True, exist_ok=True)
        state = {
            "place": {name: getattr(self.groups, name).rank() for name in ("tp", "pp", "dp")},
            "split_along": {
                name: weight.partition_dim
                if getattr(weight, "tensor_model_parallel", False)
                else None
                for name, weight in weights.items()
            },
            "rank": {"optimizer": self.optimizer.state_dict(), **self._compression_state()},
            "random": random_states(self.device),
        }
        torch.save(state, folder / file_name(dist.get_rank()))
        dist.barrier()
        return True

    def end_save(self) -> None:
        """Return at once: :meth:`save` has ended its save already."""

    def load(self, checkpoint: Path) -> None:
        state = read_shard(checkpoint / file_name(dist.get_rank()), self.device)
        self.optimizer.load_state_dict(state["rank"]["optimizer"])
        self.communicator.compressor.load_state_dict(state["rank"]["messages"])
        self.reduction.load_state_dict(state["rank"]["reduction"])
        set_random_states(state["random"], self.device)

    def digests(self) -> Digests:
        weights = [p.detach() for p in self.model.parameters()]
        return joined_over_ranks((digest(weights), digest(self.optimizer.state)))

    def results(self) -> dict[str, Any]:
        sizes = {"compression_state_bytes": held_bytes(self._compression_state())}
        if self.device.type == "cuda":
            sizes["device_peak_bytes"] = self._device_peak_bytes
        most = torch.tensor(list(sizes.values()), device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        count = {**self._sent_bytes, **dict(zip(sizes, most.tolist(), strict=True))}
        found: dict[str, Any] = {
            f"{name.removesuffix('_bytes')}_mib": n / 2**20 for name, n in count.items()
        }
        found["counted_sent_mib"] = sum(self._sent_bytes.values()) / 2**20
        if self.point.link_mbit:
            total = torch.tensor(self._link_bytes, device=self.device)
            dist.all_reduce(total)
            found["kernel_sent_mib"] = total.item() / 2**20
        if self.communicator.compressor.statistics is not None:
            sums, counts = self._errors.sum(1)
            means = (sums / counts).tolist()
            found |= dict(zip(STATISTICS, map(finite_or_none, means), strict=True))
            missing = [name for name in STATISTICS if found[name] is None]
            found["reasons"] = dict.fromkeys(missing, self._why_nothing_was_compared(counts))
        if (loss := self._validation_loss) is not None:
            found["validation_loss"] = finite_or_none(loss)
            found["validation_perplexity"] = finite_or_none(perplexity(loss))
        return found

    def _why_nothing_was_compared(self, counts: Tensor) -> str:
        """Say why messages have no statistics; ``counts`` are how many have each of them."""
        if not counts.any():
            return "every message was sent whole, as compressed it would be no smaller"
        why = "no compressed message was followed by that of another micro-batch"
        if self.point.accumulation == 1:
            return f"{why}: an iteration has one micro-batch; accumulate two or more"
        if self._epilogue_only:
            return (
                f"{why}: of {self.point.pp} stages a link's epilogue has {self.point.pp - 1} at "
                "most; give inter_grad_comp_epilogue_only = false, or more stages"
            )
        return why


class Optimizer:
    """Updates fp32 master weights, which are the parameters themselves in an fp32 model.

    Gradients are those that every rank has after the reduction.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        point: Point,
        model_group: dist.ProcessGroup,
        *,
        is_first_shard: bool,
    ) -> None:
        """Make master weights of this rank's parameters, which have the names they are saved by.

        ``model_group`` are the ranks that hold one model, over TP and PP; the first shard counts
        what every tensor-parallel rank holds.
        """
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._point = point
        self._group = model_group
        self._counted = [_is_counted(p, is_first_shard) for p in self._parameters]
        self._masters = [
            p if p.dtype == torch.float32 else torch.nn.Parameter(p.detach().float())
            for p in self._parameters
        ]
        self._adam = torch.optim.AdamW(
            self._masters,
            lr=point.lr,
            betas=(point.adam_beta1, point.adam_beta2),
            eps=point.adam_eps,
            weight_decay=point.weight_decay,
        )

    @torch.no_grad()
    def step(self, iteration: int) -> float:
        """Update with the gradients, clipped; not at all where their norm is not finite.

        Returns:
            The norm of the whole model's gradient before clipping, the same on every rank of it.
        """
        gradients = [gradient_of(p).float() for p in self._parameters]
        counted = (g for g, counts in zip(gradients, self._counted, strict=True) if counts)
        squares = [g.square().sum(dtype=torch.float64) for g in counted]
        nothing = gradients[0].new_zeros((), dtype=torch.float64)
        total = torch.stack(squares).sum() if squares else nothing
        dist.all_reduce(total, group=self._group)
        norm = float(total.sqrt())
        if not torch.isfinite(total):
            return norm
        limit = self._point.clip_grad
        scale = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
        for parameter, master, gradient in zip(
            self._parameters, self._masters, gradients, strict=True
        ):
            parameter.grad = None
            master.grad = gradient.mul_(scale)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate(self._point, iteration)
        self._adam.step()
        self._adam.zero_grad()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)
        return norm

    @property
    def state(self) -> list[torch.Tensor]:
        """Master weights and moments, in the parameters' order."""
        moments = [
            self._adam.state[m].get(key) for m in self._masters for key in ("exp_avg", "exp_avg_sq")
        ]
        return [m.detach() for m in self._masters] + [m for m in moments if m is not None]

    def state_dict(self) -> dict[str, Any]:
        """Master weights and moments, to go on as if training had not stopped."""
        masters = (master.detach() for master in self._masters)
        named = dict(zip(self._names, masters, strict=True))
        return {"masters": named, "adam": self._adam.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave, the parameters included."""
        for name, parameter, master in zip(
            self._names, self._parameters, self._masters, strict=True
        ):
            saved = state["masters"][name]
            master.copy_(saved)
            parameter.copy_(saved)
        self._adam.load_state_dict(state["adam"])


def _is_counted(parameter: torch.nn.Parameter, is_first_shard: bool) -> bool:
    """Tell whether a parameter belongs to the norm on this rank: every one counts once.

    Of the two copies of a tied embedding megatron-core marks the last stage's as ``shared``; what
    is not split over the tensor-parallel ranks counts on the first of them.
    """
    if getattr(parameter, "shared", False):
        return False
    return is_first_shard or getattr(parameter, "tensor_model_parallel", False)


def _mean_loss(token_losses: Tensor) -> tuple[Tensor, Tensor]:
    loss = token_losses.mean()
    # The schedule scales the first in place, which the second must not share.
    return loss, loss.detach().clone()


def named_weights(model: Any) -> dict[str, Any]:
    """Return a stage's weights by the names that they have in a model without a pipeline.

    megatron-core counts the layers of every stage from 0, and calls the last stage's copy of a tied
    embedding an output layer: here both copies have one name.
    """
    numbers = [layer.layer_number - 1 for layer in model.decoder.layers]

    def whole(name: str) -> str:
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            return WORD_EMBEDDING
        return _LAYER.sub(lambda found: f"decoder.layers.{numbers[int(found[1])]}.", name)

    return {whole(name): weight for name, weight in model.named_parameters()}


def file_name(rank: int) -> str:
    """Return the name of a rank's file in a checkpoint's folder."""
    return f"rank-{rank:05d}.pt"


def read_shard(path: Path, device: torch.device | str = "cpu", **options: Any) -> dict[str, Any]:
    """Read a rank's file of a checkpoint, with options of ``torch.load``.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        # Queries and errors have keys that are tuples, which is all that is not a tensor.
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True, **options)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return state
