"""How many threads step a tile."""

import pytest

from deep_optimizer_states.core.kernels.host import LEAST_PER_THREAD, TeamSizes

MS = 1e-3
SMALL, LARGE = 8 * LEAST_PER_THREAD, 2**27


@pytest.mark.parametrize(
    ("numel", "num_threads", "team"),
    [
        (4096, 16, 1),
        (2 * LEAST_PER_THREAD - 1, 2, 1),
        (2 * LEAST_PER_THREAD, 2, 2),
        (2 * LEAST_PER_THREAD, 16, 2),
        (15 * LEAST_PER_THREAD, 16, 8),
        (LARGE, 16, 16),
        (LARGE, 7, 7),
        (3 * LEAST_PER_THREAD, 6, 3),
        (LARGE, 1, 1),
        (0, 4, 1),
    ],
)
def test_every_thread_of_a_team_has_enough_to_do(numel, num_threads, team):
    assert TeamSizes().choose(numel, num_threads) == team


def test_a_team_that_waits_longer_than_it_gains_is_halved():
    teams = TeamSizes()
    for _ in range(8):
        teams.learn(8, 5 * MS)
    assert teams.choose(SMALL, 8) == 4
    assert teams.choose(LARGE, 8) == 8  # 17 ms gained
    for _ in range(8):
        teams.learn(4, 5 * MS)
        teams.learn(2, 5 * MS)
    assert teams.choose(SMALL, 8) == 1


def test_one_interrupt_does_not_end_a_large_tiles_team():
    teams = TeamSizes()
    teams.learn(2, 100 * MS)
    assert teams.choose(LARGE, 2) == 2  # 67 ms gained


def test_teams_come_back_when_the_cores_are_free_again():
    teams, used = TeamSizes(), []
    for tile in range(1000):
        used.append(teams.choose(SMALL, 2))
        is_busy = tile < 400
        teams.learn(used[-1], 10 * MS if is_busy and used[-1] == 2 else 0.0)
    assert 1 <= used[:400].count(2) <= 10  # tried now and then, at 10 ms each
    assert set(used[600:]) == {2}


def test_two_sizes_are_judged_apart():
    teams = TeamSizes()
    for _ in range(8):
        teams.learn(4, 10 * MS)
    assert [teams.choose(SMALL, most) for most in (2, 4)] == [2, 2]
