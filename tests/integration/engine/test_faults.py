"""Any call of ours may fail, at any time, in any thread: nothing wrong is saved or trained on.

What must hold is in ``fault_user.py``, how a call is made to fail in ``tests/support/faults.py``.
"""

import json
import re
from pathlib import Path

import pytest
from ranks import run_ranks

WORKER = Path(__file__).with_name("fault_worker.py")
USER = WORKER.with_name("fault_user.py").read_text()
SCENARIOS = re.findall(r'^    "(stage .*)": Scenario', USER, re.MULTILINE)
SAMPLE = {"stage 3, early work": 14, "stage 3, two ranks": 3, "stage 2, state on the device": 7}
"""Points of `make test`, each of another place."""
BY_DESIGN = {
    r"^OSError at core/host.py:(read_cpu_list|cpu_facts|usable_cores|_read_text)": "the system "
    "does not say; the announcement names the cores that were taken, and free memory is that of "
    "the rest",
    r"^OSError at core/commit.py:_lock, before flock": "the lock is tried again",
    r"^OSError at core/commit.py:read_latest": "there is no file of that name yet",
    r"^OSError at core/commit.py:Record.forget, before close": "the process that has it "
    "open ends, or holds no lock by it any more",
    r"^OSError at core/checkpoint.py:_open_direct": "where this way past the page cache is not to "
    "be had, the file is written by the ordinary way",
    r"^OSError at adapter/checkpoint.py:_TakesFiles.makedirs, its entry": "DeepSpeed catches it "
    "and says in words of its own that the checkpoint failed",
    r" at core/checkpoint.py:BackgroundSave._keep_copy, before clone": "what there is no memory to "
    "copy is written first instead",
    r" at adapter/hooks.py:_configure_zero_optimizer, before setattr": "a name that a module has "
    "is set anew without memory, so that no error is possible there",
    r"^KeyboardInterrupt at adapter/hooks.py:_configure_zero_optimizer, after setattr": "an engine "
    "that is whole and that nobody gets has idle threads until the process ends",
}
"""Errors that nobody need be told of, or that cannot happen, and why."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture
def play(tmp_path):
    """``play(REQUEST)`` -> what became of each point of each scenario."""

    def run(request, **variables):
        paths = [tmp_path / name for name in ("request", "answer", "work")]
        paths[0].write_text(json.dumps(request))
        run_ranks(WORKER, *paths, **variables)
        return json.loads(paths[1].read_text())

    return run


def wrong_of(answer):
    """Return what does not hold, and how many points were passed."""
    wrong, passed = [], 0
    for name, played in answer.items():
        for word, more, point in played["outcomes"]:
            passed += word != "not reached"
            is_right = word in ("ok", "new engine", "not reached")
            meant = word in ("silent", "left") and any(re.search(it, point) for it in BY_DESIGN)
            if not is_right and not meant:
                wrong.append(f"{name}: {word}: {point}: {more}")
    return wrong, passed


def test_nothing_wrong_comes_of_a_call_that_fails(play):
    answer = play({name: {"points": number} for name, number in SAMPLE.items()})
    wrong, passed = wrong_of(answer)
    assert wrong == []
    assert passed > sum(SAMPLE.values()) // 2


@pytest.mark.exhaustive
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_wrong_comes_of_a_call_that_fails_at_any_place(play, name):
    wrong, passed = wrong_of(play({name: {"points": "each place"}}))
    assert wrong == []
    assert passed > 500


@pytest.mark.parametrize(
    ("control", "only", "words"),
    [
        # The lane's thread ends, and nobody looks whether it lives.
        pytest.param("no boundary", "^MemoryError at .*_ThreadEvent.reach, its entry", {"hang"},
                     marks=pytest.mark.exhaustive),
        ("a lane's failure is swallowed", "^MemoryError at .*cache.py:copy_all, its entry",
         {"silent", "other bits", "not whole"}),
        ("a half step is gone on from", "^MemoryError at .*GradientFlush.stepped, its entry",
         {"other bits", "not whole"}),
    ],
)  # fmt: skip
def test_what_this_is_for_is_seen(play, control, only, words):
    """Negative controls: one thing is broken in the engine."""
    request = {"stage 3, blocking saves": {"points": 1, "only": only, "control": control}}
    ((_, played),) = play(request, FAULTS_DEADLINE_S="60").items()
    found = [word for word, _, point in played["outcomes"]]
    assert set(found) & words, played
