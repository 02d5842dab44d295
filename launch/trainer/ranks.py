"""Which process of the run this is, from what a launcher left in the environment."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import astuple, dataclass
from typing import ClassVar

from configs.errors import ConfigError
from configs.schema import Point

DEFAULTS = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
"""Variables of a run's place, with their values for a process that is alone."""


@dataclass(frozen=True)
class Ranks:
    """Place of this process among the run's; fields in the order of :data:`DEFAULTS`."""

    RANK_VARIABLE: ClassVar[str] = "RANK"

    rank: int
    """Of all processes, from 0."""
    local_rank: int
    """Of this machine's processes, from 0: the index of the CUDA device."""
    num_ranks: int
    """Processes of the run."""
    master_addr: str
    """Host of rank 0."""
    master_port: int
    """Its port; 0 lets a single process take any free one."""

    @property
    def is_first(self) -> bool:
        """Rank 0 writes the metrics."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """The last rank writes the line of an iteration, as Megatron does."""
        return self.rank == self.num_ranks - 1

    def require(self, point: Point) -> None:
        """Check that as many processes run as the point asks for.

        Raises:
            ConfigError: more or fewer.
        """
        if self.num_ranks != point.num_ranks:
            raise ConfigError(
                f"WORLD_SIZE = {self.num_ranks}: the point needs tp {point.tp} x pp {point.pp} x "
                f"dp {point.dp} = {point.num_ranks} ranks; start it with torchrun --nproc-per-node "
                f"{point.num_ranks}"
            )

    def export(self, environment: MutableMapping[str, str]) -> None:
        """Set what torch and DeepSpeed read; without it DeepSpeed looks for MPI."""
        environment.update(
            {name: str(value) for name, value in zip(DEFAULTS, astuple(self), strict=True)}
        )


def ranks_from_environment(environment: Mapping[str, str], local_rank: int | None = None) -> Ranks:
    """Read the variables of :data:`DEFAULTS`; one process without them.

    Args:
        environment: ``os.environ``.
        local_rank: The command line's, which wins over the environment's.

    Raises:
        ConfigError: a value is not a number, or there are several ranks and no meeting point.
    """
    texts = {name: environment.get(name, default) for name, default in DEFAULTS.items()}
    if local_rank is not None:
        texts["LOCAL_RANK"] = str(local_rank)
    address = texts.pop("MASTER_ADDR")
    rank, local, num_ranks, port = (_integer(name, text) for name, text in texts.items())
    if not 0 <= rank < num_ranks:
        raise ConfigError(f"RANK = {rank}: must lie between 0 and WORLD_SIZE {num_ranks} - 1")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        if num_ranks > 1 and name not in environment:
            raise ConfigError(f"{name} is not set, but WORLD_SIZE = {num_ranks}: use torchrun")
    return Ranks(rank, local, num_ranks, address, port)


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} = {text!r}: not a number") from None
