"""The update phase as data: which lane does what to which subgroup, in issue order.

Needs neither torch nor DeepSpeed. A plan has a text form, so that a schedule can be read,
compared and reviewed::

    1H2D 1GPU 1D2H 0CPU 0WTS 2CPU 2WTS

Subgroup 1 goes to the device (prefetch of its state, step, flush of its state), 0 and 2 are
stepped on the CPU and their 16-bit weights sent after.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from deep_optimizer_states.errors import PlanError


class Kind(enum.StrEnum):
    """What an action does."""

    PREFETCH = "H2D"
    """Copy master weights, moments and gradient into a device slot."""
    DEVICE_STEP = "GPU"
    """Adam on the slot; writes the subgroup's 16-bit weights on the device."""
    STATE_FLUSH = "D2H"
    """Copy master weights and moments back to host memory; frees the slot."""
    HOST_STEP = "CPU"
    """Adam in host memory; writes 16-bit weights into a staging buffer."""
    WEIGHTS = "WTS"
    """Send the staged 16-bit weights to the device."""


DEVICE_CHAIN = (Kind.PREFETCH, Kind.DEVICE_STEP, Kind.STATE_FLUSH)
HOST_CHAIN = (Kind.HOST_STEP, Kind.WEIGHTS)


@dataclass(frozen=True)
class Action:
    """One piece of work on one subgroup."""

    subgroup: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.subgroup}{self.kind.value}"


@dataclass(frozen=True)
class Plan:
    """Actions in issue order; those of one lane run in that order.

    Args:
        num_subgroups: Subgroups this rank owns.
        actions: The work, in issue order.

    Raises:
        PlanError: A subgroup is stepped never or twice, its chain is incomplete or out of order,
            or an action names a subgroup that is not there.
    """

    num_subgroups: int
    actions: tuple[Action, ...]

    def __post_init__(self) -> None:
        chains: dict[int, list[Kind]] = {idx: [] for idx in range(self.num_subgroups)}
        for action in self.actions:
            if action.subgroup not in chains:
                raise PlanError(f"{action}: there are only {self.num_subgroups} subgroups")
            chains[action.subgroup].append(action.kind)
        for subgroup, kinds in chains.items():
            if tuple(kinds) not in (DEVICE_CHAIN, HOST_CHAIN):
                got = " ".join(f"{subgroup}{kind.value}" for kind in kinds) or "nothing"
                raise PlanError(
                    f"subgroup {subgroup} gets '{got}': it needs H2D GPU D2H, or CPU WTS, "
                    "once and in that order"
                )

    @property
    def device_subgroups(self) -> tuple[int, ...]:
        """Subgroups stepped on the device, in the order they get a slot."""
        return tuple(a.subgroup for a in self.actions if a.kind is Kind.PREFETCH)

    @property
    def host_subgroups(self) -> tuple[int, ...]:
        """Subgroups stepped on the CPU, in that order."""
        return tuple(a.subgroup for a in self.actions if a.kind is Kind.HOST_STEP)

    def __str__(self) -> str:
        return " ".join(map(str, self.actions))

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read the text form.

        Raises:
            PlanError: A word is not ``<subgroup><kind>``, or the plan is not valid.
        """
        actions = []
        for word in text.split():
            match = re.fullmatch(r"(\d+)([A-Z0-9]{3})", word)
            if match is None or match[2] not in {kind.value for kind in Kind}:
                kinds = ", ".join(kind.value for kind in Kind)
                raise PlanError(f"'{word}': an action is a subgroup and one of {kinds}, as in 0CPU")
            actions.append(Action(int(match[1]), Kind(match[2])))
        subgroups = {action.subgroup for action in actions}
        return cls(max(subgroups, default=-1) + 1, tuple(actions))


def choose_device_subgroups(num_subgroups: int, policy: str, stride: int) -> frozenset[int]:
    """Subgroups that the policy updates on the device.

    Args:
        num_subgroups: Subgroups this rank owns, at least 0.
        policy: ``all-host``, ``stride`` or ``all-device``.
        stride: For ``stride``: subgroup i goes to the device when (i + 1) is a multiple of it.

    Raises:
        PlanError: Unknown policy or stride below 1.
    """
    if policy == "all-host":
        return frozenset()
    if policy == "all-device":
        return frozenset(range(num_subgroups))
    if policy != "stride":
        raise PlanError(f"policy '{policy}' is not one of all-host, stride, all-device")
    if stride < 1:
        raise PlanError(f"stride {stride} must be at least 1")
    return frozenset(range(stride - 1, num_subgroups, stride))


def build_plan(num_subgroups: int, device_subgroups: Iterable[int]) -> Plan:
    """Order one rank's update phase so that the device chain hides behind the CPU's steps.

    The whole device chain is issued first: issuing takes no time, and its lanes order themselves
    by events (a slot is prefetched again only after its flush). The CPU steps follow, and run
    while the device works::

        H2D  |-1-|-3-|        |-5-|
        GPU      |1|  |3|          |5|
        D2H         |-1-| |-3-|       |-5-|
        CPU  |---0---|---2---|---4---|
        WTS          |0|     |2|     |4|

    Args:
        num_subgroups: Subgroups this rank owns.
        device_subgroups: Those to step on the device.

    Raises:
        PlanError: A device subgroup is out of range.
    """
    on_device = sorted(set(device_subgroups))
    on_host = [idx for idx in range(num_subgroups) if idx not in set(on_device)]
    actions = [Action(idx, kind) for idx in on_device for kind in DEVICE_CHAIN]
    actions += [Action(idx, kind) for idx in on_host for kind in HOST_CHAIN]
    return Plan(num_subgroups, tuple(actions))


def subgroup_offsets(numels: Sequence[int]) -> list[int]:
    """Where each subgroup begins in a flat buffer that holds them one after the other."""
    offsets = [0]
    for numel in numels:
        offsets.append(offsets[-1] + numel)
    assert all(a <= b for a, b in pairwise(offsets)), numels
    return offsets[:-1]
