"""``"policy": "auto"``: the policy that the performance model finds fastest on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from deep_optimizer_states.config import Settings
from deep_optimizer_states.predict.machine import load_machine
from deep_optimizer_states.predict.predict import choose_policy


def settle_policy(
    settings: Settings,
    numels: Sequence[int],
    num_ranks: int,
    has_gpu: bool,
    weights_on_host: bool = False,
) -> tuple[Settings, str]:
    """Return settings whose policy is no longer ``auto``.

    Args:
        settings: As they were given.
        numels: Elements of each subgroup of this rank.
        num_ranks: Ranks of this machine, which share its host.
        has_gpu: Whether this rank has one.
        weights_on_host: Whether 16-bit weights live in host memory.

    Returns:
        The settings, and why the policy is what it is, or does nothing; empty where it was given.

    Raises:
        MachineError: The profile cannot be read, or lacks a rate; says what measures it.
    """
    if settings.policy == "stride" and len(numels) < settings.stride:
        return settings, (
            f"policy stride {settings.stride}: this rank has only {len(numels)} subgroups, so none "
            'is updated on the GPU; make "sub_group_size" smaller, or set policy to "dynamic"'
        )
    if settings.policy != "auto":
        return settings, ""
    if not has_gpu:
        why = "policy auto: all-host; there is no GPU to share the update with"
        return settings.model_copy(update={"policy": "all-host"}), why
    if settings.works_in_backward:
        why = "policy auto: dynamic; work in backward is not predicted"
        return settings.model_copy(update={"policy": "dynamic"}), why
    if not settings.machine:
        why = (
            "policy auto: dynamic, which finds the split while it runs; to choose from measured "
            'rates, give "machine" the file that `python -m deep_optimizer_states calibrate -o '
            "machine.toml` writes"
        )
        return settings.model_copy(update={"policy": "dynamic"}), why
    machine = load_machine(settings.machine)
    choice = choose_policy(
        numels,
        machine,
        num_ranks,
        offload_ratio=settings.ratio,
        tile_numel=settings.tile_numel,
        weights_at="cpu" if weights_on_host else "none",
    )
    changes = {"policy": choice.policy, "stride": choice.stride}
    return settings.model_copy(update=changes), choice.explanation
