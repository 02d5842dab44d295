"""Folders of runs that never ran, in the layout of those that did (docs/design.md)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.schema import Point
from configs.sweep import Sweep
from deep_optimizer_states.predict.predict import AllResident, Prediction
from launch.records.identity import settings_key
from launch.records.run_folder import SCHEMA_VERSION, study_of
from launch.trainer.log import flops_per_iteration

SIMULATED, PUBLISHED = "simulated", "published"
"""``source`` of a run's figures; a run that was measured has none."""
VALUES = "values.json"
"""Holds a run's figures, in place of a log."""
OOM = {"GPU memory": "oom-device", "host memory": "oom-host"}
"""Status of a run that lacks it, by how the performance model begins to say so."""
_TIMED = ("iteration", "forward", "backward", "update", "bound")


@dataclass
class SimulatedSweep:
    """A sweep folder that is being written; what an earlier simulation left is replaced.

    Attributes:
        folder: ``RESULTS/simulated-MACHINE/SWEEP``.
        about: Machine and software that all its runs share.
    """

    folder: Path
    about: Mapping[str, Any]
    _runs: list[dict[str, Any]] = field(default_factory=list)
    _stems: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, point: Point, source: str, values: Mapping[str, Any], cause: str = "") -> None:
        """Write a run's folder.

        Args:
            point: Named.
            source: ``simulated`` or ``published``.
            values: Of ``values.json``.
            cause: The memory that does not suffice; empty for a run that fits.

        Raises:
            ConfigError: The folder cannot be made.
        """
        stem = point.log_name.removesuffix(".log")
        self._stems[stem, source] += 1
        path = self.folder / stem / f"{source}-{self._stems[stem, source]:03d}"
        status = OOM[cause.partition(":")[0]] if cause else "ok"
        run = {
            "schema_version": SCHEMA_VERSION,
            "run_id": f"{stem}/{path.name}",
            "source": source,
            "point": point.model_dump(mode="json"),
            "study": study_of(point),
            "point_key": f"{settings_key(point)}-{source}",
            "repeat": 1,
            "log": VALUES,
        }
        files = {"run.json": run, VALUES: {"schema_version": SCHEMA_VERSION, **values}}
        if source == SIMULATED:
            files["status.json"] = {"status": status, "cause": cause}
        self._write(path, files)
        entry = {"name": point.name, "engine": point.engine, "repeat": 1, "log": VALUES}
        entry["run_dir"] = path.relative_to(self.folder).as_posix()
        self._runs.append({**entry, "status": status if source == SIMULATED else ""})

    def finish(self, sweep: Sweep, figures: list[str]) -> None:
        """Write ``sweep.json``.

        Raises:
            ConfigError: It cannot be written.
        """
        index = {
            "schema_version": SCHEMA_VERSION,
            "name": sweep.name,
            "description": sweep.description,
            "study": sweep.study.as_table(),
            "figures": figures,
            "source": SIMULATED,
            SIMULATED: dict(self.about),
            "points": [],
            "runs": self._runs,
        }
        self._write(self.folder, {"sweep.json": index})

    def _write(self, folder: Path, files: Mapping[str, object]) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, value in files.items():
                # Anyone can make it again in a second: no care for crashes.
                text = json.dumps(value, indent=2, allow_nan=False) + "\n"
                (folder / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"results folder {str(self.folder)!r} cannot be written: {error.strerror}; choose "
                "another with --results-dir"
            ) from None


def predicted_values(
    point: Point, found: Prediction, resident: AllResident | None, about: Mapping[str, Any]
) -> dict[str, Any]:
    """What ``values.json`` says of a prediction.

    Args:
        point: What was predicted.
        found: The prediction.
        resident: That of ratio 0; None where not all optimizer state fits on the device.
        about: Machine and software.
    """
    tflops = flops_per_iteration(point) / (found.iteration_s * point.num_ranks * 1e12)
    values = {
        "about": f"profile {about['machine']}, {about['software']}",
        "parameters": point.model.num_parameters(point.tp),
        "num_ranks": point.num_ranks,
        **{f"{name}_ms": 1000.0 * getattr(found, f"{name}_s") for name in _TIMED},
        "all_resident_iteration_ms": 1000.0 * resident.iteration_s if resident else None,
        "tflops": tflops,
        "host_memory_bytes": found.memory.host_bytes,
        "device_memory_bytes": found.memory.device_bytes,
        "page_locked_bytes": found.memory.page_locked_bytes,
        "fits": found.fits,
        "shortages": list(found.shortages),
        "binding": found.binding,
        "policy": found.policy,
    }
    # What does not fit takes no time: a figure shows it as the failure that it would be.
    untimed = dict.fromkeys([*(f"{name}_ms" for name in _TIMED), "tflops"])
    return {**values, **untimed} if memory_lack(found) else values


def memory_lack(found: Prediction) -> str:
    """What does not fit, as ``GPU memory: 95 GiB needed, ...``; empty when it does.

    State that cannot be page-locked only makes copies slower.
    """
    lacks = [text for text in found.shortages if text.partition(":")[0] in OOM]
    return lacks[0].partition(";")[0] if lacks else ""


def published_values(point: Point, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What ``values.json`` says of published figures."""
    parameters = point.model.num_parameters(point.tp)
    return {"parameters": parameters, "num_ranks": point.num_ranks, **fields}
