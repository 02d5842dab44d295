"""``--simulate``: every point of a sweep predicted from a machine's rates; nothing is run.

What comes out lies in ``RESULTS/simulated-MACHINE/SWEEP``, in the layout of runs that did run
(docs/design.md), and says in every table, figure and heading what it is. Beside it stand the values
that others published of the same points: ``published.csv`` of a study.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.cli import say
from configs.errors import ConfigError
from configs.files import write_json
from configs.published import as_published, published_of, read_published
from configs.schema import Point
from configs.sources import PUBLISHED, SIMULATED
from configs.study import Study
from configs.sweep import Sweep
from deep_optimizer_states.predict.machine import (
    Machine as Profile,
    MachineError,
    load_machine,
    machine_names,
)
from deep_optimizer_states.predict.predict import Prediction, predict
from deep_optimizer_states.predict.workload import WorkloadError
from deep_optimizer_states.units import GIB
from launch.cli import Asked
from launch.identity import settings_key
from launch.records import SCHEMA_VERSION, results_of, sweep_dir
from launch.simulate.workloads import PAPER_MACHINES, workload_of
from launch.train_loop.recorder import flops_per_iteration

NOT_SIMULATED = {
    "loss": "nothing is trained, so there is no loss",
    "memory": "the peaks of memory are predicted, and not its course over an iteration",
    "utilisation": "nothing runs, so there is no machine to sample",
}
"""Kinds of figures of what no prediction has, and why."""
ANY_SIMULATED = "breakdown"
"""Kind of figure that every prediction has."""
VALUES = "values.json"
"""Holds a run's figures, in place of a log."""
OOM = {"GPU memory": "oom-device", "host memory": "oom-host"}
"""Status of a run that lacks it, by how the performance model begins to say so."""
_TIMED = ("iteration", "forward", "backward", "update", "bound")


@dataclass(frozen=True)
class Simulation:
    """A machine profile, and where its predictions go."""

    profile: Profile
    results_dir: Path
    shipped_name: str = ""  # the profile's name; empty for one of the user's own

    @classmethod
    def of(cls, given: Namespace, study: Study) -> Simulation:
        """Read the options of the main job, for a study.

        Raises:
            ConfigError: An option is missing, or makes no sense without a run.
        """
        if given.machine is None:
            raise ConfigError("--simulate: name a machine with --machine, as in --machine h100x4")
        if given.again or given.report_only:
            raise ConfigError(
                "--simulate predicts every point anew: leave out --again and --report-only"
            )
        try:
            profile = load_machine(given.machine)
        except MachineError as error:
            raise ConfigError(f"--machine: {error}") from None
        if given.repeats is not None:
            raise ConfigError("--repeats: a prediction is the same every time; leave it out")
        name = profile.name if given.machine in machine_names() else ""
        return cls(profile, results_of(given.results_dir, study), name)

    @property
    def of_paper(self) -> bool:
        """Whether the paper's software runs on it: its rates were fitted to the paper's figures."""
        return self.shipped_name in PAPER_MACHINES

    @property
    def software(self) -> str:
        """Whose software runs on it, in words."""
        if self.of_paper:
            return "the paper's DeepSpeed 0.13 and its plugin"
        return "today's DeepSpeed and this plugin"

    @property
    def about(self) -> dict[str, Any]:
        """Return what ``sweep.json`` says of the machine and its software."""
        profile = self.profile
        return {
            "machine": profile.name,
            "machine_source": profile.source,
            "software": self.software,
            "kinds": dict(profile.kinds),
            "residuals": dict(profile.residuals),
        }

    def folder(self, sweep: str) -> Path:
        """Return where a sweep goes."""
        name = re.sub(r"[^A-Za-z0-9._+-]", "-", self.profile.name)
        return sweep_dir(self.results_dir / f"simulated-{name}", sweep)

    def predict(self, point: Point) -> Prediction:
        """Predict a point.

        Raises:
            ConfigError: The profile lacks a rate.
            WorkloadError: The point cannot run on such a machine.
        """
        try:
            return predict(workload_of(point, self.of_paper), self.profile)
        except MachineError as error:
            raise ConfigError(str(error)) from None
        except WorkloadError:
            if self.of_paper:
                # What cannot be predicted of today's software either is no matter of the paper's.
                predict(workload_of(point), self.profile)
            raise


def simulate_sweep(
    simulation: Simulation,
    sweep: Sweep,
    points: Sequence[Point],
    derive: Callable[[Path, Sequence[str]], int] | None,
    dry_run: bool = False,
    asked: Asked | None = None,
) -> int:
    """Predict a sweep's points, write their folders, and make tables, figures and report.

    Without ``derive``, which makes the latter, they are left out; a dry run only says the
    predictions. The report says what was ``asked`` for in place of the sweep's own.

    Returns:
        0, or the exit code of what could not be made.

    Raises:
        ConfigError: A rate is missing, no point can run, or a folder cannot be written.
    """
    profile = simulation.profile
    written = _Folder(simulation.folder(sweep.name))
    # What was published is of the paper's software.
    every = read_published(sweep.study) if simulation.of_paper else []
    points = as_published(sweep, points, every)
    published = published_of(points, sweep.name, simulation.shipped_name, every)
    impossible: dict[str, str] = {}
    for number, point in enumerate(points, start=1):
        head = f"[{number}/{len(points)}] {point.name}"
        try:
            found = simulation.predict(point)
        except WorkloadError as error:
            impossible[head] = str(error)
            continue
        say(f"{head}: {_line(found)}")
        if dry_run:
            continue
        values = _predicted_values(point, found, simulation.about)
        written.add(point, SIMULATED, values, _memory_lack(found))
        if point.name in published:
            parameters = point.model.num_parameters(point.tp)
            sizes = {"parameters": parameters, "num_ranks": point.num_ranks}
            written.add(point, PUBLISHED, {**sizes, **published[point.name]})
    if len(impossible) == len(points):
        raise ConfigError(
            f"--simulate: no point of sweep '{sweep.name}' of study '{sweep.study.name}' can be "
            f"predicted: {'; '.join(dict.fromkeys(impossible.values()))}"
        )
    for head, reason in impossible.items():
        say(f"{head}: left out: {reason}")
    figures, left_out = _figures(sweep)
    if not dry_run:
        index = {
            "name": sweep.name,
            "description": sweep.description,
            "asked": (asked or Asked()).as_table(),
            "study": sweep.study.as_table(),
            "figures": figures,
            "figures_left_out": left_out,
            "results": sweep.results,
            "source": SIMULATED,
            SIMULATED: simulation.about,
            "points": [],
            "runs": written.runs,
        }
        written.write("sweep.json", index)
    beside = f", {len(published)} beside published values" if published else ""
    say(
        f"simulated, nothing was run: {len(points) - len(impossible)} points on {profile.name} "
        f"({simulation.software}){beside}"
    )
    return 0 if derive is None or dry_run else derive(written.path, figures)


def _figures(sweep: Sweep) -> tuple[list[str], dict[str, str]]:
    """Return the figures that a prediction can fill, without any one that it always can.

    Those that it cannot are the second, each with the reason.
    """
    kinds = {name: row.kind for name, row in sweep.study.figures.items()}
    reasons = {name: NOT_SIMULATED.get(kinds.get(name, ""), "") for name in sweep.figures}
    found = [name for name, reason in reasons.items() if not reason]
    found = found or [name for name, kind in kinds.items() if kind == ANY_SIMULATED][:1]
    return found, {name: reason for name, reason in reasons.items() if reason}


def _line(found: Prediction) -> str:
    lack = _memory_lack(found)
    if lack:
        return f"simulated: does not fit: {lack}"
    phases = (found.forward_s, found.backward_s, found.update_s)
    parts = " + ".join(f"{1000 * seconds:.0f}" for seconds in phases)
    return (
        f"simulated {1000 * found.iteration_s:.0f} ms (forward + backward + update {parts}), "
        f"bound by {found.binding}"
    )


class _Folder:
    """A sweep's folder that is being written; what an earlier simulation left is replaced."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.runs: list[dict[str, Any]] = []
        self._stems: Counter[tuple[str, str]] = Counter()

    def add(self, point: Point, source: str, values: Mapping[str, Any], cause: str = "") -> None:
        """Write a run's folder; ``cause`` is the memory that does not suffice, if any."""
        stem = point.log_name.removesuffix(".log")
        self._stems[stem, source] += 1
        place = f"{stem}/{source}-{self._stems[stem, source]:03d}"
        run = {
            "run_id": place,
            "source": source,
            "point": point.model_dump(mode="json"),
            "study": point.study.as_table(),
            "point_key": f"{settings_key(point)}-{source}",
            "repeat": 1,
            "log": VALUES,
        }
        self.write(f"{place}/run.json", run)
        self.write(f"{place}/{VALUES}", values)
        status = OOM[cause.partition(":")[0]] if cause else "ok"
        if source == SIMULATED:
            self.write(f"{place}/status.json", {"status": status, "cause": cause})
        entry = {"name": point.name, "engine": point.engine, "repeat": 1, "log": VALUES}
        status = status if source == SIMULATED else ""
        self.runs.append({**entry, "run_dir": place, "status": status})

    def write(self, name: str, table: Mapping[str, object]) -> None:
        """Write a file of the folder.

        Raises:
            ConfigError: It cannot be written.
        """
        path = self.path / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"schema_version": SCHEMA_VERSION, **table})
        except OSError as error:
            raise ConfigError(
                f"results folder {str(self.path)!r} cannot be written: {error.strerror}; choose "
                "another with --results-dir"
            ) from None


def _predicted_values(point: Point, found: Prediction, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``values.json`` says of a prediction."""
    tflops = flops_per_iteration(point) / (found.iteration_s * point.num_ranks * 1e12)
    values = {
        "about": f"profile {about['machine']}, {about['software']}",
        "parameters": point.model.num_parameters(point.tp),
        "num_ranks": point.num_ranks,
        **{f"{name}_ms": 1000.0 * getattr(found, f"{name}_s") for name in _TIMED},
        "tflops": tflops,
        "host_peak_gib": found.memory.host_bytes * point.num_ranks / GIB,
        "gpu_peak_gib": found.memory.device_bytes / GIB or None,
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
    return {**values, **untimed} if _memory_lack(found) else values


def _memory_lack(found: Prediction) -> str:
    """Return what does not fit, as ``GPU memory: 95 GiB needed, ...``; empty when it does.

    State that cannot be page-locked only makes copies slower.
    """
    lacks = [text for text in found.shortages if text.partition(":")[0] in OOM]
    return lacks[0].partition(";")[0] if lacks else ""
