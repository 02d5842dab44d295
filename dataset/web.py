"""Megatron's OpenWebText recipe on datatrove: from lists of addresses to training text.

``urls``, ``download`` and ``clean`` are rows of datatrove's pipelines. A row writes its files into
the output folder and marks finished tasks in ``logs/``, so that a command that was stopped goes on
with the tasks that are missing. The thresholds are the recipe's.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from courlan import extract_domain, normalize_url
from datatrove.data import Document
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.extractors import Trafilatura
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.formatters import FTFYFormatter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import JsonlWriter
from datatrove.utils.hashing import HashConfig
from datatrove.utils.text import TextNormConfig
from datatrove.utils.word_tokenizers import WordTokenizer
from loguru import logger

from configs.files import read_json, write_json
from dataset.contamination import COMMON_MATCHES, FEWEST_WORDS, Contamination
from dataset.download import Fetcher, host_of
from dataset.files import LOCK_NAME, DatasetError, content_key, locked, writing
from dataset.readers import Bad, InputFile, Reading, blocks

BLACKLIST = Path(__file__).with_name("blacklist.toml")
SHORTEST_ADDRESS = 9
ID_BYTES = 8
# Every address of a host is in one task, so that a host is asked by one task alone.
DOWNLOAD_TASKS = 64
EXTRACTION_TIMEOUT_S = 30
# The beginning tells the language; the whole of a long text would take longer than all else.
LANGUAGE_CHARACTERS = 4000
LEAST_CONFIDENCE = 0.5
SHINGLE_WORDS = 5
BUCKETS = 14
PLAN, COUNTS = "plan.json", "counts.json"
_NO_ADDRESS = re.compile(r"[\s\x00-\x20\x7f]")

# What is told, by the name that steps count it under.
COUNTED = {name: name for name in ("read", "bad lines", "contaminated")}
WRITTEN = {"XXXXX.jsonl.gz": "written"}

logger.disable("datatrove")


@dataclass(frozen=True)
class Cleaning:
    """Demands of ``clean`` on a text; the values are the recipe's."""

    language: str = "en"
    min_words: int = 128
    min_characters: int = 512
    near_duplicates: float = 0.9
    """Jaccard index of five-word sets at which half of the pairs are found, and more above it."""


class Files(PipelineStep):
    """Reads any files that `prepare` reads, one text a record.

    Args:
        files: What to read; a task takes every n-th of n tasks.
        key: The field of the text; of a text file, each line is one.
        by_host: Have each task read all files, and take the addresses of its own hosts.
    """

    type, name = "📖 - READER", "Files"

    def __init__(self, files: Sequence[InputFile], key: str, by_host: bool = False) -> None:
        super().__init__()
        self.files, self.key, self.by_host = files, key, by_host

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:  # noqa: ANN401
        """Yield the texts of this task."""
        for file in self.files if self.by_host else self.files[rank::world_size]:
            reading, bad = Reading((file,), (self.key,), "line"), list[Bad]()
            for block in blocks(reading):
                for record in block.records(reading.keys, bad):
                    text = "\n".join(record.texts[self.key])
                    if self.by_host and _host_number(text) % world_size != rank:
                        continue
                    fields = {name: one for name, one in record.fields.items() if name != self.key}
                    name = fields.pop("id", f"{file.path.name}:{record.line}")
                    self.stat_update("read")
                    yield Document(text, str(name), metadata=fields)
            if rank == 0 or not self.by_host:
                self.stat_update("bad lines", value=len(bad))


def _host_number(url: str) -> int:
    return int.from_bytes(blake2b(host_of(url.strip()).encode(), digest_size=ID_BYTES).digest())


def _writer(folder: Path, key: str = "text") -> JsonlWriter:
    def as_record(_: JsonlWriter, document: Document) -> dict[str, Any]:
        return {"id": document.id, **document.metadata, key: document.text}

    return JsonlWriter(str(folder), adapter=as_record)


class UrlFilter(BaseFilter):
    """Keeps addresses that may lead to text, each once.

    Args:
        blacklist: A TOML file with the lists ``domains`` and ``extensions``.

    Raises:
        DatasetError: The blacklist cannot be used.
    """

    name = "Addresses"

    def __init__(self, blacklist: Path = BLACKLIST) -> None:
        super().__init__()
        try:
            lists = tomllib.loads(blacklist.read_text(encoding="utf-8"))
            self.domains = frozenset(name.lower() for name in lists["domains"])
            self.extensions = tuple(end.lower() for end in lists["extensions"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DatasetError(
                f"--blacklist {blacklist}: give a TOML file with the lists 'domains' and "
                f"'extensions' ({error!r})"
            ) from error
        # Digests: a set of tens of millions of addresses would take all memory.
        self.seen: set[bytes] = set()

    def filter(self, document: Document) -> bool | tuple[bool, str]:
        """Return whether an address stays, and else why not."""
        reason = self._reason(document.text.strip())
        return (False, reason) if reason else True

    def _reason(self, url: str) -> str:
        try:
            parts = urlsplit(url)
            host = (parts.hostname or "").rstrip(".")
        except ValueError:  # brackets that are no address
            return "malformed"
        labels = host.split(".")
        # A name without a dot stands for a site under every ending: x.com, x.co.uk.
        site = (extract_domain(url) or "").partition(".")[0] if host else ""
        if site in self.domains or any(".".join(labels[n:]) in self.domains for n in range(9)):
            return "domain"
        if self.extensions and parts.path.lower().endswith(self.extensions):
            return "extension"
        if len(url) < SHORTEST_ADDRESS:
            return "too short"
        if not host_of(url) or _NO_ADDRESS.search(url):
            return "malformed"
        plain = normalize_url(parts._replace(fragment="", path=parts.path or "/"), strict=False)
        digest = blake2b(plain.encode(), digest_size=ID_BYTES).digest()
        if digest in self.seen:
            return "duplicate"
        self.seen.add(digest)
        return ""


class Download(PipelineStep):
    """Turns addresses into pages, as HTML; it asks their hosts politely (`dataset.download`).

    Args:
        user_agent: Who asks.
        host_delay_s: Between two requests to a host.
        at_once: Hosts that are asked at a time.
    """

    type, name = "🌐 - FETCH", "Pages"

    def __init__(self, user_agent: str, host_delay_s: float, at_once: int) -> None:
        super().__init__()
        self.user_agent, self.host_delay_s, self.at_once = user_agent, host_delay_s, at_once

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:  # noqa: ANN401
        """Yield the pages that came."""
        urls = dict.fromkeys(document.text.strip() for document in data)
        fetcher = Fetcher(self.user_agent, self.host_delay_s)
        for url, reason, page in fetcher.pages(urls, self.at_once):
            if reason:
                self.stat_update(f"dropped_{reason}")
            else:
                name = blake2b(url.encode(), digest_size=ID_BYTES).hexdigest()
                yield Document(page, name, metadata={"url": url})


@cache
def _language_model() -> Any:  # noqa: ANN401
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
    """Words of a text that is already without punctuation; datatrove's own needs spaCy."""

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()

    def sent_tokenize(self, text: str) -> list[str]:
        raise NotImplementedError

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        raise NotImplementedError


class PhraseCounter(PipelineStep):
    """Counts how often the input holds each sequence of the evaluation texts, a file a task."""

    type, name = "🦠 - DECONT", "Common phrases"

    def __init__(self, texts: list[str], folder: Path) -> None:
        super().__init__()
        self.texts, self.folder = texts, folder

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:  # noqa: ANN401
        """Yield nothing; write the counts."""
        known, found = Contamination(self.texts), Counter[str]()
        for document in data:
            found.update(known.count(document.text))
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{rank:05d}.json").write_text(json.dumps(found), encoding="utf-8")
        yield from ()


class Decontaminate(PipelineStep):
    """Cuts evaluation texts out; a document that falls into pieces becomes ID-0, ID-1, ..."""

    type, name = "🦠 - DECONT", "Evaluation texts"

    def __init__(self, texts: list[str], counts: Path) -> None:
        super().__init__()
        self.texts, self.counts = texts, counts

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:  # noqa: ANN401
        """Yield what is left of each document."""
        found = Counter[str]()
        for path in self.counts.glob("*.json"):
            found.update(json.loads(path.read_text(encoding="utf-8")))
        common = frozenset(sequence for sequence, num in found.items() if num >= COMMON_MATCHES)
        known = Contamination(self.texts, common)
        for document in data:
            pieces = known.clean(document.text)
            if pieces != [document.text]:
                self.stat_update("contaminated" if pieces else "dropped_contaminated")
            for number, piece in enumerate(pieces):
                name = f"{document.id}-{number}" if len(pieces) > 1 else document.id
                yield Document(piece, name, metadata=document.metadata)


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
        self.counts: Counter[str] = Counter()
        inputs = [[str(one.path), one.size_bytes, one.modified_ns] for one in files]
        plan = json.dumps({**settings, "input": inputs}, default=str) + "\n"
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
        self, name: str, steps: list[PipelineStep], tasks: int, counted: Mapping[str, str] = COUNTED
    ) -> None:
        """Run the tasks of a pipeline that are missing, and count what became of the texts."""
        logs = self.output / "logs" / name
        workers = min(tasks, self.workers)
        LocalPipelineExecutor(steps, tasks, workers, logging_dir=str(logs)).run()
        for path in (logs / "stats").glob("*.json"):
            for step in json.loads(path.read_text(encoding="utf-8")):
                for what, found in step["stats"].items():
                    shown = counted.get(what)
                    if what.startswith("dropped_"):
                        shown = f"dropped: {what.removeprefix('dropped_')}"
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


def sift(files: Sequence[InputFile], key: str, output: Path, blacklist: Path) -> dict[str, int]:
    """Write the addresses that may lead to text, each once, in the order in which they come.

    Returns:
        What was done, counted by name.

    Raises:
        DatasetError: A file cannot be used, or no address stays.
    """
    steps = [Files(files, key), UrlFilter(blacklist), _writer(output, "url")]
    with locked(output):
        recipe = Recipe(output, {"command": "urls", "key": key, "blacklist": blacklist}, files)
        if recipe.done:
            return recipe.done
        recipe.row("urls", steps, 1, COUNTED | WRITTEN)
        return recipe.close()


def download(
    files: Sequence[InputFile], key: str, output: Path, workers: int, asking: Download
) -> dict[str, int]:
    """Write the texts of pages, each with its address.

    Returns:
        What was done, counted by name.

    Raises:
        DatasetError: A file cannot be used, or no page has a text.
    """
    with locked(output):
        # One task at a time asks, many hosts at once.
        recipe = Recipe(output, {"command": "download", "key": key}, files, workers=1)
        if recipe.done:
            return recipe.done
        pages = recipe.work / "pages"
        steps = [Files(files, key, by_host=True), asking, _writer(pages)]
        recipe.row("pages", steps, DOWNLOAD_TASKS)
        recipe.workers = workers
        article = Trafilatura(
            favour_precision=False, deduplicate=False, timeout=EXTRACTION_TIMEOUT_S
        )
        left_out = {name: f"dropped: {name}" for name in ("timeout", "clean_error")}
        counted = {"dropped": "dropped: no text", **left_out, **WRITTEN}
        recipe.row(
            "texts", [recipe.reader(pages), article, _writer(output)], DOWNLOAD_TASKS, counted
        )
        return recipe.close()


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
    normal = TextNormConfig(norm_numbers=False)
    # datatrove's other hash, xxhash, must be older than the one that is pinned.
    sha1 = HashConfig(hash_fc="sha1")
    config = MinhashConfig(SHINGLE_WORDS, BUCKETS, hashes, 1, normal, sha1)
    tasks = len(files)
    with locked(output):
        settings = {"command": "clean", "key": key, **asdict(cleaning)}
        recipe = Recipe(output, settings, files, workers)
        if recipe.done:
            return recipe.done
        kept, *folders = (
            recipe.work / name for name in ("kept", "signatures", "buckets", "remove")
        )
        signatures, buckets, remove = map(str, folders)
        cleaned = [Files(files, key), FTFYFormatter(), TextFilter(cleaning), _writer(kept)]
        recipe.row("clean", cleaned, tasks)
        signing = MinhashDedupSignature(signatures, config, _Words())
        recipe.row("signatures", [recipe.reader(kept), signing], tasks)
        recipe.row("buckets", [MinhashDedupBuckets(signatures, buckets, config=config)], BUCKETS)
        recipe.row("clusters", [MinhashDedupCluster(buckets, remove, config)], 1)
        steps = [recipe.reader(kept), MinhashDedupFilter(remove), _writer(output)]
        counted = {"dropped": "dropped: near-duplicate", **WRITTEN}
        recipe.row("duplicates", steps, tasks, counted)
        return recipe.close()


def decontaminate(
    files: Sequence[InputFile], key: str, output: Path, workers: int, evaluation: Reading
) -> dict[str, int]:
    """Write texts without what they share with evaluation texts.

    Returns:
        What was done, counted by name.

    Raises:
        DatasetError: A file cannot be used, or no text stays.
    """
    bad: list[Bad] = []
    records = (one for block in blocks(evaluation) for one in block.records(evaluation.keys, bad))
    texts = [text for record in records for some in record.texts.values() for text in some]
    if bad:
        raise DatasetError(
            f"--evaluation {evaluation.words(bad[0])}; --evaluation-keys says where its texts are"
        )
    if not len(Contamination(texts)):
        raise DatasetError(
            f"--evaluation {evaluation.files[0].path}: holds no evaluation text of "
            f"{FEWEST_WORDS} words or more"
        )
    tasks = len(files)
    with locked(output):
        settings = {"command": "decontaminate", "key": key, "texts": content_key({"texts": texts})}
        recipe = Recipe(output, settings, files, workers)
        if recipe.done:
            return recipe.done
        phrases = recipe.work / "phrases"
        recipe.row("phrases", [Files(files, key), PhraseCounter(texts, phrases)], tasks, {})
        cutting = Decontaminate(texts, phrases)
        recipe.row("texts", [Files(files, key), cutting, _writer(output)], tasks, COUNTED | WRITTEN)
        return recipe.close()
