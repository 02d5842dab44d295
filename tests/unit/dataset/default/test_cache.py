import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dataset import manifest
from dataset.default import cache
from dataset.errors import DatasetError
from dataset.manifest import Manifest

KEY = "k" * 64


def fill_with(text="data", key=KEY):
    def fill(work: Path) -> Manifest:
        (work / "x.bin").write_text(text)
        return Manifest(
            schema_version=manifest.SCHEMA_VERSION,
            key=key,
            prefix="x",
            documents=1,
            tokens=2,
            text_bytes=3,
            vocab_size=300,
            eod=0,
            tokenizer="tokenizer.json",
            settings={},
            versions={},
            files={"x.bin": manifest.file_facts(work / "x.bin")},
        )

    return fill


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "x-kkkk"


def test_a_built_folder_is_found_and_nothing_else_is_left(folder):
    made = cache.build(folder, KEY, fill_with())
    assert cache.look_up(folder, KEY) == (made, None)
    assert list(folder.parent.iterdir()) == [folder]


def test_a_folder_that_is_not_there_is_no_damage(folder):
    assert cache.look_up(folder, KEY) == (None, None)


def test_nothing_is_published_before_everything_is_written(folder):
    def fill(work):
        assert not folder.exists()
        return fill_with()(work)

    cache.build(folder, KEY, fill)


def test_a_failed_build_leaves_nothing(folder):
    def fill(work):
        (work / "half").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cache.build(folder, KEY, fill)
    assert list(folder.parent.iterdir()) == []


def change_one_byte(folder):
    (folder / "x.bin").write_text("Data")


def change_key(folder):
    replace(manifest.read(folder / manifest.NAME), key="other").write(folder / manifest.NAME)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (change_one_byte, r"checksum of x\.bin"),
        (lambda f: (f / "x.bin").unlink(), r"x\.bin is missing"),
        (lambda f: (f / "manifest.json").unlink(), r"no .*manifest\.json"),
        (lambda f: (f / "manifest.json").write_text("{"), "not JSON"),
        (change_key, "of other contents"),
    ],
)
def test_damage_is_seen_and_replaced(folder, damage, words):
    cache.build(folder, KEY, fill_with())
    damage(folder)
    found, problem = cache.look_up(folder, KEY)
    assert found is None
    assert re.search(words, problem)
    made = cache.build(folder, KEY, fill_with())
    assert cache.look_up(folder, KEY) == (made, None)
    assert list(folder.parent.iterdir()) == [folder]


def test_a_file_in_the_folders_place_is_replaced(folder):
    folder.parent.mkdir()
    folder.write_text("not a folder")
    assert cache.look_up(folder, KEY)[1] is not None
    made = cache.build(folder, KEY, fill_with())
    assert cache.look_up(folder, KEY) == (made, None)


def test_of_two_builders_the_first_ones_folder_stays(folder):
    def fill(work):
        cache.build(folder, KEY, fill_with())  # the other process, faster than this one
        os.utime(folder, (1, 1))
        return fill_with()(work)

    cache.build(folder, KEY, fill)
    assert folder.stat().st_mtime == 1
    assert list(folder.parent.iterdir()) == [folder]


def test_only_old_work_folders_are_cleared(folder):
    old, young = (folder.parent / f"{cache.WORK_PREFIX}{name}" for name in ("old", "young"))
    mine = folder.parent / "mine"
    for path in (old, young, mine):
        path.mkdir(parents=True)
    long_ago = time.time() - cache.ABANDONED_AFTER_S - 60
    for path in (old, mine):
        os.utime(path, (long_ago, long_ago))
    cache.build(folder, KEY, fill_with())
    assert sorted(folder.parent.iterdir()) == sorted([young, mine, folder])


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DatasetError, match=r"cannot write .*file.*--cache-dir DIR or DOS_DATASET"):
        cache.build(tmp_path / "file" / "x", KEY, fill_with())


def test_the_folder_given_wins_over_the_environments_and_that_over_the_default(
    monkeypatch, tmp_path
):
    monkeypatch.delenv(cache.ENVIRONMENT_VARIABLE, raising=False)
    assert cache.folder_to_use(None) == Path(cache.__file__).resolve().parents[1] / "cache"
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path / "env"))
    assert cache.folder_to_use(None) == tmp_path / "env"
    monkeypatch.chdir(tmp_path)
    assert cache.folder_to_use(Path("given")) == tmp_path / "given"
