"""Tables of rows, each of which is played or checked by itself."""

import dataclasses
import functools
import os
import re
import sys
import time
import traceback
from pathlib import Path

from engines import NUM_RANKS, POLICIES, differences, play

TWO_POLICIES = {name: POLICIES[name] for name in ("stride 2", "dynamic")}


@dataclasses.dataclass(frozen=True)
class Row:
    """An act or a check, and the numbers of ranks that it is run on."""

    act: callable
    ranks: tuple
    policies: dict


class Rows:
    """The rows of a group; a row without policies is a check, which asserts what it finds.

    With ``ROWS_ONLY`` set to a regular expression, rows alone whose name it finds are run.
    """

    def __init__(self, policies=TWO_POLICIES):
        self.policies, self.rows = policies, {}

    def compare(self, name, /, *ranks, **given):
        """Decorate an act that sees the same under stock and under each policy."""
        return self._adder(name, ranks, self.policies, given)

    def check(self, name, /, *ranks, **given):
        """Decorate a function of an empty folder that asserts."""
        return self._adder(name, ranks, {}, given)

    def _adder(self, name, ranks, policies, given):
        def add(act):
            assert name not in self.rows, name
            bound = functools.partial(act, **given) if given else act
            self.rows[name] = Row(bound, ranks or (1,), policies)
            return act

        return add

    def run(self, report, extent, folder):
        """Keep in ``report`` what is wrong with each row.

        The extent ``few`` runs a row by one policy, ``alone`` leaves out those of several numbers
        of ranks as well, and ``all`` runs all.
        """
        for number, (name, row) in enumerate(self.rows.items()):
            wanted = re.search(os.environ.get("ROWS_ONLY", ""), name)
            is_seen_by_more = extent == "alone" and row.ranks != (NUM_RANKS,)
            if NUM_RANKS not in row.ranks or is_seen_by_more or not wanted:
                continue
            begin = time.perf_counter()
            if row.policies:
                policies = by_turns(row.policies, number, extent)
                found = {f"{name} | {key}": it for key, it in compare(row.act, policies).items()}
            else:
                found = {name: check(row.act, folder / f"row{number}")}
            report.update(found)
            print(f"{time.perf_counter() - begin:5.2f} s  {name}", file=sys.stderr)


def by_turns(policies, number, extent):
    """Return all policies, or if not all is run the one whose turn it is."""
    name = [*policies][number % len(policies)]
    return policies if extent == "all" else {name: policies[name]}


@functools.cache
def stock_of(act):
    """An act under stock, of which a negative control may ask again."""
    return play(act, None)


def compare(act, policies):
    """Return what differs from stock under each policy, or the error that stopped the act."""
    try:
        stock = stock_of(act)
    except Exception as error:  # noqa: BLE001 - the other rows are to run as well
        told = tell(error)
        return {name: [f"stock itself: {told}"] for name in policies}
    found = {}
    for name, block in policies.items():
        try:
            found[name] = differences(play(act, block), stock)
        except Exception as error:  # noqa: BLE001 - the same
            found[name] = [tell(error)]
    return found


def check(act, folder):
    folder.mkdir(parents=True, exist_ok=True)
    try:
        act(folder)
    except Exception as error:  # noqa: BLE001 - the other rows are to run as well
        return [tell(error)]
    return []


def tell(error):
    """The error, the lines that led to it, and what the last function of these files knew."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [frame for frame in frames if Path(frame.f_code.co_filename).parent == HERE]
    known = own[-1].f_locals if own else {}
    plain = {name: it for name, it in known.items() if isinstance(it, (str, int, list, tuple))}
    lines = "".join(traceback.format_exception(error))[-3000:]
    return f"{lines}\n{ {name: repr(it)[:200] for name, it in plain.items()} }"


HERE = Path(__file__).parent
