"""Runs the points of a sweep one after the other; what one does never costs another."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

from configs.cli import say
from configs.errors import ConfigError
from configs.schema import Point
from configs.study import Study
from configs.sweep import Sweep
from launch.estimate import AS_BEFORE, TimeLimit, estimate
from launch.execute import Outcome, execute
from launch.fit import Machine, lacks, shortages
from launch.process.members import end_leftovers
from launch.process.watch import Live, duration_text
from launch.records.ledger import INTERRUPTED, Choice, Decision, Record, decide, read_records
from launch.records.run_folder import Driver, RunFolder, Status, sweep_dir
from launch.sweep_index import reasons_in_index, write_index
from launch.task import RunOptions, Task

LONG_S = 240.0
"""Seconds of a sweep, as estimated, above which a shorter form of it is named beforehand."""
OTHERS_S = 0.5
"""Seconds between two looks at the runs of other calls."""


@dataclass(frozen=True)
class Plan:
    """What a sweep asks for on this machine."""

    sweep: Sweep
    points: tuple[Point, ...]
    """Every point once, named."""
    machine: Machine
    options: RunOptions
    data: str = ""
    """Which data the command line chose, in a line; empty when it chose none."""

    @property
    def folder(self) -> Path:
        """``RESULTS/SWEEP``, absolute."""
        return sweep_dir(self.options.results_dir, self.sweep.name)

    def tasks(self) -> list[Task]:
        """Return every run, a whole repeat after the other, and prepare the data.

        Raises:
            ConfigError, LaunchError: a point's data cannot be had.
        """
        first = Task.each(self.points, self.options)
        repeats = range(1, self.sweep.repeats + 1)
        return [task.repeated(number) for number in repeats for task in first]


@dataclass
class Progress:
    """How a call of a sweep went."""

    ok: int = 0
    failed: int = 0
    interrupted: int = 0
    """Ended because the user stopped the call."""
    skipped: int = 0
    """Left out because they are done, or because the user asked for others."""
    unfit: int = 0
    """Left out because this machine cannot run them."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why, by their points' names."""
    stop_signal: int = 0
    """Signal that stopped the call; 0 when nothing did."""
    pace: list[float] = field(default_factory=list)
    """Seconds that runs took, as shares of what was estimated."""


@dataclass(frozen=True)
class Request:
    """Which of a plan's runs to do."""

    choice: Choice = Choice.MISSING
    chosen: frozenset[str] | None = None
    """Names of points; None for all."""
    shared: tuple[Path, ...] = ()
    """Folders of other sweeps whose runs stand for equal points of this one."""
    memory_check: bool = True
    time_limit: TimeLimit | None = None
    """For the whole call."""

    def asks(self, name: str) -> bool:
        """Return whether a point of this name is asked for."""
        return self.chosen is None or name in self.chosen


def run_all(plan: Plan, request: Request) -> Progress:
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

    plan: Plan
    request: Request
    tasks: list[Task]
    progress: Progress

    def run(self) -> None:
        """Run one task after the other, until the user stops it."""
        self._write_index()
        self._say_how_long()
        for number, task in enumerate(self.tasks, start=1):
            if not self.request.asks(task.point.name):
                continue
            repeat = f" repeat {task.repeat}" if self.plan.sweep.repeats > 1 else ""
            head = f"[{number}/{len(self.tasks)}] {task.point.name}{repeat}"
            if not self._is_run(task, head):
                continue
            with self.plan.options.turn(task.point, partial(_say, head)):
                # While we waited, another call may have run it.
                if not (decision := self._is_run(task, head)):
                    continue
                say(f"{head}: started{decision.why and f': {decision.why}'}")
                outcome = self._run_one(self.tasks[number - 1 :], head)
            self._write_index()
            if outcome is not None and outcome.stop_signal is not None:
                self.progress.stop_signal = outcome.stop_signal
                return
        self._await_others()
        self._write_index()

    def _records(self) -> list[Record]:
        return all_records(self.plan, self.request)

    def _write_index(self) -> None:
        reasons = self.progress.reasons
        write_index(self.plan.sweep, self.plan.folder, self.tasks, self._records(), reasons)

    def _say_how_long(self) -> None:
        records = self._records()
        found: dict[str, list[Decision]] = {}
        for task in self.tasks:
            if self.request.asks(task.point.name):
                one = _decided(task, records, self.request.choice)
                found.setdefault(task.point.name, []).append(one)
        if any(one.run for each in found.values() for one in each):
            say(f"sweep '{self.plan.sweep.name}': {total_text(self.plan, found)}")

    def _is_run(self, task: Task, head: str) -> Decision | None:
        """The decision to run a task now; None, which is said and counted, to leave it out."""
        records = self._records()
        decision = _decided(task, records, self.request.choice)
        if not decision.run:
            self.progress.skipped += 1
            say(f"{head}: {decision.why}")
            return None
        reason = why_not_here(task.point, self.plan, self.request.memory_check)
        if self.request.time_limit and not reason:
            reason = self.request.time_limit.refuse(self._seconds(task, records) or 0.0)
        if not reason:
            return decision
        self.progress.unfit += 1
        self.progress.reasons[task.point.name] = reason
        say(f"{head}: left out: {reason}")
        return None

    def _seconds(self, task: Task, records: Sequence[Record]) -> float | None:
        """Seconds of a run, a rough figure at the pace of the runs so far; None if not known."""
        expected = estimate(task.point, self.plan.machine, records)
        is_known = expected.how == AS_BEFORE or not self.progress.pace
        pace = 1.0 if is_known else median(self.progress.pace)
        return None if expected.seconds is None else expected.seconds * pace

    def _run_one(self, rest: Sequence[Task], head: str) -> Outcome | None:
        """Run the first of ``rest``; None when it could not be started."""
        task, options, progress = rest[0], self.plan.options, self.progress
        records = self._records()
        if limit := self.request.time_limit:
            limits_s = (options.timeout_s, limit.left_s)
            options = replace(options, timeout_s=min(s for s in limits_s if s is not None))
        try:
            outcome = execute(task, options, self._live(rest, records, head).watch)
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
            expected = estimate(task.point, self.plan.machine, records)
            if seconds and expected.seconds:
                progress.pace.append(seconds / expected.seconds)
            say(line)
            return outcome
        if status.status == INTERRUPTED:
            progress.interrupted += 1
        else:
            progress.failed += 1
        say(f"{line}; {status.cause}; see {outcome.folder.log}")
        return outcome

    def _live(self, rest: Sequence[Task], records: Sequence[Record], head: str) -> Live:
        """Progress of this run, and the seconds of the sweep where something tells them."""
        iterations = rest[0].point.iterations
        expected = estimate(rest[0].point, self.plan.machine, records)
        if not (self.progress.pace or expected.how == AS_BEFORE):
            return Live(head, iterations, None, None)
        others = [
            self._seconds(task, records) or 0.0
            for task in rest[1:]
            if self.request.asks(task.point.name)
            and _decided(task, records, self.request.choice).run
            and not why_not_here(task.point, self.plan, self.request.memory_check)
        ]
        return Live(head, iterations, sum(others), self._seconds(rest[0], records))

    def _await_others(self) -> None:
        """Wait for runs of this plan that other calls on this machine have going on.

        They are no failures of this call, and its index and report are to have them.
        """
        told, ours = False, Driver.this_process()
        while running := [
            record.name
            for record in self._records()
            if record.status == "running"
            and record.driver is not None
            and not record.driver.is_elsewhere
            # A run of ours whose status could not be written would be waited for for ever.
            and replace(record.driver, token="") != ours
            and self.request.asks(record.name)
        ]:
            if not told:
                say(f"waits for what another call still runs: {', '.join(running)}")
            told = True
            time.sleep(OTHERS_S)


def _say(head: str, line: str) -> None:
    say(f"{head}: {line}")


def _decided(task: Task, records: Sequence[Record], choice: Choice) -> Decision:
    """Whether to run a task; says so where runs of before had another type of numbers."""
    decision = decide(task.keys, records, choice, task.setup)
    dtype, this = task.point.dtype, (task.point.name, task.repeat)
    others = [r for r in records if (r.name, r.repeat) == this and r.dtype != dtype]
    if decision.run and not decision.why and others:
        return replace(
            decision, why=f"type is {dtype}, was {others[-1].dtype} in {others[-1].where}"
        )
    return decision


def why_not_here(point: Point, plan: Plan, memory_check: bool) -> str:
    """Say what a point needs that this machine lacks; empty when it can be run."""
    reasons = lacks(point, plan.machine, plan.options)
    if memory_check and not reasons:
        reasons = shortages(point, plan.machine, plan.options.trainer)
    return "; ".join(reasons)


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


def all_records(plan: Plan, request: Request) -> list[Record]:
    """Return the runs of the sweep's folder, and of those shared with it, the newest last."""
    folders = [path for path in request.shared if path != plan.folder]
    shared = [record for path in folders for record in read_records(path)]
    return [*(r for r in shared if r.status == "ok"), *read_records(plan.folder)]


def summary(progress: Progress, num_runs: int) -> str:
    """Say in a line how a call went."""
    counts = {
        "failed": progress.failed,
        "interrupted": progress.interrupted,
        "not run again": progress.skipped,
        "left out": progress.unfit,
    }
    parts = [f"{progress.ok} ok", *(f"{n} {words}" for words, n in counts.items() if n)]
    return f"{num_runs} runs: {', '.join(parts)}"


def what_would_run(plan: Plan, request: Request) -> dict[str, list[Decision]]:
    """Decide for each repeat of the points, by their names, whether it would run; make no data.

    A point whose data is not there yet was never run on it.
    """
    tasks = Task.each(plan.points, plan.options, makes_data=False)
    known = {task.point.name: task for task in tasks}
    records = all_records(plan, request)
    found: dict[str, list[Decision]] = {point.name: [] for point in plan.points}
    for name, each in found.items():
        for number in range(1, plan.sweep.repeats + 1):
            if name in known:
                each.append(_decided(known[name].repeated(number), records, request.choice))
            else:
                each.append(Decision(request.choice is not Choice.RERUN_FAILED))
    return found


def total_text(plan: Plan, would_run: Mapping[str, Sequence[Decision]]) -> str:
    """Say how long the runs that are left of the points in ``would_run`` will take, if known."""
    records = read_records(plan.folder)
    points = [point for point in plan.points if point.name in would_run]
    runs = {name: sum(one.run for one in each) for name, each in would_run.items()}
    each = {p.name: estimate(p, plan.machine, records) for p in points if runs[p.name]}
    seconds = sum(runs[name] * (item.seconds or 0.0) for name, item in each.items())
    rough = any(item.how != AS_BEFORE for item in each.values())
    how = "a rough figure from assumed rates" if rough else AS_BEFORE
    unknown = sum(item.seconds is None for item in each.values())
    if unknown:
        how += f"; the time of {unknown} is not predicted and not in it"
    repeats = f" x {plan.sweep.repeats} repeats" if plan.sweep.repeats > 1 else ""
    some = "" if len(points) == len(plan.points) else f" of {len(plan.points)}"
    head = f"{len(points)}{some} points{repeats}"
    left, total = sum(runs.values()), len(points) * plan.sweep.repeats
    if not left:
        return f"{head}, none is left to run"
    done = f", {left} of {total} runs left" if left < total else ""
    text = f"{head}{done}, about {duration_text(seconds)} in all ({how})"
    return f"{text}; shorter: {_shorter(points, plan.sweep.study)}" if seconds > LONG_S else text


def _shorter(points: Sequence[Point], study: Study) -> str:
    """Options that make a long sweep a short one."""
    seeds = sorted({point.seed for point in points})
    few = ", too few for the gate" if study.gate.kind == "quality" else ""
    one = f'--only "seed {seeds[0]}" (one of {len(seeds)} seeds{few}), ' if len(seeds) > 1 else ""
    return f"{one}--iterations N, or --minutes 5 (the runs that are likely to end by then)"
