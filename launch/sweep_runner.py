"""Runs the points of a sweep one after the other; what one does never costs another."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from configs.cli import say
from configs.errors import ConfigError
from configs.files import read_json, write_json
from configs.schema import Point
from configs.study import Study
from configs.sweep import Sweep
from launch.cli import Asked
from launch.execute import Outcome, execute
from launch.feasibility import AS_BEFORE, Host, estimate, why_not_here
from launch.process.live import LiveLine
from launch.process.supervise import end_leftovers
from launch.process.watch import duration_text
from launch.records import (
    INTERRUPTED,
    SCHEMA_VERSION,
    Decision,
    Record,
    RunFolder,
    Status,
    decide,
    older,
    read_records,
    sweep_dir,
)
from launch.task import RunOptions, Task

INDEX = "sweep.json"
"""What a sweep asks for, the run that stands for each point, and how it went."""
LONG_S = 240.0
"""Seconds of a sweep, as estimated, above which a shorter form of it is named beforehand."""
_OF_RECORDS = ("engine", "repeat", "log", "status", "seconds", "cause")


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep asks for on this machine."""

    sweep: Sweep
    points: tuple[Point, ...]
    """Every point once, named."""
    machine: Host
    options: RunOptions
    data: str = ""
    """Which data the command line chose, in a line; empty when it chose none."""
    asked: Asked = field(default_factory=Asked)
    """What the command line asks for in place of what the sweep's file says."""
    form: str = ""
    """Why it is the small form, in a line; empty for the full form, and where it was asked for."""

    @property
    def folder(self) -> Path:
        """``RESULTS/SWEEP``, absolute."""
        return sweep_dir(self.options.results_dir, self.sweep.name)

    def tasks(self) -> list[Task]:
        """Return every run, a whole repeat after the other, and prepare the data.

        Raises:
            ConfigError: a point's data cannot be had.
        """
        first = Task.each(self.points, self.options)
        repeats = range(1, self.sweep.repeats + 1)
        return [task.repeated(number) for number in repeats for task in first]


@dataclass(frozen=True)
class Request:
    """Which of a plan's runs to do."""

    again: bool = False
    """Whether to run what is done as well."""
    chosen: frozenset[str] | None = None
    """Names of points; None for all."""
    shared: tuple[Path, ...] = ()
    """Folders of other sweeps whose runs stand for equal points of this one."""
    memory_check: bool = True
    deadline_s: float | None = None
    """When the whole call is to have ended, by ``time.monotonic``; None for no limit."""

    def asks(self, name: str) -> bool:
        """Return whether a point of this name is asked for."""
        return self.chosen is None or name in self.chosen


@dataclass
class Progress:
    """How a call of a sweep went."""

    ok: int = 0
    failed: int = 0
    interrupted: int = 0
    """Ended because the user stopped the call."""
    done: int = 0
    """Left out because they came to a good end before."""
    running: int = 0
    """Left out because another call has them going on."""
    unfit: int = 0
    """Left out because this machine cannot run them, or has no time for them."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why points were left out, by their names."""
    slowest_s: float = 0.0
    """Longest run of this call that came to a good end."""
    stop_signal: int = 0
    """Signal that stopped the call; 0 when nothing did."""

    def text(self, num_runs: int) -> str:
        """Say in a line how the call went."""
        counts = {
            "failed": self.failed,
            "interrupted": self.interrupted,
            "ok before and not run again": self.done,
            "running in another call": self.running,
            "left out": self.unfit,
        }
        parts = [f"{n} {words}" for words, n in counts.items() if n]
        if self.ok or not self.done:
            parts.insert(0, f"{self.ok} ok")
        return f"{num_runs} runs: {', '.join(parts)}"


def run_all(plan: SweepPlan, request: Request) -> Progress:
    """Run what is to be run, and keep ``sweep.json`` up to date.

    A point that fails, hangs or cannot even be started does not stop the others.
    """
    # Points that are not asked for now stay left out for the reasons that the index has.
    reasons = reasons_in_index(plan.folder)
    kept = {name: why for name, why in reasons.items() if not request.asks(name)}
    call = _Call(plan, request, plan.tasks(), Progress(reasons=kept))
    _settle_leftovers(plan.folder)
    call.run()
    return call.progress


@dataclass(frozen=True)
class _Call:
    """One call of a sweep."""

    plan: SweepPlan
    request: Request
    tasks: list[Task]
    progress: Progress

    def run(self) -> None:
        """Run one task after the other, until the user stops it."""
        self._write_index()
        would_run = _decisions(self.plan, self.request, self.tasks)
        if any(one.run for each in would_run.values() for one in each):
            say(f"sweep '{self.plan.sweep.name}': {total_text(self.plan, would_run)}")
        for number, task in enumerate(self.tasks, start=1):
            if not self.request.asks(task.point.name):
                continue
            repeat = f" repeat {task.repeat}" if self.plan.sweep.repeats > 1 else ""
            head = f"[{number}/{len(self.tasks)}] {task.point.name}{repeat}"
            if self._decision(task, head) is None:
                continue
            with self.plan.options.turn(partial(_say, head)):
                # While we waited, another call may have run it.
                if not (decision := self._decision(task, head)):
                    continue
                say(f"{head}: started{decision.why and f': {decision.why}'}")
                outcome = self._run_one(task, head)
            self._write_index()
            if outcome is not None and outcome.stop_signal is not None:
                self.progress.stop_signal = outcome.stop_signal
                return
        self._let_others_end()
        self._write_index()

    def _records(self) -> list[Record]:
        return all_records(self.plan, self.request)

    def _write_index(self) -> None:
        write_index(self.plan, self.tasks, self._records(), self.progress.reasons)

    def _decision(self, task: Task, head: str) -> Decision | None:
        """The decision to run a task now; None, which is said and counted, to leave it out."""
        records = self._records()
        decision = _decide(self.plan, self.request, task, records)
        if not decision.run:
            self.progress.done += decision.is_done
            self.progress.running += not decision.is_done
            say(f"{head}: {decision.why}")
            return None
        point = task.point
        reason = refusal(self.plan, self.request, point) or self._late(task, records)
        if not reason:
            return decision
        self.progress.unfit += 1
        self.progress.reasons[point.name] = reason
        say(f"{head}: left out: {reason}")
        return None

    def _late(self, task: Task, records: Sequence[Record]) -> str:
        """Why a run is not likely to end in time."""
        left_s = self._left_s()
        if left_s is None:
            return ""
        seconds = self._expected_s(task, records)
        if 0 < left_s >= seconds:
            return ""
        return f"it takes about {seconds:.0f} s, and {left_s:.0f} s of --minutes are left"

    def _expected_s(self, task: Task, records: Sequence[Record]) -> float:
        """Seconds that a run will take; this call's runs beat a rough guess."""
        expected = estimate(task.point, self.plan.machine, records)
        seconds = expected.seconds or 0.0
        return seconds if expected.how == AS_BEFORE else self.progress.slowest_s or seconds

    def _later_s(self, task: Task) -> float | None:
        """Seconds that the runs after this one will take; None where there are none."""
        records, later = self._records(), self.tasks[self.tasks.index(task) + 1 :]
        left = [
            self._expected_s(one, records)
            for one in later
            if self.request.asks(one.point.name)
            and _decide(self.plan, self.request, one, records).run
        ]
        return sum(left) if left else None

    def _left_s(self) -> float | None:
        deadline_s = self.request.deadline_s
        return None if deadline_s is None else max(0.0, deadline_s - time.monotonic())

    def _run_one(self, task: Task, head: str) -> Outcome | None:
        """Run a task; None when it could not be started."""
        options, progress = self.plan.options, self.progress
        limits_s = [s for s in (options.timeout_s, self._left_s()) if s is not None]
        options = replace(options, timeout_s=min(limits_s, default=None))
        live = LiveLine(head, task.point.iterations, self._later_s(task))
        try:
            with contextlib.closing(live):
                outcome = execute(task, options, live)
        except (ConfigError, OSError) as error:
            # A full disk, a folder that became read-only: the next point is tried all the same.
            progress.failed += 1
            say(f"{head}: not started: {error}")
            return None
        status, loss = outcome.status, outcome.folder.last_loss()
        seconds = status.seconds or 0.0
        line = f"{head}: {status.status} in {seconds:.1f} s, last loss {loss if loss else 'none'}"
        if status.status == "ok":
            progress.ok += 1
            progress.slowest_s = max(progress.slowest_s, seconds)
            say(line)
            return outcome
        if status.status == INTERRUPTED:
            progress.interrupted += 1
        else:
            progress.failed += 1
        say(f"{line}; {status.cause}; see {outcome.folder.log}")
        return outcome

    def _let_others_end(self) -> None:
        """Wait for a run of this plan that another call on this machine has going on.

        It has the turn, is no failure of this call, and index and report are to have it.
        """
        keys = {record.point_key for record in self._records() if record.status == "running"}
        running = [task.point.name for task in self.tasks if task.point_key in keys]
        if any(map(self.request.asks, running)):
            with self.plan.options.turn(say):
                pass


def _say(head: str, line: str) -> None:
    say(f"{head}: {line}")


def _settle_leftovers(folder: Path) -> None:
    """End what is alive of runs whose launcher is gone, and let their status say so."""
    for record in read_records(folder):
        if record.status != INTERRUPTED or record.driver is None or record.driver.is_elsewhere:
            continue
        found = end_leftovers(record.driver.token)
        if found:
            say(f"{record.where}: ended {len(found)} left over")
        status = Status(INTERRUPTED, cause=record.cause)
        with contextlib.suppress(OSError):
            RunFolder(record.path, record.log).write_status(status)


def all_records(plan: SweepPlan, request: Request) -> list[Record]:
    """Return the runs of the sweep's folder, and of those shared with it, the newest last."""
    folders = [path for path in request.shared if path != plan.folder]
    shared = [record for path in folders for record in read_records(path)]
    return [*(r for r in shared if r.status == "ok"), *read_records(plan.folder)]


def refusal(plan: SweepPlan, request: Request, point: Point) -> str:
    """Say why a point of the plan cannot run on this machine; empty when it can."""
    return why_not_here(point, plan.machine, plan.options, request.memory_check)


def what_would_run(plan: SweepPlan, request: Request) -> dict[str, list[Decision]]:
    """Decide for each repeat of the points, by their names, whether it would run; make no data.

    A point whose data is not there yet was never run on it.
    """
    tasks = Task.each(plan.points, plan.options, makes_data=False)
    repeats = range(1, plan.sweep.repeats + 1)
    known = _decisions(plan, request, [task.repeated(n) for task in tasks for n in repeats])
    names = [point.name for point in plan.points if request.asks(point.name)]
    return {name: known.get(name, [Decision(True) for _ in repeats]) for name in names}


def _decisions(
    plan: SweepPlan, request: Request, tasks: Sequence[Task]
) -> dict[str, list[Decision]]:
    """Decisions on the tasks that are asked for, by the names of their points."""
    records = all_records(plan, request)
    found: dict[str, list[Decision]] = {}
    for task in tasks:
        if request.asks(task.point.name):
            one = _decide(plan, request, task, records)
            found.setdefault(task.point.name, []).append(one)
    return found


def _decide(plan: SweepPlan, request: Request, task: Task, records: Sequence[Record]) -> Decision:
    writes_metrics = plan.options.trainer.writes_metrics
    return decide(task.keys, records, request.again, task.setup, writes_metrics)


def reasons_in_index(sweep_folder: Path) -> dict[str, str]:
    """Return why points were left out, by their names; none where the index is damaged."""
    points = read_json(sweep_folder / INDEX).get("points")
    known = [p for p in points if isinstance(p, dict)] if isinstance(points, list) else []
    return {str(p.get("name")): str(p["skipped"]) for p in known if p.get("skipped")}


def write_index(
    plan: SweepPlan, tasks: Sequence[Task], records: Sequence[Record], reasons: Mapping[str, str]
) -> None:
    """Write ``sweep.json`` anew from the run folders, see docs/design.md.

    Records, the newest last, stand for the tasks; reasons, by name, say why points were left out.
    A file that cannot be written is said and passed over.
    """
    sweep = plan.sweep
    newest = {(record.point_key, record.repeat): record for record in records}
    have_run = {point_key for point_key, _ in newest}
    points, runs = [], []
    for task in tasks:
        point, key = task.point, task.point_key
        if task.repeat == 1:
            about: dict[str, Any] = {"name": point.name, "engine": point.engine}
            points.append({**about, "point_key": key, "repeats": sweep.repeats})
            if key not in have_run and point.name in reasons:
                points[-1]["skipped"] = reasons[point.name]
        if record := newest.get((key, task.repeat)):
            run = {
                "name": point.name,
                "run_dir": Path(os.path.relpath(record.path, plan.folder)).as_posix(),
                **{name: getattr(record, name) for name in _OF_RECORDS},
            }
            changed = older(record, task.setup_key, task.setup)
            runs.append({**run, "older": changed} if changed else run)
    index = {
        "schema_version": SCHEMA_VERSION,
        "name": sweep.name,
        "description": sweep.description,
        "asked": plan.asked.as_table(),
        "figures": list(sweep.figures),
        "results": list(sweep.results),
        "study": sweep.study.as_table(),
        "points": points,
        "runs": runs,
    }
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
        write_json(plan.folder / INDEX, index)
    except OSError as error:
        say(f"{plan.folder / INDEX}: not written: {error.strerror}")


def total_text(plan: SweepPlan, would_run: Mapping[str, Sequence[Decision]]) -> str:
    """Say how long the runs that are left of the points in ``would_run`` will take, if known."""
    records = read_records(plan.folder)
    points = [point for point in plan.points if point.name in would_run]
    runs = {name: sum(one.run for one in each) for name, each in would_run.items()}
    each = {p.name: estimate(p, plan.machine, records) for p in points if runs[p.name]}
    seconds = sum(runs[name] * (item.seconds or 0.0) for name, item in each.items())
    known = {name: item for name, item in each.items() if item.seconds is not None}
    rough = any(item.how != AS_BEFORE for item in known.values())
    how = "a rough figure from assumed rates" if rough else AS_BEFORE
    if known and len(known) < len(each):
        how += f"; the time of {len(each) - len(known)} is not known and not in it"
    repeats = f" x {plan.sweep.repeats} repeats" if plan.sweep.repeats > 1 else ""
    some = "" if len(points) == len(plan.points) else f" of {len(plan.points)}"
    head = f"{len(points)}{some} points{repeats}"
    left, total = sum(runs.values()), len(points) * plan.sweep.repeats
    if not left:
        return f"{head}, none is left to run"
    done = f", {left} of {total} runs left" if left < total else ""
    time = f"about {duration_text(seconds)} in all ({how})" if known else "of unknown time"
    shorter = f"; shorter: {_shorter(points, plan.sweep.study)}" if seconds > LONG_S else ""
    return f"{head}{done}, {time}{shorter}"


def _shorter(points: Sequence[Point], study: Study) -> str:
    """Return options that make a long sweep a short one."""
    seeds = sorted({point.seed for point in points})
    few = ", too few for the gate" if study.gate.kind == "quality" else ""
    one = f'--only "seed {seeds[0]}" (one of {len(seeds)} seeds{few}), ' if len(seeds) > 1 else ""
    return f"{one}--iterations N, or --minutes 5 (the runs that are likely to end by then)"
