"""Names of schemes, and their settings."""

from __future__ import annotations

from typing import Any

from optimus_cc.predict.workload import PredictionError
from optimus_cc.settings import Settings

_EPILOGUE = {"inter_grad_comp": True, "inter_grad_comp_epilogue_only": True}
PARTS: dict[str, dict[str, Any]] = {
    "uncompressed": {},
    "cb-without-lep": _EPILOGUE,
    "cb": {**_EPILOGUE, "use_error_feedback": True},
    "cb-all": {"inter_grad_comp": True, "use_error_feedback": True},
    "fe": {"emb_comm_opt": True},
    "sc": {"grad_comp": True, "selective_grad_comp": True, "use_error_feedback": True},
}
"""What ``+`` puts together; ``cb-all`` compresses every message, not the epilogue's alone."""
ALL = ("uncompressed", "cb-without-lep", "cb", "cb-all", "cb+fe", "cb+fe+sc", "cb-all+fe+sc")
"""What ``--scheme all`` compares: the published schemes, and two with all messages compressed."""


def settings_of(scheme: str, **numbers: Any) -> Settings:  # noqa: ANN401 - fields of Settings
    """Settings of a scheme.

    Args:
        scheme: parts with ``+`` between them.
        numbers: fields of :class:`Settings` that are numbers, such as ranks.

    Raises:
        PredictionError: a part is not known.
        SettingsError: a number is out of range.
    """
    chosen: dict[str, Any] = {}
    for part in scheme.split("+"):
        if part not in PARTS:
            raise PredictionError(
                f"--scheme {scheme}: '{part}' is not known; put together {', '.join(PARTS)} with "
                "'+', or give 'all'"
            )
        chosen |= PARTS[part]
    return Settings(**chosen, **numbers)
