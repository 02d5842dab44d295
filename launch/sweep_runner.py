"""Runs the points of a sweep one after the other; what one does never costs another."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from configs.errors import ConfigError
from configs.schema import Point
from configs.sweep import Sweep
from launch import cli
from launch.fit.capacity import shortages
from launch.fit.estimate import AS_BEFORE, Estimate, estimate
from launch.fit.machine import Machine
from launch.fit.time_limit import TimeLimit
from launch.live import Live, duration_text
from launch.needs import lacks
from launch.process.members import end_leftovers
from launch.records.driver import Driver
from launch.records.files import read_json, write_json
from launch.records.ledger import INTERRUPTED, Choice, Record, decide, read_records
from launch.records.run_folder import SCHEMA_VERSION, RunFolder, Status, sweep_dir
from launch.run import Outcome, execute
from launch.task import RunOptions, Task

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
        """Every run, a whole repeat after the other; prepares the data.

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
    longest_s: float = 0.0
    """Seconds of the longest run."""


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


def run_all(plan: Plan, request: Request) -> Progress:
    """Run what is to be run, and keep ``sweep.json`` up to date.

    A point that fails, hangs or cannot even be started does not stop the others.
    """
    tasks = plan.tasks()
    settle_leftovers(plan.folder)
    progress = Progress(reasons=reasons_before(plan, request))
    write_index(plan, tasks, request, progress.reasons)
    for number, task in enumerate(tasks, start=1):
        repeat = f" repeat {task.repeat}" if plan.sweep.repeats > 1 else ""
        head = f"[{number}/{len(tasks)}] {task.point.name}{repeat}"
        why = _why_not(plan, task, request, progress)
        if why:
            cli.say(f"{head}: {why}")
            continue
        if request.chosen is not None and task.point.name not in request.chosen:
            continue
        with _turn(plan, task, head):
            # While we waited, another call may have run it.
            if why := _why_not(plan, task, request, progress):
                cli.say(f"{head}: {why}")
                continue
            cli.say(f"{head}: started")
            outcome = _run_one(plan, request, tasks[number - 1 :], head, progress)
        write_index(plan, tasks, request, progress.reasons)
        if outcome is not None and outcome.stop_signal is not None:
            progress.stop_signal = outcome.stop_signal
            break
    else:
        _await_others(plan, request)
    write_index(plan, tasks, request, progress.reasons)
    return progress


def _turn(plan: Plan, task: Task, head: str) -> AbstractContextManager[None]:
    return plan.options.turn(task.point, lambda line: cli.say(f"{head}: {line}"))


def _await_others(plan: Plan, request: Request) -> None:
    """Wait for runs of this plan that other calls on this machine have going on.

    They are no failures of this call, and its index and report are to have them.
    """
    told, ours = False, Driver.this_process()
    while running := [
        record
        for record in all_records(plan, request)
        if record.status == "running"
        and record.driver is not None
        and not record.driver.is_elsewhere
        # A run of ours whose status could not be written would be waited for for ever.
        and replace(record.driver, token="") != ours
        and (request.chosen is None or record.name in request.chosen)
    ]:
        if not told:
            names = ", ".join(record.name for record in running)
            cli.say(f"waits for what another call still runs: {names}")
        told = True
        time.sleep(OTHERS_S)


def why_not_here(point: Point, plan: Plan, memory_check: bool) -> str:
    """What a point needs that this machine lacks; empty when it can be run."""
    reasons = lacks(point, plan.machine, plan.options)
    if memory_check and not reasons:
        reasons = shortages(point, plan.machine)
    return "; ".join(reasons)


def reasons_before(plan: Plan, request: Request) -> dict[str, str]:
    """Why points that are not asked for now were left out, as the sweep's index says it."""
    index = read_json(plan.folder / "sweep.json")
    chosen = {p.name for p in plan.points} if request.chosen is None else request.chosen
    return {
        str(point.get("name")): str(point["skipped"])
        for point in index.get("points", [])
        if point.get("skipped") and point.get("name") not in chosen
    }


def settle_leftovers(folder: Path) -> None:
    """End what is alive of runs whose launcher is gone, and let their status say so."""
    for record in read_records(folder):
        if record.status != INTERRUPTED or record.driver is None or record.driver.is_elsewhere:
            continue
        found = end_leftovers(record.driver.token)
        if found:
            cli.say(f"{record.path.parent.name}/{record.path.name}: ended {len(found)} left over")
        status = Status(INTERRUPTED, cause=record.cause)
        with contextlib.suppress(OSError):
            RunFolder(record.path, record.log).write_status(status)


def _why_not(plan: Plan, task: Task, request: Request, progress: Progress) -> str:
    """Why a task is not run now, for the user; empty when it is, or was not asked for."""
    if request.chosen is not None and task.point.name not in request.chosen:
        return ""
    records = all_records(plan, request)
    decision = decide(task.keys, records, request.choice)
    if not decision.run:
        progress.skipped += 1
        return decision.why
    reason = why_not_here(task.point, plan, request.memory_check)
    if request.time_limit and not reason:
        expected = estimate(task.point, plan.machine, records)
        reason = request.time_limit.refuse(_probable_s(expected, progress))
    if reason:
        progress.unfit += 1
        progress.reasons[task.point.name] = reason
        return f"left out: {reason}"
    return ""


def _probable_s(expected: Estimate, progress: Progress) -> float:
    """Seconds of a run as far as can be told now; of one that nothing tells of, the longest's."""
    if expected.seconds is None:
        return progress.longest_s
    is_known = expected.how == AS_BEFORE or not progress.pace
    return expected.seconds * (1.0 if is_known else median(progress.pace))


def _run_one(
    plan: Plan, request: Request, rest: Sequence[Task], head: str, progress: Progress
) -> Outcome | None:
    """Run the first of ``rest``; None when it could not be started."""
    task = rest[0]
    records = all_records(plan, request)
    expected = estimate(task.point, plan.machine, records)
    live = _live(plan, request, rest, records, (head, expected, progress))
    options = plan.options
    if request.time_limit:
        limits_s = (options.timeout_s, request.time_limit.left_s)
        options = replace(options, timeout_s=min(s for s in limits_s if s is not None))
    try:
        outcome = execute(task, options, live.watch)
    except (ConfigError, OSError) as error:
        # A full disk, a folder that became read-only: the next point is tried all the same.
        progress.failed += 1
        cli.say(f"{head}: not started: {error}")
        return None
    status, loss = outcome.status, outcome.folder.last_loss()
    progress.longest_s = max(progress.longest_s, status.seconds or 0.0)
    line = f"{status.status} in {status.seconds or 0:.1f} s, last loss {loss if loss else 'none'}"
    if status.status == "ok":
        progress.ok += 1
        if status.seconds and expected.seconds:
            progress.pace.append(status.seconds / expected.seconds)
        cli.say(f"{head}: {line}")
    else:
        if status.status == INTERRUPTED:
            progress.interrupted += 1
        else:
            progress.failed += 1
        cli.say(f"{head}: {line}; {status.cause}; see {outcome.folder.log}")
    return outcome


def _live(
    plan: Plan,
    request: Request,
    rest: Sequence[Task],
    records: Sequence[Record],
    now: tuple[str, Estimate, Progress],
) -> Live:
    """Progress of this run and of the sweep, where there is something to tell the time by."""
    head, expected, progress = now
    iterations = rest[0].point.iterations
    is_told = progress.pace or expected.how == AS_BEFORE
    if not is_told or expected.seconds is None:
        return Live(head, iterations, None, None)
    pace = median(progress.pace) if progress.pace else 1.0
    others = [
        (estimate(task.point, plan.machine, records).seconds or 0.0) * pace
        for task in rest[1:]
        if (request.chosen is None or task.point.name in request.chosen)
        and decide(task.keys, records, request.choice).run
        and not why_not_here(task.point, plan, request.memory_check)
    ]
    return Live(head, iterations, sum(others), expected.seconds * pace)


def all_records(plan: Plan, request: Request) -> list[Record]:
    """Runs of the sweep's folder, and of those that are shared with it, the newest last."""
    folders = [path for path in request.shared if path != plan.folder]
    shared = [record for path in folders for record in read_records(path)]
    return [*(r for r in shared if r.status == "ok"), *read_records(plan.folder)]


def write_index(
    plan: Plan, tasks: Sequence[Task], request: Request, reasons: Mapping[str, str]
) -> None:
    """Write ``sweep.json`` anew from the run folders, see docs/design.md.

    Args:
        plan: what the sweep asks for.
        tasks: its runs.
        request: which of them this call does.
        reasons: why points were left out, by their names.
    """
    folder = plan.folder
    newest: dict[tuple[str, int], Record] = {}
    for record in all_records(plan, request):
        newest[record.point_key, record.repeat] = record
    found = [(task, newest.get((task.point_key, task.repeat))) for task in tasks]
    runs = [
        {
            "name": task.point.name,
            "engine": record.engine,
            "repeat": record.repeat,
            "run_dir": Path(os.path.relpath(record.path, folder)).as_posix(),
            "log": record.log,
            "status": record.status,
        }
        for task, record in found
        if record is not None
    ]
    points = [
        {
            "name": task.point.name,
            "engine": task.point.engine,
            "point_key": task.point_key,
            "repeats": plan.sweep.repeats,
            **_skipped(task, reasons, newest),
        }
        for task in tasks
        if task.repeat == 1
    ]
    index = {
        "schema_version": SCHEMA_VERSION,
        "name": plan.sweep.name,
        "description": plan.sweep.description,
        "figures": list(plan.sweep.figures),
        "study": plan.sweep.study.as_table(),
        "points": points,
        "runs": runs,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "sweep.json", index)
    except OSError as error:
        # It can be made again from the run folders at any time.
        cli.say(f"{folder / 'sweep.json'}: not written: {error.strerror}")


def _skipped(
    task: Task, reasons: Mapping[str, str], newest: Mapping[tuple[str, int], Record]
) -> dict[str, str]:
    """Why a point without a run has none, where that is known."""
    has_run = any(key == task.point_key for key, _ in newest)
    reason = reasons.get(task.point.name)
    return {} if has_run or reason is None else {"skipped": reason}


def summary(progress: Progress, num_runs: int) -> str:
    """One line on how a call went."""
    parts = [f"{progress.ok} ok"]
    for count, words in (
        (progress.failed, "failed"),
        (progress.interrupted, "interrupted"),
        (progress.skipped, "not run again"),
        (progress.unfit, "left out"),
    ):
        if count:
            parts.append(f"{count} {words}")
    return f"{num_runs} runs: {', '.join(parts)}"


def total_text(plan: Plan) -> str:
    """How long the whole plan will take, as far as can be told beforehand."""
    records: list[Record] = []
    with contextlib.suppress(OSError):
        records = read_records(plan.folder)
    each = [estimate(point, plan.machine, records) for point in plan.points]
    seconds = plan.sweep.repeats * sum(item.seconds or 0.0 for item in each)
    rough = any(item.how != AS_BEFORE for item in each)
    how = "a rough figure from assumed rates" if rough else AS_BEFORE
    unknown = sum(item.seconds is None for item in each)
    if unknown:
        how += f"; the time of {unknown} is not predicted and not in it"
    repeats = f" x {plan.sweep.repeats} repeats" if plan.sweep.repeats > 1 else ""
    return f"{len(each)} points{repeats}, about {duration_text(seconds)} in all ({how})"
