"""Megatron's OpenWebText recipe on datatrove, with its thresholds: `clean` and `decontaminate`.

A command is rows of datatrove's pipelines. A row writes its files into the output folder and marks
finished tasks in ``logs/``, so that a command that was stopped goes on with the missing tasks.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.decont.n_grams import NGramsDecontConfig, NGramsDecontFilter
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.formatters import FTFYFormatter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import HashConfig
from datatrove.utils.text import TextNormConfig, ngrams, simplify_text
from datatrove.utils.word_tokenizers import WordTokenizer
from loguru import logger

from configs.files import read_json, write_json
from dataset.files import LOCK_NAME, DatasetError, content_key, locked, writing
from dataset.readers import Bad, InputFile, Reading, blocks

MOST_TASKS = 128
"""A crawl may have a file a page, and every task its log."""
LANGUAGE_CHARACTERS = 4000
"""The beginning tells the language; the whole of a long text would take longer than all else."""
LEAST_CONFIDENCE = 0.5
SHINGLE_WORDS = 5
BUCKETS = 14
CONTAMINATED_WORDS = 13
PLAN, COUNTS = "plan.json", "counts.json"
NORMAL = TextNormConfig(norm_numbers=False)
# datatrove's other hash, xxhash, must be older than the one that is pinned.
HASH = HashConfig(hash_fc="sha1")
DAMAGED = "damaged: "
"""Begins the name of a count that says of a file what is wrong with it."""
COUNTED = {"read": "read", "bad lines": "bad lines", "XXXXX.jsonl.gz": "written"}
"""Names under which the counts of steps are shown."""

logger.disable("datatrove")


@dataclass(frozen=True)
class Cleaning:
    """Demands of `clean` on a text; the values are the recipe's."""

    language: str = "en"
    min_words: int = 128
    min_characters: int = 512
    near_duplicates: float = 0.9
    """Jaccard index of five-word sets at which half of the pairs are found, and more above it."""


class Files(PipelineStep):
    """Reads any files that `prepare` reads, one text a record.

    Args:
        files: The input; a task takes every n-th of n tasks.
        key: The field of the text; of a text file, each line is one.
    """

    type, name = "📖 - READER", "Files"

    def __init__(self, files: Sequence[InputFile], key: str) -> None:
        super().__init__()
        self.files, self.key = files, key

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the texts of this task."""
        for file in self.files[rank::world_size]:
            reading, bad, counted = Reading((file,), (self.key,), "line"), list[Bad](), 0
            for block in blocks(reading):
                for record in block.records(reading.keys, bad):
                    fields = {name: one for name, one in record.fields.items() if name != self.key}
                    name = fields.pop("id", f"{file.path.name}:{record.line}")
                    self.stat_update("read")
                    text = "\n".join(record.texts[self.key])
                    yield Document(text, str(name), metadata=fields)
                counted += len(block.raw)
            self.stat_update("bad lines", value=len(bad))
            if damage := file.damage(counted, len(bad)):
                self.stat_update(f"{DAMAGED}{damage}")


def _writer(folder: Path) -> JsonlWriter:
    def as_record(_: JsonlWriter, document: Document) -> dict[str, Any]:
        return {"id": document.id, **document.metadata, "text": document.text}

    return JsonlWriter(str(folder), adapter=as_record)


@cache
def _language_model() -> Any:
    from py3langid import langid

    path = langid.MODEL_DIR / langid.MODEL_FILE  # it comes with the package
    return langid.LanguageIdentifier.from_modelpath(path, norm_probs=True)


class TextFilter(BaseFilter):
    """Keeps texts of a language and of a length, in this order."""

    name = "Language and length"

    def __init__(self, cleaning: Cleaning) -> None:
        super().__init__()
        known = _language_model().nb_classes
        if cleaning.language not in known:
            raise DatasetError(
                f"--language {cleaning.language}: not one of {', '.join(sorted(known))}"
            )
        self.cleaning = cleaning

    def filter(self, document: Document) -> bool | tuple[bool, str]:
        """Return whether a text stays, and else why not."""
        language, confidence = _language_model().classify(document.text[:LANGUAGE_CHARACTERS])
        if language != self.cleaning.language or confidence < LEAST_CONFIDENCE:
            return False, "language"
        if len(document.text) < self.cleaning.min_characters:
            return False, "too short"
        if len(document.text.split()) < self.cleaning.min_words:
            return False, "too short"
        return True


class _Words(WordTokenizer):
    """Words of a text that is already without punctuation, and so of one sentence alone.

    datatrove's own needs spaCy.
    """

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()

    def sent_tokenize(self, text: str) -> list[str]:
        return [text]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        return [(0, len(text))]


class EvaluationFilter(NGramsDecontFilter):
    """Drops texts that share 13 words in a row with evaluation texts.

    datatrove's index of evaluation texts needs lighteval, which only knows its own tasks.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        config = NGramsDecontConfig(CONTAMINATED_WORDS, norm_config=NORMAL, hash_config=HASH)
        super().__init__(".", config, language=_Words())
        self.texts = texts

    def load_index_hashes(self) -> None:
        """Make the index of the evaluation texts."""
        self._index_hashes = {
            self.hash_func(" ".join(words)): "evaluation"
            for text in self.texts
            for words in ngrams(simplify_text(text, NORMAL).split(), CONTAMINATED_WORDS)
        }


class Recipe:
    """One command: rows of pipelines that fill a folder, one after the other.

    Args:
        output: Folder to fill.
        settings: All that decides what comes out, beside the input.
        files: The input.
        workers: Tasks at a time.

    Raises:
        DatasetError: The folder holds something else, or this with other settings or input.
    """

    def __init__(
        self, output: Path, settings: dict[str, Any], files: Sequence[InputFile], workers: int = 1
    ) -> None:
        self.output, self.workers = output, workers
        self.work = output / "work"
        self.tasks = min(len(files), MOST_TASKS)
        self.counts: Counter[str] = Counter()
        inputs = [[str(one.path), one.size_bytes, one.modified_ns] for one in files]
        plan = json.dumps({**settings, "input": inputs}) + "\n"
        path = output / PLAN
        self.done = read_json(output / COUNTS)
        """Counts of a finished run; empty before."""
        if path.exists() and path.read_text(encoding="utf-8") == plan:
            return
        if any(one.name != LOCK_NAME for one in output.iterdir()):
            raise DatasetError(
                f"--output {output}: holds something else, or this with other options or input: "
                "give the same again to go on, or another folder"
            )
        with writing(path):
            path.write_text(plan, encoding="utf-8")

    def row(
        self,
        name: str,
        steps: list[PipelineStep],
        counted: Mapping[str, str],
        tasks: int | None = None,
    ) -> None:
        """Run the tasks of a pipeline that are missing, and count what became of the texts."""
        logs, tasks = self.output / "logs" / name, tasks or self.tasks
        LocalPipelineExecutor(steps, tasks, min(tasks, self.workers), logging_dir=str(logs)).run()
        for path in (logs / "stats").glob("*.json"):
            for step in json.loads(path.read_text(encoding="utf-8")):
                for what, found in step["stats"].items():
                    shown = counted.get(what)
                    if what.startswith("dropped_"):
                        shown = f"dropped: {what.removeprefix('dropped_')}"
                    if what.startswith(DAMAGED):
                        shown = what
                    if shown:
                        number = found["total"] if isinstance(found, dict) else found
                        self.counts[shown] += int(number)

    def reader(self, folder: Path) -> JsonlReader:
        """Return the reader of what a row wrote.

        Raises:
            DatasetError: Nothing is left.
        """
        if not any(folder.glob("*.jsonl.gz")):
            counts = ", ".join(f"{name} {count:,}" for name, count in self.counts.items() if count)
            raise DatasetError(f"--output {self.output}: nothing is left: {counts}")
        return JsonlReader(str(folder), recursive=False, add_file_path=False)

    def close(self) -> dict[str, int]:
        """Keep what was counted and return it; drop what rows left for each other.

        Raises:
            DatasetError: Nothing is left.
        """
        self.reader(self.output)
        with writing(self.output / COUNTS):
            write_json(self.output / COUNTS, self.counts)
        shutil.rmtree(self.work, ignore_errors=True)
        return dict(self.counts)


def clean(
    files: Sequence[InputFile], key: str, output: Path, workers: int, cleaning: Cleaning
) -> dict[str, int]:
    """Write the texts that are mended, of the language, long enough, and not alike.

    Returns:
        What was done, counted by name.

    Raises:
        DatasetError: A file cannot be used, or no text stays.
    """
    # (1 / buckets) ** (1 / hashes) is the similarity at which the curve of LSH is steepest.
    hashes = max(1, round(math.log(1 / BUCKETS) / math.log(cleaning.near_duplicates)))
    config = MinhashConfig(SHINGLE_WORDS, BUCKETS, hashes, 1, NORMAL, HASH)
    with locked(output):
        settings = {"command": "clean", "key": key, **asdict(cleaning)}
        recipe = Recipe(output, settings, files, workers)
        if recipe.done:
            return recipe.done
        kept = recipe.work / "kept"
        signatures, buckets, remove = (
            str(recipe.work / name) for name in ("signatures", "buckets", "remove")
        )
        cleaned = [Files(files, key), FTFYFormatter(), TextFilter(cleaning), _writer(kept)]
        recipe.row("clean", cleaned, {name: name for name in ("read", "bad lines")})
        signing = MinhashDedupSignature(signatures, config, _Words())
        recipe.row("signatures", [recipe.reader(kept), signing], {})
        finding = MinhashDedupBuckets(signatures, buckets, config=config)
        recipe.row("buckets", [finding], {}, BUCKETS)
        recipe.row("clusters", [MinhashDedupCluster(buckets, remove, config)], {}, 1)
        steps = [recipe.reader(kept), MinhashDedupFilter(remove), _writer(output)]
        counted = {"dropped": "dropped: near-duplicate", "XXXXX.jsonl.gz": "written"}
        recipe.row("duplicates", steps, counted)
        return recipe.close()


def decontaminate(
    files: Sequence[InputFile], key: str, output: Path, workers: int, evaluation: Reading
) -> dict[str, int]:
    """Write the texts that share no 13 words in a row with evaluation texts.

    Returns:
        What was done, counted by name.

    Raises:
        DatasetError: A file cannot be used, or no text stays.
    """
    bad: list[Bad] = []
    records = (one for block in blocks(evaluation) for one in block.records(evaluation.keys, bad))
    texts = [text for record in records for some in record.texts.values() for text in some]
    if bad:
        wrong, keys = evaluation.explained(bad[0])
        raise DatasetError(
            f"--evaluation {wrong}; --evaluation-keys says where its texts are{keys}"
        )
    cutting = EvaluationFilter(texts)
    cutting.load_index_hashes()
    if not cutting._index_hashes:
        raise DatasetError(
            f"--evaluation {evaluation.files[0].path}: holds no evaluation text of "
            f"{CONTAMINATED_WORDS} words or more"
        )
    with locked(output):
        settings = {"command": "decontaminate", "key": key, "texts": content_key({"texts": texts})}
        recipe = Recipe(output, settings, files, workers)
        if recipe.done:
            return recipe.done
        recipe.row("texts", [Files(files, key), cutting, _writer(output)], COUNTED)
        return recipe.close()
