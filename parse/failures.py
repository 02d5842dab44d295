"""What ended a run: tracebacks, signs of ``illnesses.toml`` and exit codes.

The first error in time is the cause, and the rest follow from it, but for errors that always come
of another one (a lost connection), and of those that may (a time-out), where another one is there.
"""

from __future__ import annotations

import re
import signal
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from parse.illnesses import Illness, Kind, known, quoted, quoted_line
from parse.lines import Line
from parse.log import PATTERNS
from parse.overflows import GOES_ON_STEPS

UNKNOWN = "unknown-failure"
_HOST, _DEVICE, _OF_NCCL, _STOPPED, _AT_EXIT = (
    "host-memory", "device-memory", "device-memory-nccl", "stopped-from-outside", "abort-at-exit",
)  # fmt: skip

_TRACEBACK = re.compile(
    r"(\[\w*\d\]: ?)?\W{0,80}(?:Exception Group )?Traceback \(most recent call last\)"
)
_HARMLESS = ("Exception ignored ", "Error in atexit._run_exitfuncs", "--- Logging error ---")
_OF_THREAD = "Exception in thread "
"""What Python says before the traceback of an error that ends nothing, or a thread alone."""
_MESSAGE_LINES = 3
"""So many lines behind an error still belong to its message."""
_FRAME = re.compile(r'File "([^"]+)", line \d+, in (\w+)|^\W*(\S+\.py):\d+ in (\w+)')
_ERROR = re.compile(
    r"^(?: ?| +\| )((?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*)?(?:Error|Exception|Failure|Expired|Iteration)"
    r"|(?:[a-z_]\w*\.)+[A-Z]\w*)(?::\s*(.*))?$"
)
_OF_LAUNCHER = re.compile(r"(?:ChildFailed|CalledProcess|ProcessRaised|ProcessExited)\w+$")
"""Errors of a launcher, which tell only that one of its processes failed."""
_DEVICE_MEMORY = re.compile(
    r"(?:CUDA|HIP|NPU|XPU|MPS backend) out of memory\.|(?:torch\.)?(?:cuda\.)?OutOfMemoryError: |"
    r"CUDA error: out of memory|Cuda failure (?:\d+ )?'out of memory'|CUBLAS_STATUS_ALLOC_FAILED"
)
_NCCL_SAYS = "Cuda failure"
"""NCCL's words for an error of CUDA, which torch words otherwise."""
_NOT_INNER = {"initialize", "wrapped_fn", "wrapper", "decorate_context", "_call_impl"}
_PHASES = (
    ("saving", re.compile(r"(?i)saving (?:model )?checkpoint|save_checkpoint|Saving model")),
    ("loading", re.compile(r"(?i)loading checkpoint shards|from_pretrained|load_checkpoint|"
                           r"resuming from")),
)  # fmt: skip
_SIGNAL_WORDS = {
    "Killed": signal.SIGKILL,
    "Bus error": signal.SIGBUS,
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Terminated": signal.SIGTERM,
    "Illegal instruction": signal.SIGILL,
}
_WORDS = "|".join(_SIGNAL_WORDS)
_EXIT = re.compile(
    r"(?:exits with return code = |\bexitcode\s*[:=] ?|[Ee]xited with exit code |"
    r"terminated with code )(?P<code>-?\d+)\b"
    r"|(?:exit status|(?i:exit code):?|exited with (?:code|status)) (?P<status>\d+)\b"
    r"|(?:died with <Signals\.\w+: |exited on signal |terminated by signal )(?P<signal>\d+)\b"
    r"|\bSignal (?P<torchrun>\d+) \(SIG\w+\) received by PID"
    rf"|^\S*: line \d+:\s+\d+ (?P<shell>{_WORDS})\b|\btasks? [\d,-]+: (?P<slurm>{_WORDS})\b"
    rf"|^(?P<bare>{_WORDS})(?: +\(core dumped\))?\s*$"
)
"""How launchers and shells word the end of a process: by a code, a signal, or its words. Any
program has a status, which counts where it is a signal's."""
_SHELL_CODES = 128
"""A shell adds the signal to this."""
_TRAINED = re.compile(
    r"\[after training (?:ends|is done)\]|'train_runtime': |`Trainer\.fit` stopped"
)
_ROOM_PERCENT, _ROOM_AT_SETUP_PERCENT = 70, 20
"""Host memory in use below which it did not run out while training; while setting up it grows."""


class _Shown(NamedTuple):
    """A line that shows an illness."""

    line: int
    steps: int
    """How many steps there were at that line."""
    evidence: str
    is_error: bool = False
    """True where the line is the error that a traceback ends with."""


@dataclass
class _Traceback:
    """One that a rank is printing, or has printed."""

    frames: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=80))
    """File and function of each, inwards."""
    announced_by: str = ""
    """What Python said before it; empty for one that ends its process."""
    is_open: bool = True
    """True until the error that it ends with."""
    ended_at: int = -_MESSAGE_LINES
    """Line of that error."""

    def ends_at(self, line: int) -> bool:
        """Return whether a line is of the error that it ends with."""
        return self.is_open or line - self.ended_at <= _MESSAGE_LINES

    def passes(self, pattern: str) -> bool:
        """Return whether a file or a function of it matches."""
        return any(re.search(pattern, f"{file}:{name}") for file, name in self.frames)


class Failures:
    """Collects what ended a run, or may have, line by line."""

    def __init__(self) -> None:
        self._shown: dict[str, list[_Shown]] = {}
        self._memory: list[tuple[str, _Shown]] = []
        """What the device's allocator had no room for, by name."""
        self._exits: list[tuple[int, _Shown]] = []
        self._weak: list[_Shown] = []
        """Errors of a launcher or a thread, which tell nothing where there is another one."""
        self._tracebacks: dict[str, _Traceback] = {}
        """The last of each host and rank, since those of several mix."""
        self._announced: dict[str, str] = {}
        """What Python said of the traceback that a rank prints next."""
        self._kinds = {name: kind for name, kind in known().items() if kind.signs}
        words = {word for kind in self._kinds.values() for word in kind.words}
        self._any_word = re.compile("|".join(map(re.escape, sorted(words))))
        self._phase = _Shown(0, -1, "")
        self._host: tuple[float, _Shown] | None = None
        """Percent of host memory in use, and the line that says so."""
        self._trained_at = -1

    def take(self, line: Line, steps: int) -> None:
        """Take a line that is of no step; ``steps`` there were before it."""
        traceback = self._take_traceback(line)
        if sign := _DEVICE_MEMORY.search(line.text):
            traceback = traceback or next(iter(self._tracebacks.values()), _Traceback())
            is_nccl = sign[0].startswith(_NCCL_SAYS)
            name = _OF_NCCL if is_nccl else _allocated(name for _, name in traceback.frames)
            self._memory.append((name, _Shown(line.number, steps, quoted_line(line, sign))))
            traceback.is_open = False
        is_sign = self._take_signs(line, steps, traceback)
        if traceback and traceback.is_open:
            self._take_error(line, steps, traceback, is_sign=is_sign)
        self._take_exit(line, steps)
        self._take_surroundings(line, steps)

    def has(self, name: str) -> bool:
        """Return whether a line has shown an illness."""
        return name in self._shown

    def _take_traceback(self, line: Line) -> _Traceback | None:
        """Follow the tracebacks; return the one that the line's rank printed last."""
        text, source = line.text, line.source
        if text.startswith((*_HARMLESS, _OF_THREAD)):
            self._announced[source] = text
        elif begin := _TRACEBACK.search(text):
            source += begin[1] or ""  # it may stand behind a progress bar
            new = _Traceback(announced_by=self._announced.pop(source, ""))
            self._tracebacks[source] = new
        elif ".py" in text and " in " in text and (frame := _FRAME.search(text)):
            if len(self._tracebacks) > 64:
                self._tracebacks.clear()
            own = self._tracebacks.setdefault(source, _Traceback(is_open=False))
            own.frames.append((frame[1] or frame[3], frame[2] or frame[4]))
        return self._tracebacks.get(source)

    def _take_signs(self, line: Line, steps: int, traceback: _Traceback | None) -> bool:
        is_any = False
        for name, kind in self._kinds.items() if self._any_word.search(line.text) else ():
            is_worded = any(word in line.text for word in kind.words)
            sign = kind.any_sign.search(line.text) if is_worded else None
            if not sign or (kind.within and not (traceback and traceback.passes(kind.within))):
                continue
            evidence = quoted_line(line, sign)
            if name == _HOST:
                evidence += f" ({self._doing(steps)})"
            is_error = traceback is not None and traceback.ends_at(line.number)
            shown = _Shown(line.number, steps, evidence, is_error)
            self._shown.setdefault(name, []).append(shown)
            is_any = True
        return is_any

    def _take_error(self, line: Line, steps: int, traceback: _Traceback, *, is_sign: bool) -> None:
        """Keep the error that a traceback ends with; one that is a sign is known by it."""
        error = _ERROR.match(line.text.rstrip())
        if not error:
            return
        traceback.is_open, traceback.ended_at = False, line.number
        if is_sign or traceback.announced_by.startswith(_HARMLESS):
            return
        message = f"{error[1]}: {error[2]}" if error[2] else error[1]
        shown = _Shown(line.number, steps, quoted(message, source=line.source))
        if _OF_LAUNCHER.search(error[1]) or traceback.announced_by:
            self._weak.append(shown)
        else:
            self._shown.setdefault(UNKNOWN, []).append(shown)

    def _take_exit(self, line: Line, steps: int) -> None:
        if not (found := _EXIT.search(line.text)):
            return
        evidence = quoted_line(line, found)
        if (code := _exit_code(found)) < 0:
            names = {one.value: one.name for one in signal.Signals}
            evidence += f" ({names.get(-code, 'a signal')})"
        if code:
            self._exits.append((code, _Shown(line.number, steps, evidence)))

    def _take_surroundings(self, line: Line, steps: int) -> None:
        """What the host was doing, and how full its memory was."""
        text = line.text
        for phase, pattern in _PHASES:
            if pattern.search(text):
                self._phase = _Shown(line.number, steps, phase)
        if host := PATTERNS["host_memory"].search(text):
            self._host = (float(host["host_percent"]), _Shown(line.number, steps, host[0]))
        if _TRAINED.search(text):
            self._trained_at = steps

    def _doing(self, steps: int) -> str:
        phase = self._phase.evidence if self._phase.steps == steps else ""
        doing = f"while {phase or ('training' if steps else 'setting up')}"
        return doing + (f", last seen: {self._host[1].evidence}" if self._host else "")

    def _had_room(self, steps: int) -> bool:
        """Return whether the log says that the host's memory was far from full."""
        if self._host is None or self._phase.line > self._host[1].line:
            return False  # saving and loading take more
        return self._host[0] < (_ROOM_PERCENT if steps else _ROOM_AT_SETUP_PERCENT)

    def illnesses(self, steps: int) -> list[Illness]:
        """Name what ended the run, causes alone, and the illnesses that it went on with.

        Args:
            steps: How many there were in all; an error that some followed ended nothing.
        """
        found = {}
        for name, every in self._shown.items():
            shown = _not_survived(every, steps, known()[name])
            if (backed_by := known()[name].backed_by) and not self.has(backed_by):
                shown = [one for one in shown if one.is_error]
            if len(shown) >= known()[name].fewest:
                found[name] = _first(name, shown)
        memory = [pair for pair in self._memory if steps - pair[1].steps < GOES_ON_STEPS]
        if memory:
            # Ranks whose tracebacks mix may seem to have failed in several places.
            votes = Counter(name for name, _ in memory if name != _DEVICE)
            name = votes.most_common(1)[0][0] if votes else _DEVICE
            first = next(shown for one, shown in memory if one == name)
            found[name] = _first(name, [first] * len(memory))
        if self._trained_at == steps:  # ranks that end one after the other lose each other
            found = {name: one for name, one in found.items() if one.kind.follows != "always"}
        told = _causes(found)
        end = self._end(steps)
        ended = [illness for illness in told if illness.kind.ends_run]
        if end is None or not all(_is_told_by(end, illness) for illness in ended):
            return told
        return [*(illness for illness in told if illness not in ended), end]

    def _end(self, steps: int) -> Illness | None:
        """Judge the run by the first code that a process ended with; its own, not a launcher's."""
        exits = [pair for pair in self._exits if steps - pair[1].steps < GOES_ON_STEPS]
        has_trained = self._trained_at == steps
        own = [pair for pair in exits if pair[0] not in known()[_STOPPED].exit_codes]
        if not exits:
            is_weak = self._weak and steps - self._weak[0].steps < GOES_ON_STEPS
            return _first(UNKNOWN, self._weak) if is_weak and not has_trained else None
        code, shown = (own or exits)[0]
        name = next((n for n, kind in known().items() if code in kind.exit_codes), UNKNOWN)
        evidence = shown.evidence
        if name == _HOST and self._had_room(shown.steps) and self._host:
            name = _STOPPED
            evidence += f", with room in the host's memory: {self._host[1].evidence}"
        elif name == _HOST:
            evidence += f" ({self._doing(shown.steps)})"
        elif code in (-signal.SIGABRT, -signal.SIGSEGV) and has_trained:
            name, evidence = _AT_EXIT, f"{evidence}, after training had ended"
        return Illness(name, shown.line, evidence)


def _exit_code(found: re.Match[str]) -> int:
    """The code that a process ended with: a signal is negative; 0 where it says nothing."""
    if said := found["shell"] or found["slurm"] or found["bare"]:
        return -_SIGNAL_WORDS[said]
    if number := found["signal"] or found["torchrun"]:
        return -int(number)
    code = int(found["code"] or found["status"])
    is_signal = _SHELL_CODES < code < _SHELL_CODES + signal.NSIG
    return _SHELL_CODES - code if is_signal else code if found["code"] else 0


def _first(name: str, shown: list[_Shown]) -> Illness:
    counted = len(shown) > 1 and name not in (UNKNOWN, _HOST)
    more = f" ({len(shown)} such lines)" if counted else ""
    return Illness(name, shown[0].line, f"{shown[0].evidence}{more}")


def _not_survived(every: list[_Shown], steps: int, kind: Kind) -> list[_Shown]:
    last = steps - GOES_ON_STEPS if kind.ends_run else -1
    return [shown for shown in every if shown.steps > last]


def _is_told_by(end: Illness, illness: Illness) -> bool:
    """Return whether an exit code tells more than an error that may come of another one."""
    tells = not end.kind.follows and end.name not in (UNKNOWN, _AT_EXIT)
    return tells and bool(illness.kind.follows) and illness.name != _STOPPED


def _causes(found: dict[str, Illness]) -> list[Illness]:
    """Leave out what follows from something else."""
    ends = {name: illness for name, illness in found.items() if illness.kind.ends_run}
    causes = {name for name, one in ends.items() if not one.kind.follows and name != UNKNOWN}
    if not causes:
        likely = [illness for illness in ends.values() if illness.kind.follows != "always"]
        causes = {min(likely or ends.values(), key=lambda one: one.line).name} if ends else set()
    return [illness for name, illness in found.items() if name not in ends or name in causes]


def _allocated(names: Iterable[str]) -> str:
    """Name what was allocated: saving and loading by any frame, the rest by the innermost one."""
    sorts = {name: kind for name, kind in known().items() if kind.frames}
    inwards = list(names)
    for name, kind in sorts.items():
        if kind.any_frame and any(re.fullmatch(kind.frames, frame) for frame in inwards):
            return name
    for frame in reversed(inwards):
        for name, kind in sorts.items():
            innermost = not kind.any_frame and frame not in _NOT_INNER
            if innermost and re.fullmatch(kind.frames, frame.lower()):
                return name
    return _DEVICE
