"""What was measured so far, what could not be and why, and the profile that says both."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deep_optimizer_states.calibrate.watch import Say, Steps
from deep_optimizer_states.predict.machine import CURVE_NAMES, RATE_NAMES, machine_from_table

_HEAD = """\
# Rates of this machine, read by `python -m deep_optimizer_states plan --machine FILE`.
# Each is a median; those of the host are of one process by its threads: [[threads, rate], ...].
"""


@dataclass
class Findings:
    """Rates by their names in the profile.

    Attributes:
        say: Gets a line of progress.
        steps: Says which measurement runs.
        rates: What was measured: a number, or for the host ``[(threads, rate), ...]``.
        missing: Why a rate was not measured.
        notes: A remark on a rate.
    """

    say: Say
    steps: Steps
    rates: dict[str, Any] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)

    def attempt(
        self, what: str, names: Sequence[str], work: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Take the rates that ``work`` measures; what it cannot measure is noted as missing."""
        try:
            with self.steps.step(what):
                found = work()
        except Exception as error:  # noqa: BLE001 - one rate must not cost the others
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self.lack(f"  {what}", names, reason)
            return
        self.rates |= found
        for name in names:
            if name in found:
                self.say(f"  {name}: {_shown(found[name])}")

    def lack(self, what: str, names: Sequence[str], reason: str) -> None:
        """Note, and say, why rates are not measured."""
        self.missing |= dict.fromkeys(names, reason)
        self.say(f"{what}: not measured: {reason}")


def profile_text(fields: Mapping[str, Any], found: Findings) -> str:
    """The profile as TOML, checked as a reader of it will.

    Args:
        fields: Name, source and sizes of the machine; those that are None are left out.
        found: Its rates.

    Raises:
        MachineError: The reader would refuse it.
    """
    lines = [_HEAD + "\n".join(_line(k, v) for k, v in fields.items() if v is not None)]
    lines += ["", "[rates]"]
    for name in RATE_NAMES:
        if name in found.rates:
            note = f"  # {found.notes[name]}" if name in found.notes else ""
            lines.append(_line(name, found.rates[name]) + note)
        elif name in found.missing:
            lines.append(f"# {name}: not measured: {' '.join(found.missing[name].split())}")
    text = "\n".join(lines) + "\n"
    machine_from_table(tomllib.loads(text), source="the profile")
    return text


def _line(name: str, value: object) -> str:
    return f"{name} = {_value(name, value)}"


def _value(name: str, value: Any) -> str:  # noqa: ANN401 - a number, text, or pairs
    if name in CURVE_NAMES:
        return "[" + ", ".join(f"[{threads}, {rate:.4g}]" for threads, rate in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _shown(value: Any) -> str:  # noqa: ANN401 - see _value
    if isinstance(value, float):
        return f"{value / 1e9:.3g} G/s"
    return ", ".join(f"{rate / 1e9:.3g} G/s with {threads}" for threads, rate in value)
