"""Why a policy is run, or does nothing: what the engine says of it when it starts."""

from __future__ import annotations

from typing import Any

from deep_optimizer_states.config import Settings


def settle_policy(settings: Settings, num_subgroups: int, has_gpu: bool) -> tuple[Settings, str]:
    """Return settings with the policy that is run.

    Args:
        settings: As they were given.
        num_subgroups: Subgroups of this rank.
        has_gpu: Whether this rank has one; without, ``auto`` has nobody to share tiles with.

    Returns:
        The settings, and why the policy is what it is, or does nothing; empty where it was given.
    """
    if settings.policy == "stride" and num_subgroups < settings.stride:
        return settings, (
            f"this rank has only {num_subgroups} subgroups, so none is updated on the GPU; make "
            '"sub_group_size" smaller, or leave "policy" out'
        )
    if settings.policy != "auto":
        return settings, ""
    if has_gpu:
        return settings, "begins as dynamic, and stays so or becomes all-host by its iterations"
    changed: dict[str, Any] = {"policy": "all-host"}
    why = "what auto is without a GPU to share the update with"
    if "just_in_time_forward" not in settings.model_fields_set:
        changed["just_in_time_forward"] = False
        why += "; step() waits, since forward needs the same cores"
    return settings.model_copy(update=changed), why
