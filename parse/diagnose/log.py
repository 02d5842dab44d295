"""One log from its first line to its illnesses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from parse.diagnose.facts import Facts
from parse.diagnose.failures import FailureWatcher, SignWatcher
from parse.diagnose.illness import Illness, known
from parse.diagnose.memory import DeviceMemoryWatcher, HostMemoryWatcher
from parse.diagnose.setup import SetupWatcher
from parse.diagnose.speed import StepShareWatcher
from parse.diagnose.steps import Step, read_step
from parse.diagnose.training import LossWatcher, NormWatcher, OverflowWatcher
from parse.diagnose.watcher import Run, Watcher
from parse.errors import LogError
from parse.log.lines import Line, encoding_problem, open_log, read_lines

_WATCHERS: tuple[type[Watcher], ...] = (
    *(OverflowWatcher, LossWatcher, NormWatcher),
    *(DeviceMemoryWatcher, HostMemoryWatcher, SignWatcher),
    *(StepShareWatcher, SetupWatcher, FailureWatcher),
)


@dataclass
class Diagnosis:
    """What a log says of its run."""

    path: Path
    num_lines: int
    num_steps: int
    software: list[str]
    illnesses: list[Illness] = field(default_factory=list)
    """In the order of the log."""
    not_judged: list[str] = field(default_factory=list)
    """What the log does not let one judge."""

    @property
    def is_known(self) -> bool:
        """Whether anything in the log is of training."""
        return bool(self.software or self.num_steps or self.illnesses)


def diagnose(path: Path) -> Diagnosis:
    """Read a log once, and keep no line of it.

    Raises:
        LogError: it cannot be read, or is no text.
    """
    try:
        with open_log(path) as file:
            if problem := encoding_problem(file):
                raise LogError(f"{path}: {problem}")
            return _diagnose(path, read_lines(file))
    except FileNotFoundError:
        raise LogError(f"{path}: no such file") from None
    except OSError as error:
        raise LogError(f"{path}: cannot be read: {error.strerror}") from None


def _diagnose(path: Path, lines: Iterable[Line]) -> Diagnosis:
    run = Run()
    facts = Facts(run)
    watchers = [watcher(run) for watcher in _WATCHERS]
    fed = [watcher for watcher in (facts, *watchers) if watcher.words]
    stepping = [watcher for watcher in watchers if type(watcher).step is not Watcher.step]
    position = ""
    for line in lines:
        run.num_lines, text = line.number, line.text
        for watcher in fed:
            for word in watcher.words:
                if word in text:
                    watcher.feed(line)
                    break
        step = read_step(line)
        # A progress bar is drawn again, and several ranks print the same step.
        if step is not None and not (step.position and step.position == position):
            position = step.position
            _take(run, stepping, step)
    facts.finish()
    return _finished(path, run, watchers)


def _take(run: Run, watchers: list[Watcher], step: Step) -> None:
    run.software.add(step.framework)
    run.num_steps += 1
    for watcher in watchers:
        watcher.step(step)


def _finished(path: Path, run: Run, watchers: list[Watcher]) -> Diagnosis:
    every = sorted((i for w in watchers for i in w.illnesses()), key=lambda illness: illness.line)
    # Two watchers may see one illness; the line that shows it first counts.
    found = list({illness.name: illness for illness in reversed(every)}.values())[::-1]
    names = {illness.name for illness in found}
    ends = {name for name in names if known()[name].ends_run} - {"unknown-failure"}
    # An update that overflows has no norm.
    hidden = {"norm-nan"} if "overflow-every-step" in names else set()
    if ends or {"recompiles", "overflow-every-step"} & names:
        # The rest of the log's errors follow from the one that is known.
        hidden.add("unknown-failure")
    kept = [illness for illness in found if illness.name not in hidden]
    notes = [note for watcher in watchers for note in watcher.not_judged()]
    return Diagnosis(path, run.num_lines, run.num_steps, sorted(run.software), kept, notes)
