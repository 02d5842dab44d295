"""Tells who printed a line: the prefixes that launchers and collectors put before a program's own.

A run on several machines or ranks is read like one on a single rank, since :func:`split_prefix` is
applied once to every line, before any rule. Standard library alone.
"""

from __future__ import annotations

import re

_DATE = r"\d{4}-\d\d-\d\d"
_TIME = r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
_NO_HOST = (
    r"(?!(?i:step|iter|epoch|batch|loss|lr|bf|fp|tf|int|layer|stage|beta|python|gcc)[a-z]*-?\d)"
    r"(?!cc1)"
    r"(?![\w.]*(?:Error|Exception|Warning|Failure|Exit|Interrupt|Timeout|\.py|\.so[\d.]*): )"
)
"""Settings, compilers and classes of errors may look like a host's name."""
_NUMBERED = rf"{_NO_HOST}(?=[\w.-]*\d)[A-Za-z][A-Za-z0-9.-]*[A-Za-z0-9]"
_HOST = rf"(?:localhost|\d{{1,3}}(?:\.\d{{1,3}}){{3}}|{_NUMBERED})"
_OWN_WORDS = (
    r"\[20\d\d-|Traceback \(most|  File \"|\[rank\d+\]: ?|"
    r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)\b"
)
"""What a program says of itself tells that a plain word before it is a host."""
_COMPOSE, _RAY = r"[a-z][\w.-]*[-_]\d+ +\|", r"\([\w:.<> ()-]*\bpid=\d+[^()]*\)"
"""docker compose's and Ray's; where they were coloured, a space stands for each colour."""
_PREFIX = re.compile(
    "|".join(
        (
            # Collectors' time stamps; a logger's own, with a space, stays where no host follows.
            rf"(?P<time>\[?{_DATE}T{_TIME}\]? |{_DATE} {_TIME} (?={_HOST}:? ))"
            rf"(?:{_HOST} (?:[\w./-]+\[\d+\]: )?)?",
            r"(?P<syslog>[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d )[\w.-]+ [\w./-]+(?:\[\d+\])?: ",
            r"\[rank\d+\]: ?",  # torch, before a traceback
            r"\[[a-z][a-z_-]*\d+\]:",  # torchrun --tee: a role and a local rank
            r"\[\d+\]: ",
            r"\[\d+,\d+\]<std(?:out|err|diag)>:",  # mpirun --tag-output
            r"\[[\w.-]+@\d+,\d+\]<std(?:out|err|diag)>: ",  # the same of Open MPI 5
            r" {0,4}\d{1,5}: ",  # srun --label
            rf"{_HOST}: ",  # pdsh
            rf"{_NO_HOST}[a-z][a-z0-9.-]*: (?={_OWN_WORDS})",
            rf"{_COMPOSE} | {_COMPOSE}  ?",
            r"\[pod/[^\]\s]+\] ",  # kubectl --prefix
            rf"{_RAY} | {_RAY}  ?",
        )
    )
)
_DEEPEST = 4
"""Prefixes before one line: a collector's, a host's, a role's and a rank's."""


def split_prefix(text: str) -> tuple[str, str]:
    """Split a line into who printed it and what the program printed.

    Args:
        text: A line of a log, without colours.

    Returns:
        The prefixes of hosts and ranks, without time stamps, so that they are the same on each of
        a rank's lines; and the text behind them, with its own indentation. The first is empty where
        the line has none.
    """
    source = ""
    for _ in range(_DEEPEST):
        found = _PREFIX.match(text)
        if not found:
            break
        stamp = found["time"] or found["syslog"] or ""
        source, text = source + found[0][len(stamp) :], text[found.end() :]
    return source, text
