"""Times and links of a cluster that is described in a file; all of it assumed, nothing measured."""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from optimus_cc.predict.pipeline import Links, Times
from optimus_cc.predict.workload import (
    Model,
    PredictionError,
    Workload,
    factorise_flops,
    product_flops,
)
from optimus_cc.settings import Settings
from optimus_cc.sizes import matrix_shape, ring_bytes

ELEMENT_BYTES = {"fp32": 4, "bf16": 2}
_PASSES = 8
"""How often compression reads or writes a matrix in fp32: conversion, error, products, rest."""
_ADAM_BYTES = 28
"""Read and written for a parameter: weight, gradient and both moments, in fp32."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal GPUs, each with a link of its own; a node holds a stage of a replica."""

    name: str
    source: str
    gpus_per_node: int
    pp: int
    dp: int
    micro_batch_size: int
    global_batch_size: int
    flops_per_s: dict[str, float]
    """Of a GPU, by type."""
    memory_bytes_per_s: float
    nvlink_bytes_per_s: float
    """What a GPU sends over NVLink while it receives as much."""
    link_gbit: float
    """A node's own link, in each direction."""
    link_share: float
    """Of its rate, what is left for payload."""
    latency_s: float
    orthogonalisation_s: float
    """Of a thin factor: a chain of small steps, whatever its size."""

    def workload(self, model: Model, dtype: str) -> Workload:
        """The published runs' iteration of a model, activations recomputed as there."""
        return Workload(
            model=model,
            pp=self.pp,
            dp=self.dp,
            tp=self.gpus_per_node,
            micro_batch_size=self.micro_batch_size,
            num_micro_batches=self.global_batch_size // self.micro_batch_size // self.dp,
            element_bytes=ELEMENT_BYTES[dtype],
            recomputes=True,
        )

    def links(self, gbit: float, copies: int) -> Links:
        """Links of a rate in Gb/s.

        Args:
            gbit: 10^9 bits a second.
            copies: how often a node sends each message and gradient shard.
        """
        return Links(gbit * 1e9 / 8 * self.link_share, self.latency_s, copies=copies)

    def times(self, workload: Workload, settings: Settings, dtype: str) -> Times:
        """Times of what each GPU computes, its tensor-parallel exchanges included."""
        stages = range(workload.pp)
        forward, backward = [], []
        for stage in stages:
            layers, logits = (
                flops / workload.tp / self.flops_per_s[dtype]
                for flops in workload.forward_flops(stage)
            )
            layers += 2 * workload.layers_of_stages[stage] * self._exchange_s(workload)
            forward.append(layers + logits)
            backward.append((3 if workload.recomputes else 2) * layers + 2 * logits)
        numels = [workload.numel(stage) for stage in stages]
        memory = self.memory_bytes_per_s
        rows, columns = matrix_shape(workload.message_shape)
        rank = settings.inter_grad_comp_rank
        matrix_s = rows * columns * 4 / memory
        return Times(
            forward_s=forward,
            backward_s=backward,
            reduction_s=[4 * numel * workload.element_bytes / memory for numel in numels],
            update_s=[_ADAM_BYTES * numel / memory for numel in numels],
            pack_s=self._factorise_s(1, rows, columns, rank, dtype),
            restore_s=2 * matrix_s + product_flops(rows, columns, rank) / self.flops_per_s[dtype],
            power_sgd_s=tuple(
                self._power_sgd_s(workload, settings, stage, dtype) for stage in stages
            ),
        )

    def _exchange_s(self, workload: Workload) -> float:
        """One of a layer's two all-reduces of activations over the shards."""
        sent = ring_bytes(workload.message_bytes(), workload.tp)
        return sent / self.nvlink_bytes_per_s

    def _factorise_s(self, number: int, rows: int, columns: int, rank: int, dtype: str) -> float:
        flops = number * factorise_flops(rows, columns, rank)
        moved = number * _PASSES * rows * columns * 4
        return (
            2 * number * self.orthogonalisation_s
            + flops / self.flops_per_s[dtype]
            + moved / self.memory_bytes_per_s
        )

    def _power_sgd_s(self, workload: Workload, settings: Settings, stage: int, dtype: str) -> float:
        pairs, _ = workload.averaged(stage, settings)
        return sum(
            self._factorise_s(number, rows, columns, settings.grad_comp_rank, dtype)
            for (rows, columns), number in Counter(pairs).items()
        )


def load_cluster(name: str) -> Cluster:
    """A cluster by its name, or by the path of a TOML file with the same keys.

    Raises:
        PredictionError: there is none, or the file is wrong.
    """
    cluster: Cluster = _load(Cluster, "cluster", name)
    return cluster


def load_model(name: str) -> Model:
    """A model by its name, or by the path of a TOML file with the same keys.

    Raises:
        PredictionError: there is none, or the file is wrong.
    """
    model: Model = _load(Model, "model", name)
    return model


def _load(kind: type[Any], option: str, name: str) -> Any:  # noqa: ANN401 - an instance of `kind`
    is_file = name.endswith(".toml")
    path = Path(name) if is_file else Path(__file__).with_name(f"{option}s.toml")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PredictionError(f"--{option} {name}: {error}") from None
    if not is_file and name not in table:
        near = get_close_matches(name, table, n=1, cutoff=0.0)[0]
        raise PredictionError(
            f"--{option} {name}: not known; did you mean '{near}'? known: {', '.join(table)}, or "
            "give a TOML file"
        )
    try:
        return kind(**{"name": name, **(table if is_file else table[name])})
    except TypeError as error:
        said = str(error).removeprefix(f"{kind.__name__}.__init__() ")
        raise PredictionError(f"--{option} {name}: {said}; add or remove it") from None
