"""How many OpenMP threads a tile is worth on a machine whose cores others may be using."""

from __future__ import annotations

LEAST_PER_THREAD = 2**16
"""Elements, as many as the kernel deals out at a time. One thread steps them in about 70 us;
forming and ending a team takes a few."""
_SECONDS_PER_ELEMENT = 1e-9
"""One thread: 28 bytes of memory traffic at about 28 GB/s. Only the magnitude matters."""
_NEWEST = 0.25
"""Weight of the newest wait in the average, so that a single interrupt changes little."""
_FADING = 0.98
"""Factor by which a wait is forgotten with every tile that a team of another size steps."""


class TeamSizes:
    """Chooses the team for each tile from how long teams of each size have waited for a member.

    A team is done when its last member is. A member whose core runs something else comes back after
    a turn of the scheduler, which is milliseconds, and everyone waits. A large tile gains more than
    that by a team even so, a small one does not. Sizes that lose are tried again now and then,
    because their wait fades: when the cores are free again, the team is back.
    """

    def __init__(self) -> None:
        self._wait_s: dict[int, float] = {}

    def choose(self, numel: int, num_threads: int) -> int:
        """Halve ``num_threads`` until the tile is large enough for the team.

        Args:
            numel: Elements of the tile.
            num_threads: Threads at most.

        Returns:
            Threads, from 1 to ``num_threads``.
        """
        team = num_threads
        while team > 1:
            # Half the team would take twice as long, and so longer by this.
            gained_s = numel * _SECONDS_PER_ELEMENT / team
            if numel >= team * LEAST_PER_THREAD and gained_s >= self._wait_s.get(team, 0.0):
                break
            team //= 2
        return team

    def learn(self, team: int, wait_s: float) -> None:
        """Note how long a team's first thread waited for the others after its own last element."""
        for size, average in self._wait_s.items():
            self._wait_s[size] = average * _FADING if size != team else average
        average = self._wait_s.get(team, 0.0)
        self._wait_s[team] = average + _NEWEST * (wait_s - average)
