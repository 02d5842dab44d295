"""What runs were made with, and in which of it they differ. Standard library alone.

A time is a property of code, versions and machine together; two of them are comparable where all
of that is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parse.run_folder import Run

_COMMIT_CHARACTERS = 12
_SHOWN_CHARACTERS = 60


def setup(run: Run) -> dict[str, str]:
    """Code, commit, versions and processors of a run, as far as anybody noted them."""
    kept = run.provenance
    found: dict[str, str] = {}
    code = kept.get("code")
    if isinstance(code, dict) and code.get("sha256"):
        found["code"] = str(code["sha256"])
    git = kept.get("git")
    if isinstance(git, dict) and git.get("commit"):
        found["commit"] = _commit(git)
    gpus = kept.get("gpus")
    if isinstance(gpus, list):
        texts = [f"{g.get('name')} (driver {g.get('driver')})" for g in gpus if isinstance(g, dict)]
        found["GPU"] = ", ".join(texts) or "none"
    cpu = kept.get("cpu")
    if isinstance(cpu, dict):
        found["CPU"], found["cores"] = str(cpu.get("model")), str(cpu.get("cores_usable"))
    device = " ".join(part for part in (run.log.device or "", run.hardware) if part)
    if device:
        found["device"] = device
    return found | {name: text for name, text in versions(run).items() if text}


def versions(run: Run) -> dict[str, str]:
    """Version by package; what the run itself imported goes before what was installed."""
    started = run.log.metrics.start.get("versions") if run.log.metrics else None
    merged: dict[str, Any] = {}
    for source in (run.provenance.get("versions"), started):
        merged |= source if isinstance(source, dict) else {}
    return {
        str(name): "not installed" if text is None else str(text) for name, text in merged.items()
    }


def differences(runs: Sequence[Run]) -> list[str]:
    """In what the runs differ, a short text each: ``torch differs (2.11.0, 2.13.0)``.

    Where only some of them say something, that is a difference too: the others are not known to be
    the same. Where none does, there is nothing to compare.

    Args:
        runs: Runs whose times are to be held against each other.
    """
    setups = [setup(run) for run in runs]
    if all("code" in found for found in setups):
        # The commit tells of files that no run executes.
        setups = [{key: text for key, text in found.items() if key != "commit"} for found in setups]
    texts = []
    for key in dict.fromkeys(key for found in setups for key in found):
        values = dict.fromkeys(found.get(key, "not known") for found in setups)
        if len(values) > 1:
            texts.append(f"{key} differs ({', '.join(_short(value) for value in values)})")
    return texts


def _commit(git: dict[str, Any]) -> str:
    """A commit, with a few digits of what was changed since."""
    text = str(git["commit"])[:_COMMIT_CHARACTERS]
    if not git.get("dirty"):
        return text
    changes = git.get("changes_sha256")
    return f"{text} with changes" + (f" {str(changes)[:8]}" if changes else "")


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
