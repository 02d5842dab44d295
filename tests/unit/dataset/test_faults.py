"""A call that fails anywhere in `prepare`: started again it ends with the same bytes."""

import json

import pytest
from faults import MARK, Watch, draw, points_of

from configs.files import ROOT
from dataset import prepare, readers
from dataset.files import DatasetError
from dataset.tokenizer import Choice

ERRORS = ("MemoryError", "OSError", "RuntimeError", "KeyboardInterrupt")


@pytest.fixture
def play(tmp_path, monkeypatch):
    """``play(FOLDER, POINT)`` -> the watch, and the lines or the error that came of it."""
    one_process = lambda work, items, workers: (work(i) for i in items)  # noqa: E731
    monkeypatch.setattr(prepare, "ordered", one_process)
    text = tmp_path / "x.jsonl"
    rows = [json.dumps({"text": f"the cat number {n} sat on the mat"}) for n in range(20)]
    text.write_text("\n".join(rows))

    def run(folder, point=None):
        lines = []
        reading = readers.Reading(readers.find([str(text)]), ("text",), block_bytes=300)
        job = prepare.Preparation(
            reading, folder / "out", Choice("train-bpe", vocab_size=262), True
        )
        with Watch(ROOT / "dataset", lambda name: "main", point) as watch:
            try:
                prepare.run(job, lines.append)
            except BaseException as error:  # noqa: BLE001 - whatever comes of it
                lines = error
        return watch, lines

    return run


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# Of a file that was just opened when Ctrl-C came nobody but the garbage collector knows.
@pytest.mark.own_process
@pytest.mark.parametrize("number", [15, pytest.param(None, marks=pytest.mark.exhaustive)])
def test_a_data_set_that_was_cut_short_is_the_same_once_it_is_made(play, tmp_path, number):
    play(tmp_path / "first")
    reference = contents(tmp_path / "first")
    (tmp_path / "survey").mkdir()
    watch, lines = play(tmp_path / "survey")
    assert isinstance(lines, list), lines
    points = points_of(watch.counts, ERRORS)
    wrong = []
    for at, point in enumerate(draw(points, number or len(points))):
        folder = tmp_path / str(at)
        watch, told = play(folder, point)
        if not watch.is_fired:
            continue
        is_told = MARK in f"{told!r} {getattr(told, '__cause__', '')!r}"
        _, again = play(folder)
        found = contents(folder)
        if isinstance(again, DatasetError):
            wrong.append((str(point), "says", str(again)))  # it says what to do
        elif isinstance(again, BaseException):
            wrong.append((str(point), "stuck", repr(again)))
        elif found != reference:
            differs = {name for name in found | reference if found.get(name) != reference.get(name)}
            wrong.append((str(point), "other bytes", differs))
        elif isinstance(told, list) and not is_told:
            wrong.append((str(point), "silent", told))
    assert wrong == []
