"""What single lines say: timers, and iteration lines, whole or damaged. Standard library alone."""

from __future__ import annotations

from typing import NamedTuple

from parse.log.fields import (
    ANY_TIMER,
    INTERVAL_NAME,
    ITERATION_HEAD,
    ITERATION_LINE,
    ITERATION_START,
    LABELLED,
    MICRO,
    MOE_DETAIL,
    OTHER_LABELS,
    PHASE_LINE,
    TIMERS_HEAD,
    VALUE_END,
)
from parse.log.window import Reading


class PhaseValues(NamedTuple):
    """Timers of one line, in ms."""

    main: dict[str, float]
    """Of the iteration."""
    micro: dict[str, float]
    """Of one micro-batch."""
    damaged: bool
    """Whether the line holds more than can be read."""


def split_line(text: str) -> tuple[str, str, str]:
    """What stands before an iteration line, itself, and what stands behind it in the same line.

    Lines are run together where the byte between them was lost.
    """
    head = ITERATION_HEAD.search(text)
    if not head:
        return "", text, ""
    start = head.start()
    behind = text.find(TIMERS_HEAD, start)
    end = text.rfind("|", start, behind if behind >= 0 else len(text)) + 1
    if end <= start or ITERATION_HEAD.search(text, end):
        end = len(text)
    tail = text[end:]
    if ":" in tail and "[" not in tail:  # a last field that no bar ends
        return text[:start], text[start:], ""
    return text[:start], text[start:end], tail


def phase_values(text: str) -> list[PhaseValues]:
    """Timers of one line, or of several that are run together."""
    return [_phase_piece(piece) for piece in text.split(TIMERS_HEAD)[1:]]


def _phase_piece(piece: str) -> PhaseValues:
    main: dict[str, float] = {}
    micro: dict[str, float] = {}
    damaged = False
    for part in piece.split("|"):
        label, colon, value = part.partition(":")
        name = label.strip()
        if not colon and name:
            # A bar within a label, or a label without its value: what the others are is unsure.
            return PhaseValues({}, {}, True)
        known = PHASE_LINE.get(name.removesuffix(MICRO))
        if known is None:
            damaged = damaged or _nearly_phase(name)
            continue
        value = value.strip()
        if not value.replace(".", "", 1).isdecimal():
            value = MOE_DETAIL.sub("", VALUE_END.sub("", value)).strip()
        if not known.value.fullmatch(value):
            damaged = True
        elif name.endswith(MICRO):
            micro[known.name] = float(value)
        else:
            main[known.name] = float(value)
    return PhaseValues(main, micro, damaged)


def iteration_readings(number: int, text: str, cut: bool) -> list[Reading]:
    """One iteration line, or several that are run together.

    Args:
        number: Position of the line in the log.
        text: The line.
        cut: Whether the file ends in it.
    """
    groups: list[Reading] = []
    parts = text.split("|")
    for index, part in enumerate(parts):
        start, ended = ITERATION_START.search(part), index + 1 < len(parts)
        if start and ended:
            values = {key: value for key, value in start.groupdict().items() if value}
            groups.append(Reading(number, text, values, []))
            continue
        label = LABELLED.match(part)
        if label and (ended or not cut):
            if not groups:
                groups.append(Reading(number, text, {}, []))
            _take(groups[-1], label[1].strip(), label[2], ended)
        elif groups and ended:
            groups[-1].bare_parts += 1
    return [group for group in groups if not ITERATION_LINE.keys().isdisjoint(group.labels)]


def _take(reading: Reading, label: str, value: str, ended: bool) -> None:
    """Add one labelled value to what an iteration line says."""
    known = ITERATION_LINE.get(label)
    if not ended:
        if known and known.value.fullmatch(value):
            reading.last_field = (label, known.name, value.partition(" ")[0])
        return
    reading.twice = reading.twice or label in reading.labels
    reading.labels.append(label)
    if known is None:
        reading.odd_labels += label not in OTHER_LABELS
        if ":" in value:  # two fields, run together where the bar between them was
            reading.unreadable.append(label)
    elif known.value.fullmatch(value):
        reading.values[known.name] = value.partition(" ")[0]
    else:
        reading.unreadable.append(known.name)


def has_lost_timer(text: str) -> bool:
    """Whether a line, its interval timers taken out, still holds what was one."""
    return any(_nearly_interval(match[1]) for match in ANY_TIMER.finditer(text))


def _nearly_interval(name: str | None) -> bool:
    """Whether the name of a timer is ``interval-time``, or was before a byte or two changed."""
    if name is None:
        return True
    return len(name) == len(INTERVAL_NAME) and _differences(name, INTERVAL_NAME) <= 2


def _nearly_phase(name: str) -> bool:
    base = name.rpartition(" ")[2]
    names = (*PHASE_LINE, *(label + MICRO for label in PHASE_LINE))
    return any(len(base) == len(n) and 0 < _differences(base, n) <= 1 + (len(n) > 4) for n in names)


def _differences(a: str, b: str) -> int:
    return sum(x != y for x, y in zip(a, b, strict=True))
