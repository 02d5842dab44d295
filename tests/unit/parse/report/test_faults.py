"""A call that fails anywhere in the report: what is there is the old one or the new one, whole."""

import pytest
from faults import MARK, Watch, draw, points_of
from programs import report

from configs.files import ROOT

ERRORS = ("MemoryError", "OSError", "RuntimeError", "KeyboardInterrupt")


def contents(folder):
    """What the report's program writes; its own tables are checked with it."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def play(sweep_writer):
    folder = sweep_writer.write_runs([("stock", 0, {}), ("stride", 2, {})])

    def run(point=None):
        with Watch(ROOT / "parse", lambda name: "main", point) as watch:
            try:
                told = report([str(folder)])
            except BaseException as error:  # noqa: BLE001 - whatever comes of it
                told = error
        return watch, told

    run.folder = folder
    return run


@pytest.mark.own_process  # files that nobody has closed are no matter of the next test
@pytest.mark.parametrize("number", [6, pytest.param(None, marks=pytest.mark.exhaustive)])
def test_a_report_that_was_cut_short_is_old_or_new_and_is_made_again(play, capfd, number):
    before = contents(play.folder)
    watch, told = play()
    assert told == 0
    after, wrong = contents(play.folder), []
    written = after.keys() - before.keys()
    assert any(name.startswith("report") for name in written)
    points = points_of(watch.counts, ERRORS)
    for point in draw(points, number or len(points)):
        for name in written:
            (play.folder / name).unlink(missing_ok=True)
        capfd.readouterr()
        watch, told = play(point)
        if not watch.is_fired:
            continue
        found, output = contents(play.folder), "".join(capfd.readouterr())
        cut = {name for name in found if found[name] != after.get(name)}
        if cut:
            wrong.append((str(point), "not whole", cut))
        if not isinstance(told, BaseException) and MARK not in output and told == 0:
            wrong.append((str(point), "silent", output[-300:]))
        _, again = play()
        if again != 0 or contents(play.folder) != after:
            wrong.append((str(point), "stuck", again))
    assert wrong == []
