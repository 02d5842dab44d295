"""``--simulate``: every point of a sweep predicted from a machine's rates, in seconds.

Nothing is run, and nothing in the folders of measured sweeps is touched: what comes out lies in
``RESULTS/simulated-MACHINE/SWEEP`` and says in every table, figure and heading what it is.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from configs.schema import Point
from configs.study import Study
from configs.sweep import Sweep
from deep_optimizer_states.errors import DeepOptimizerStatesError
from deep_optimizer_states.predict.machine import (
    Machine as Profile,
    MachineError,
    load_machine,
    machine_names,
)
from deep_optimizer_states.predict.predict import AllResident, Prediction, all_resident, predict
from deep_optimizer_states.predict.workload import WorkloadError
from launch import cli
from launch.records.files import read_json
from launch.records.run_folder import sweep_dir
from launch.simulate.folders import (
    PUBLISHED,
    SIMULATED,
    SimulatedSweep,
    memory_lack,
    predicted_values,
    published_values,
)
from launch.simulate.published import as_published, published_of, read_published
from launch.simulate.workloads import AsOf, as_of, workload_of
from launch.task import results_of

NOT_SIMULATED = ("loss", "memory", "utilisation")
"""Kinds of figures of what no prediction has."""
ANY_SIMULATED = "breakdown"
"""Kind of figure that every prediction has."""


@dataclass(frozen=True)
class Simulation:
    """A machine, and whose software runs on it."""

    profile: Profile
    when: AsOf
    results_dir: Path
    is_shipped: bool = True
    """Whether the profile is a shipped one; one of the user's own may have the name of one."""

    @classmethod
    def of(cls, given: Namespace, study: Study) -> Simulation:
        """From the options of the main job, for a study.

        Raises:
            ConfigError: An option is missing, or makes no sense without a run.
        """
        if given.machine is None:
            raise ConfigError("--simulate: name a machine with --machine, as in --machine h100x4")
        if given.choice is not None or given.report_only or given.node_rank is not None:
            raise ConfigError(
                "--simulate predicts every point anew: leave out --resume, --rerun-failed, "
                "--again, --keep, --report-only and --node-rank"
            )
        try:
            profile = load_machine(given.machine)
        except MachineError as error:
            raise ConfigError(f"--machine: {error}") from None
        if given.repeats is not None:
            raise ConfigError("--repeats: a prediction is the same every time; leave it out")
        is_shipped = given.machine in machine_names()
        when = as_of(given.as_of, profile.name if is_shipped else "")
        return cls(profile, when, results_of(given.results_dir, study), is_shipped)

    @property
    def shipped_name(self) -> str:
        """The profile's name, empty for one of the user's own."""
        return self.profile.name if self.is_shipped else ""

    @property
    def about(self) -> dict[str, Any]:
        """What ``sweep.json`` says of it."""
        profile = self.profile
        return {
            "machine": profile.name,
            "machine_source": profile.source,
            "software": self.when.words,
            "kinds": dict(profile.kinds),
            "residuals": dict(profile.residuals),
        }

    def folder(self, sweep: str) -> Path:
        """Where a sweep goes."""
        name = re.sub(r"[^A-Za-z0-9._+-]", "-", self.profile.name)
        if not self.is_shipped and name in machine_names():
            name += "-own"
        own = as_of(None, self.shipped_name) is self.when
        return sweep_dir(
            self.results_dir / f"simulated-{name}{'' if own else f'-{self.when.value}'}", sweep
        )

    def predict(self, point: Point) -> tuple[Prediction, AllResident | None]:
        """Predict a point, and the same with all optimizer state on the GPU where it fits.

        Raises:
            ConfigError: The profile lacks a rate.
            WorkloadError: The point cannot run on such a machine.
        """
        workload = workload_of(point, self.when)
        try:
            return predict(workload, self.profile), all_resident(workload, self.profile)
        except MachineError as error:
            raise ConfigError(str(error)) from None


def simulate_sweep(
    simulation: Simulation,
    sweep: Sweep,
    points: Sequence[Point],
    derive: Callable[[Path, Sequence[str]], int] | None,
    dry_run: bool = False,
) -> int:
    """Predict a sweep's points, write their folders, and make tables, figures and report.

    Args:
        simulation: On what.
        sweep: What its report is called and shows.
        points: Named.
        derive: Makes tables, figures and report; None to leave them out.
        dry_run: Only say the predictions, write nothing.

    Returns:
        0, or the exit code of what could not be made.

    Raises:
        ConfigError: A rate is missing, no point can run, or a folder cannot be written.
    """
    profile = simulation.profile
    written = SimulatedSweep(simulation.folder(sweep.name), simulation.about)
    # What was published is of the paper's software.
    every = read_published(sweep.study) if simulation.when is AsOf.PAPER else []
    points = as_published(sweep, points, every)
    published = published_of(points, sweep.name, simulation.shipped_name, every)
    impossible: dict[str, str] = {}
    for number, point in enumerate(points, start=1):
        head = f"[{number}/{len(points)}] {point.name}"
        try:
            found, resident = simulation.predict(point)
        except WorkloadError as error:
            impossible[head] = str(error)
            continue
        cli.say(f"{head}: {_line(found, resident)}")
        if dry_run:
            continue
        values = predicted_values(point, found, resident, simulation.about)
        written.add(point, SIMULATED, values, memory_lack(found))
        if point.name in published:
            written.add(point, PUBLISHED, published_values(point, published[point.name]))
    if len(impossible) == len(points):
        raise ConfigError(_why_none(sweep, list(impossible.values())))
    for head, reason in impossible.items():
        cli.say(f"{head}: left out: {reason}")
    figures = _figures(sweep)
    if not dry_run:
        written.finish(sweep, figures)
    beside = f", {len(published)} beside published values" if published else ""
    cli.say(
        f"simulated, nothing was run: {len(points) - len(impossible)} points on {profile.name} "
        f"({simulation.when.words}){beside}"
    )
    return 0 if derive is None or dry_run else derive(written.folder, figures)


def _why_none(sweep: Sweep, reasons: Sequence[str]) -> str:
    """Why no point of a sweep can be predicted, in a line.

    Reasons read ``FIELD = VALUE: WHAT IS KNOWN``; each thing that is known is said once, with the
    first value that it leaves out.
    """
    alike: dict[str, list[str]] = {}
    for reason in reasons:
        alike.setdefault(reason.partition(": ")[2], []).append(reason)
    found = [f"{each[0]} ({len(each)})" for each in alike.values()]
    return (
        f"--simulate: sweep '{sweep.name}' of study '{sweep.study.name}' has {len(reasons)} points "
        f"and none can be predicted: {'; '.join(found)}"
    )


def _figures(sweep: Sweep) -> list[str]:
    """Figures of the sweep that a prediction can fill; without any, one that it always can."""
    kinds = {name: row.kind for name, row in sweep.study.figures.items()}
    found = [name for name in sweep.figures if kinds.get(name) not in NOT_SIMULATED]
    return found or [name for name, kind in kinds.items() if kind == ANY_SIMULATED][:1]


def predicted_before(simulation: Simulation, sweep: str) -> frozenset[str]:
    """Names of the points that the folder of a sweep shows already; none when it cannot be read."""
    runs = read_json(simulation.folder(sweep) / "sweep.json").get("runs") or ()
    return frozenset(str(run.get("name")) for run in runs)


def largest_that_fits(
    simulation: Simulation, names: Sequence[str], points_of: Callable[[str], Sequence[Point]]
) -> str:
    """Name of the largest model all of whose points fit the machine.

    Args:
        simulation: On what.
        names: The models, smallest first.
        points_of: The points to predict with a model of this name.

    Raises:
        ConfigError: None does.
    """
    for name in reversed(names):
        try:
            if not any(memory_lack(simulation.predict(point)[0]) for point in points_of(name)):
                return name
        except DeepOptimizerStatesError:
            continue
    raise ConfigError(f"machine '{simulation.profile.name}': no model of the study fits it")


def _line(found: Prediction, resident: AllResident | None) -> str:
    beside = (
        f"; all optimizer state fits on the GPU: {1000 * resident.iteration_s:.0f} ms at ratio 0"
        if resident
        else ""
    )
    lack = memory_lack(found)
    if lack:
        return f"simulated: does not fit: {lack}{beside}"
    phases = (found.forward_s, found.backward_s, found.update_s)
    parts = " + ".join(f"{1000 * seconds:.0f}" for seconds in phases)
    return (
        f"simulated {1000 * found.iteration_s:.0f} ms (forward + backward + update {parts}), "
        f"bound by {found.binding}{beside}"
    )
