"""Illnesses that single lines show, and ends of a run that nothing here explains."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

from parse.diagnose.illness import Illness, known, quoted
from parse.diagnose.watcher import Run, Watcher
from parse.log.lines import Line

_COMPILED = re.compile(
    r"(?:-MF|--dependency-output) (\S+)\.o\.d .*-DTORCH_EXTENSION_NAME=(\w+?)(?:_v\d+)?(?=\s)"
)
"""A C++ or CUDA file of an op; torch numbers the builds of one op by a version."""
_ERROR = re.compile(
    r"^(?:\[?[\w-]*\d\]?:\s*)*((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Failure))(?::\s*(.*))?$"
)
_RETURN_CODE = re.compile(r"exits with return code = (-?\d+)|\bexitcode\s*: (-?\d+)")
_TRAINED = re.compile(
    r"\[after training (?:ends|is done)\]|'train_runtime': |`Trainer\.fit` stopped"
)
_TRACEBACK = "Traceback (most recent call last)"
_OWN = "host-memory"
"""Told by a watcher that knows more of it."""


class SignWatcher(Watcher):
    """Counts lines that match the signs of ``illnesses.toml``."""

    words = (
        "TORCH_EXTENSION_NAME",
        *(word for name, kind in known().items() if name != _OWN for word in kind.words),
    )

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        kinds = {name: kind for name, kind in known().items() if kind.signs and name != _OWN}
        self._kinds = kinds
        # One search for all of them; which one it is, only for a line that has any.
        self._any = re.compile(
            "|".join(f"(?:{s.pattern})" for k in kinds.values() for s in k.signs)
        )
        self._counts = dict.fromkeys(kinds, 0)
        self._first: dict[str, Illness] = {}
        self._built: dict[tuple[str, str], int] = {}

    def feed(self, line: Line) -> None:
        """Look for signs, and for ops that are compiled."""
        text = line.text
        if "TORCH_EXTENSION_NAME" in text and (built := _COMPILED.search(text)):
            self._build(line, (built[1], built[2]))
        if not (found := self._any.search(text)):
            return
        for name, kind in self._kinds.items():
            if any(sign.search(text) for sign in kind.signs):
                self._note(name, line.number, quoted(text, found))

    def _build(self, line: Line, source: tuple[str, str]) -> None:
        """The same file compiled a second time within one log."""
        first = self._built.setdefault(source, line.number)
        if first != line.number:
            text = f"{source[1]}: {source[0]} is compiled again, after line {first}"
            self._note("ops-recompile", line.number, quoted(text))

    def _note(self, name: str, number: int, text: str) -> None:
        self._counts[name] += 1
        self.run.note(name)
        self._first.setdefault(name, Illness(name, number, text))

    def illnesses(self) -> Iterator[Illness]:
        """Those with enough lines; of those that end a run, where it did end."""
        for name, illness in self._first.items():
            kind, count = self._kinds[name], self._counts[name]
            if count < kind.fewest or (kind.ends_run and self.run.went_on(name)):
                continue
            more = f" ({count} such lines)" if count > 1 else ""
            yield Illness(name, illness.line, f"{illness.evidence}{more}")


class FailureWatcher(Watcher):
    """Python errors and exit codes; told where no other illness explains the end."""

    words = (
        *(_TRACEBACK, "Error", "Exception", "Failure", "return code", "exitcode"),
        *("after training", "'train_runtime'", "`Trainer.fit`"),
    )

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._error: Illness | None = None
        self._code: Illness | None = None
        self._in_traceback = False
        self._trained_at = -1

    def feed(self, line: Line) -> None:
        """Keep the first error that a traceback ends with since training last went on."""
        text = line.text
        if _TRACEBACK in text:
            self._in_traceback = True
        elif self._in_traceback and (error := _ERROR.match(text.rstrip())):
            self._in_traceback = False
            if self._error is None or self.run.went_on("unknown-failure"):
                message = quoted(f"{error[1]}: {error[2]}" if error[2] else error[1])
                self._error = Illness("unknown-failure", line.number, message)
                self.run.note("unknown-failure")
        elif (code := _RETURN_CODE.search(text)) and int(code[1] or code[2]) != 0:
            self._code = self._code or self._ended(line, int(code[1] or code[2]), code[0])
        elif _TRAINED.search(text):
            self._trained_at = self.run.num_steps

    def _ended(self, line: Line, code: int, text: str) -> Illness:
        """An end by an exit code or, where it is negative, by a signal."""
        signals = {one.value: one.name for one in signal.Signals}
        if code < 0:
            text += f" ({signals.get(-code, 'a signal')})"
        if code == -signal.SIGABRT and self._trained_at == self.run.num_steps:
            return Illness("abort-at-exit", line.number, f"{text}, after training had ended")
        return Illness("unknown-failure", line.number, text)

    def illnesses(self) -> Iterator[Illness]:
        """The error, or else the exit code."""
        if self._error is not None and not self.run.went_on("unknown-failure"):
            yield self._error
        elif self._code is not None:
            yield self._code
