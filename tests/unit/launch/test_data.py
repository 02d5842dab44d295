import functools
import hashlib
import json

import numpy as np
import pytest

from configs.errors import ConfigError
from configs.study import make_point
from dataset import embedded, indexed
from launch import data, sweep
from launch.data import data_prefix, data_record, data_words, look_at, with_data
from launch.identity import data_facts, point_key
from launch.run import main as run_main
from launch.task import RunOptions, Task

TINY = make_point({"model": "tiny", "device": "cpu"})
LARGE = make_point({"model": "7B", "device": "cpu"})
DRY = ["--dry-run", "--device", "cpu"]


def make(folder):
    for end in (".bin", ".idx"):
        (folder / f"x{end}").write_text("")
    return folder / "x"


def write_pair(prefix, largest=999, vocab_size=1000, manifest=None):
    """A pair of 30 documents of 100 tokens each, the last of them ``largest``."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    documents = [random.integers(0, min(900, largest), 99) for _ in range(30)]
    indexed.write(prefix, documents, largest, vocab_size)
    if manifest:
        path = prefix.with_name(f"{prefix.name}.manifest.json")
        path.write_text(json.dumps({"prefix": prefix.name, "vocab_size": manifest}))
    return prefix


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder; nothing is prepared."""
    monkeypatch.setenv("DOS_DATASET_CACHE", str(tmp_path / "cache"))
    data.prepared.cache_clear()
    yield tmp_path / "cache"
    data.prepared.cache_clear()


@pytest.fixture
def oscar(cache):
    return write_pair(cache / "oscar-1gb" / "oscar-1gb_text_document", 50_256, 50_257, 50_257)


def test_the_users_own_files_are_taken_as_an_absolute_prefix(odd_dir, monkeypatch):
    prefix = make(odd_dir)
    monkeypatch.chdir(odd_dir)
    assert data_prefix("x") == str(prefix)


@pytest.mark.parametrize("vocab_size", [1000, 70_000])
def test_tokens_and_checksum_come_from_the_files(tmp_path, vocab_size):
    prefix = str(write_pair(tmp_path / "own", vocab_size=vocab_size))
    digest = hashlib.sha256((tmp_path / "own.bin").read_bytes()).hexdigest()
    assert data_record(prefix) == {
        **data_facts(prefix),
        **{"name": "own", "source": prefix, "tokens": 3000, "vocab_size": None},
        "checked": "sizes",
    }
    assert f"3,000 tokens, SHA-256 {digest}; no manifest: its sizes alone" in data_words(prefix)


def test_a_manifest_is_believed_for_its_own_pair_alone(tmp_path):
    prefix = write_pair(tmp_path / "own", manifest=4321)
    assert look_at(str(prefix)).vocab_size == 4321
    own = tmp_path / "own.manifest.json"
    own.write_text(json.dumps({"prefix": "another", "vocab_size": 4321}))
    assert look_at(str(prefix)).vocab_size is None


def vouched(prefix):
    """A pair with all that `prepare` writes into its manifest about the two files."""
    path = prefix.with_name(f"{prefix.name}.manifest.json")
    files = {f"{prefix.name}{end}": facts for end, facts in data_facts(str(prefix)).items()}
    path.write_text(json.dumps({"prefix": prefix.name, "vocab_size": 1000, "files": files}))
    return prefix


def cut(path, num_bytes):
    path.write_bytes(path.read_bytes()[:-num_bytes])


def zero(path):
    raw = path.read_bytes()
    path.write_bytes(raw[:2000] + bytes(2000) + raw[4000:])


@pytest.mark.parametrize(
    ("end", "damage", "message"),
    [
        (".bin", lambda path: cut(path, 100), "it has 5,900 bytes .*, its manifest says 6,000 "),
        (".bin", zero, "it has 6,000 bytes .*; get it again, or move"),
        (".idx", lambda path: cut(path, 8), "it has 634 bytes .*, its manifest says 642 "),
    ],
)
def test_a_pair_that_is_not_its_manifests_is_refused_before_it_is_trained_on(
    tmp_path, end, damage, message
):
    prefix = vouched(write_pair(tmp_path / "own"))
    point = make_point({"model": "tiny", "device": "cpu", "data_prefix": str(prefix)})
    options = RunOptions(tmp_path / "results", "single")
    [task] = Task.each([point], options)
    assert task.facts([], {})["provenance"]["data"]["checked"] == "manifest"
    damage(prefix.with_name(f"own{end}"))
    with pytest.raises(ConfigError, match=rf"own\{end} is damaged: {message}"):
        Task.each([point], options)
    words = ["tiny", *DRY, "--data-prefix", str(prefix)]
    with pytest.raises(ConfigError, match=rf"own\{end} is damaged"):
        run_main(words)


@pytest.mark.parametrize(
    ("end", "change", "message"),
    [
        (".bin", lambda p: cut(p, 100), r"own.bin holds 2,950 tokens, .*own.idx counts 3,000: one"),
        (".bin", lambda p: p.write_bytes(2 * p.read_bytes()), "6,000 tokens, .* different pairs"),
        (".idx", lambda p: cut(p, 8), "own.idx is damaged: it has 634 bytes, its header says 642"),
    ],
)
def test_without_a_manifest_tokens_and_index_must_belong_together(tmp_path, end, change, message):
    prefix = write_pair(tmp_path / "own")
    change(prefix.with_name(f"own{end}"))
    with pytest.raises(ConfigError, match=message):
        look_at(str(prefix))


def test_tokens_that_end_documents_need_not_be_counted(tmp_path):
    """As Megatron-DeepSpeed's script writes its index."""
    prefix = write_pair(tmp_path / "own")
    lengths = np.full(30, 99, np.int32)
    ones = np.ones_like(lengths)
    indexed.write_index(
        indexed.idx_path(prefix), np.dtype(np.uint16), lambda: [lengths], lambda: [ones]
    )
    assert look_at(str(prefix)).tokens == 3000


@pytest.mark.parametrize("name", ["own.manifest.json", "manifest.json"])
def test_a_manifest_that_cannot_be_read_is_no_missing_one(tmp_path, name):
    prefix = write_pair(tmp_path / "own")
    (tmp_path / name).write_text('{"prefix": "own", ')
    with pytest.raises(ConfigError, match=rf"{name}: not valid JSON: .*get it again"):
        look_at(str(prefix))


def test_data_that_changed_in_place_is_read_again(tmp_path):
    prefix = str(write_pair(tmp_path / "own"))
    before = data_record(prefix)
    write_pair(tmp_path / "own", largest=1234, vocab_size=2000)
    assert data_record(prefix)[".bin"] != before[".bin"]


def test_files_that_are_not_there_are_named(tmp_path):
    prefix = write_pair(tmp_path / "own")
    assert data_prefix(f"{prefix}.bin") == data_prefix(str(prefix)) == str(prefix)
    message = r"x': neither embedded nor oscar-1gb, and there is no file .*x\.bin"
    with pytest.raises(ConfigError, match=message):
        data_prefix(f"{prefix}x")


def test_data_of_a_point_is_held_against_its_model_before_it_runs(tmp_path):
    prefix = write_pair(tmp_path / "own", manifest=8193)
    point = make_point({"model": "tiny", "device": "cpu", "data_prefix": str(prefix)})
    options = RunOptions(tmp_path / "results", "single")
    with pytest.raises(ConfigError, match="needs a vocabulary of 8193"):
        Task.each([point], options)
    assert Task.each([point.model_copy(update={"model": LARGE.model})], options)


def test_other_data_make_another_point(tmp_path):
    prefixes = [write_pair(tmp_path / name, largest) for name, largest in (("a", 998), ("b", 999))]
    points = [TINY.model_copy(update={"data_prefix": str(prefix)}) for prefix in prefixes]
    tasks = Task.each(points, RunOptions(tmp_path / "results", "single"))
    assert len({task.point_key for task in tasks}) == 2
    # What is told of the data beside its contents is no part of the key.
    assert tasks[0].point_key == point_key(TINY, data_facts(str(prefixes[0])))
    record = tasks[0].facts([], {})["provenance"]["data"]
    assert (record["name"], record["tokens"]) == ("a", 3000)


def test_full_size_models_take_the_papers_corpus_where_it_is_prepared(oscar):
    points, line = with_data([LARGE, TINY])
    assert [point.data_prefix for point in points] == ["oscar-1gb", ""]
    assert data_prefix("oscar-1gb") == str(oscar)
    assert line.startswith("data: oscar-1gb (the paper's corpus), 3,000 tokens, SHA-256 ")
    for own in ("/mine", "embedded"):
        given = LARGE.model_copy(update={"data_prefix": own})
        assert with_data([given]) == ([given], "")


def test_a_full_size_model_on_the_embedded_corpus_is_said_plainly(cache):
    with pytest.raises(ConfigError, match="make dataset-oscar"):
        data_prefix("oscar-1gb")
    assert with_data([LARGE]) == ([LARGE], data.UNPREPARED)
    assert with_data([TINY]) == ([TINY], "")


def test_the_papers_corpus_must_fit(oscar):
    with pytest.raises(ConfigError, match=r"8192.*--model\.vocab-size 50257"):
        run_main(["tiny", *DRY, "--data-prefix", "oscar-1gb"])


def test_the_embedded_corpus_is_found_once_it_is_made(cache, tmp_path, monkeypatch):
    """Of a library that is read at once; `python -m dataset` is tested on the interpreter's own."""
    for name, text in {"pydoc_data/topics.py": "topics = {'a': 'b'}", "abc.py": "'Abc.'"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    small = functools.partial(embedded.Corpus, stdlib=tmp_path, vocab_size=300)
    for module in (data, embedded):
        monkeypatch.setattr(module, "Corpus", small)
    assert data_words("").endswith("made when it is first needed")
    prefix = data_prefix("")
    data.prepared.cache_clear()
    assert data.prepared("embedded") == prefix
    words = data_words("")
    assert words == data_words(prefix)
    assert words.startswith("embedded (documentation that Python ships), ")
    assert "tokens, SHA-256 " in words


@pytest.mark.parametrize("size", ["tiny", "full"])
def test_a_dry_run_of_a_sweep_names_each_kind_of_data(size, tmp_path, oscar, capsys):
    own = write_pair(tmp_path / "own", manifest=1000)
    words = [*DRY, "--size", size, "--results-dir", str(tmp_path / "r")]
    words += ["--model.vocab-size", "50257"] + (["--model", "7B"] if size == "full" else [])
    digest = data_facts(str(own))[".bin"]["sha256"]
    for chosen, expected in (
        (str(own), f"own ({own}), 3,000 tokens, SHA-256 {digest}"),
        ("oscar-1gb", "oscar-1gb (the paper's corpus), 3,000 tokens, SHA-256 "),
        ("embedded", "embedded (documentation that Python ships), made when"),
    ):
        assert sweep.main([*words, "--data-prefix", chosen]) == 0
        assert capsys.readouterr().out.count(f"\ndata     {expected}") == 3 + (size == "full")
    assert not (tmp_path / "r").exists()
