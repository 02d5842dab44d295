"""One rank's part of the model, and all that moves and reduces its gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from configs.errors import ConfigError
from configs.schema import Point
from launch.trainer.clock import PhaseClock
from launch.trainer.data import MicroBatch
from launch.trainer.model import DTYPES, Stage as Part, causal_mask, make_gpt
from launch.trainer.pipeline.optimizer import Optimizer
from launch.trainer.pipeline.runtime import process_groups
from launch.trainer.pipeline.shards import named_weights
from launch.trainer.runfile import RunFile
from launch.trainers.pipeline import COMPRESSION as BLOCK
from optimus_cc import (
    COMPRESSION,
    GradientReduction,
    Kind,
    Settings,
    SettingsError,
    Stage,
    Traffic,
)
from optimus_cc.embedding import Place, TiedEmbedding, make_group

CLOCK_PHASES = ("schedule", "update")
"""What the clock of a rank times: all that the schedule does, and the update."""
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


@dataclass(frozen=True)
class Rank:
    """What one rank of the pipeline holds."""

    point: Point
    device: torch.device
    groups: Any
    part: Part
    model: torch.nn.Module
    traffic: Traffic
    communicator: Any
    reduction: GradientReduction
    optimizer: Optimizer
    clock: PhaseClock
    mask: Tensor | None

    def run(self, batches: Iterator[MicroBatch], *, forward_only: bool = False) -> list[Tensor]:
        """Run an iteration's micro-batches; gradients are reduced at the end, unless forward only.

        Returns:
            Loss of each micro-batch on the last stage, nothing on the others.
        """
        from megatron.core.pipeline_parallel.schedules import (
            forward_backward_pipelining_without_interleaving,
        )

        point = self.point
        losses: list[Tensor] = forward_backward_pipelining_without_interleaving(
            forward_step_func=self._forward_step,
            data_iterator=batches,
            model=self.model,
            num_microbatches=point.accumulation,
            seq_length=point.model.seq_length,
            micro_batch_size=point.micro_batch_size,
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

    def mean(self, losses: list[Tensor]) -> float:
        """Mean over the global batch of what :meth:`run` gave; the same on every rank.

        Every rank calls it, and waits for the last stage.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        if self.part.is_last:
            total += torch.stack(losses).double().mean()
            dist.all_reduce(total, group=self.groups.dp)
        last = dist.get_process_group_ranks(self.groups.pp)[-1]
        dist.broadcast(total, src=last, group=self.groups.pp)
        return total.item() / self.point.dp

    def phases_ms(self) -> dict[str, float]:
        """Time of each of :data:`PHASES` since the iteration's begin, on this rank."""
        clock, seconds = self.clock.take(), self.traffic.seconds()
        communication = {name: 1e3 * seconds[part] for name, part in COMMUNICATION.items()}
        compute = clock["schedule_ms"] - sum(communication.values())
        return {"compute": compute, **communication, "update": clock["update_ms"]}

    def compression_state(self) -> dict[str, Any]:
        """What compression of messages and gradients keeps between its calls."""
        return {
            "messages": self.communicator.compressor.state_dict(),
            "reduction": self.reduction.state_dict(),
        }

    def state_dict(self) -> dict[str, Any]:
        """All of this rank that training goes on from."""
        return {"optimizer": self.optimizer.state_dict(), **self.compression_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.communicator.compressor.load_state_dict(state["messages"])
        self.reduction.load_state_dict(state["reduction"])


def _mean_loss(token_losses: Tensor) -> tuple[Tensor, Tensor]:
    loss = token_losses.mean()
    # The schedule scales the first in place, which the second must not share.
    return loss, loss.detach().clone()


def settings_of(run: RunFile) -> Settings:
    """The compression of a run, none by default.

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


def make_rank(run: RunFile, device: torch.device) -> Rank:
    """Make this rank's part of the model with its initial weights; every rank calls it.

    Raises:
        ConfigError: see :func:`settings_of`.
    """
    from optimus_cc.megatron import CompressedCommunicator, FinalizeGradients

    point, settings, groups = run.point, settings_of(run), process_groups()
    part = Part(groups.pp.rank(), point.pp)
    # Norms and learned positions are made in fp32, whatever the model's type.
    model = make_gpt(point, device.type == "cpu", part).to(device, DTYPES[point.dtype])
    traffic = Traffic(device)
    reduction = GradientReduction(
        model.parameters(),
        Stage(part.index, point.pp, groups.dp),
        settings,
        num_iterations=point.iterations,
        tied=_tied(point, model, part, groups, settings),
        traffic=traffic,
    )
    model.config.finalize_model_grads_func = FinalizeGradients(reduction)
    return Rank(
        point=point,
        device=device,
        groups=groups,
        part=part,
        model=model,
        traffic=traffic,
        communicator=CompressedCommunicator(
            groups.pp, model.config, settings, device, traffic=traffic
        ),
        reduction=reduction,
        optimizer=Optimizer(
            named_weights(model), point, groups.mp, is_first_shard=groups.tp.rank() == 0
        ),
        clock=PhaseClock(device, CLOCK_PHASES),
        mask=causal_mask(point, device),
    )


def _tied(point: Point, model: Any, part: Part, groups: Any, settings: Settings) -> Any:  # noqa: ANN401
    """The embedding's two copies; None where there is none, or one copy that needs no other."""
    if point.model.architecture != "gpt2":
        return None
    has_embedding = part.is_first or part.is_last
    place = Place(groups.tp.rank(), groups.dp.rank(), has_embedding)
    group = make_group(place, settings.emb_comm_opt)
    if group is None:
        return None
    return TiedEmbedding(model.shared_embedding_or_output_weight(), group, settings.emb_comm_opt)
