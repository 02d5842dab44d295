"""The corpus that needs no download: the documentation every CPython ships, in a cache by content.

Its documents are Python's documentation topics, then the docstrings of the standard library, one
module a document. Modules are read as source, never imported: an import could open a browser
(antigravity), need a display (turtle) or be missing on this platform (winreg).
"""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from platform import python_version

from configs.errors import ConfigError
from dataset import manifest
from dataset.files import DatasetError, content_key, writing
from dataset.manifest import Manifest

EMBEDDED, OSCAR = "embedded", "oscar-1gb"
SOURCE = "python-docs"
# Raise it when the same text must give other files: the way documents are cut out, the vocabulary
# is trained or the files are laid out has changed. Older caches are then left alone and not used.
FORMAT_VERSION = 2
VOCAB_SIZE = 8192
TOKENIZER_NAME = "tokenizer.json"
CACHE_VARIABLE = "DOS_DATASET_CACHE"
DEFAULT_CACHE = Path(__file__).with_name("cache")
WORK_PREFIX = ".dataset-building-"
TOPICS_FILE = Path("pydoc_data", "topics.py")
# No prose in them, or text about nothing (test data, other people's grammars).
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "lib2to3", "idlelib", "pydoc_data", "site-packages"}
)
_HOLDS_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


def cache_folder(given: Path | None = None) -> Path:
    """Return the cache folder, absolute: the one given, the environment's, or the checkout's."""
    return Path(given or os.environ.get(CACHE_VARIABLE) or DEFAULT_CACHE).resolve()


def prepared(name: str, cache: Path | None = None) -> Path | None:
    """Return the prefix of named data, absolute; None when it has not been prepared.

    Args:
        name: `EMBEDDED` or `OSCAR`.
        cache: The cache folder, as for `cache_folder`.
    """
    if name == EMBEDDED:
        corpus = Corpus(cache_folder(cache))
        return corpus.prefix if corpus.look_up()[0] else None
    found = cache_folder(cache) / OSCAR / f"{OSCAR}_text_document"
    # The manifest is written last: where it is, the pair is whole.
    return found if manifest.path_of(found).is_file() else None


class Corpus:
    """The corpus and its place in a cache.

    Args:
        cache: Absolute; made when missing.
        stdlib: The library to read, by default the running interpreter's own.
        vocab_size: Entries of the vocabulary, end-of-document included.
    """

    def __init__(
        self, cache: Path, stdlib: Path | None = None, vocab_size: int = VOCAB_SIZE
    ) -> None:
        self.stdlib = stdlib or Path(sysconfig.get_path("stdlib"))
        self._vocab_size = vocab_size
        text = hashlib.sha256()
        # Some 11 MB, read in 0.1 s.
        for path in [self._topics_path(), *self._module_paths()]:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            text.update(f"{path.relative_to(self.stdlib).as_posix()} {content}\n".encode())
        self.key = content_key(
            {
                "source": SOURCE,
                "text": text.hexdigest(),
                "settings": {"vocab_size": vocab_size},
                "format": FORMAT_VERSION,
                "tokenizers": version("tokenizers"),
            }
        )
        self.prefix = cache / f"{SOURCE}-{self.key[:16]}" / f"{SOURCE}_text_document"

    def look_up(self) -> tuple[Manifest | None, str]:
        """Return the manifest when the folder is whole, and what is wrong with a folder."""
        folder = self.prefix.parent
        if not folder.exists():
            return None, ""
        try:
            found = manifest.read(folder / manifest.NAME)
        except ConfigError as error:
            return None, str(error)
        if found.key != self.key:
            return None, f"{manifest.NAME} is of other contents"
        damage = found.damage(folder)
        return (None, damage) if damage else (found, "")

    def prepare(self, say: Callable[[str], None]) -> tuple[Manifest, bool]:
        """Find the tokens in the cache, or build them.

        A folder is built under a name nobody looks for, and renamed into its place. So a process
        killed at any moment leaves no half folder. Of two that would build the same thing at once
        the second waits, and finds the first one's work.

        Args:
            say: Gets one line for each thing worth telling.

        Returns:
            The manifest, and whether it was built now.

        Raises:
            DatasetError: The corpus cannot be read, or the cache cannot be written.
        """
        from filelock import FileLock

        found, _ = self.look_up()
        if found:
            return found, False
        folder = self.prefix.parent
        work = folder.with_name(f"{WORK_PREFIX}{self.key[:16]}")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{work}.lock"):
                found, damage = self.look_up()  # another process may just have built it
                if found:
                    return found, False
                if damage:
                    say(f"the cache {folder} is damaged ({damage}): building it again")
                for left in (work, folder):
                    shutil.rmtree(left, ignore_errors=True)
                work.mkdir()
                try:
                    made = self._fill(work, say)
                    made.write(work / manifest.NAME)
                    work.rename(folder)
                finally:
                    shutil.rmtree(work, ignore_errors=True)
        except OSError as error:
            raise DatasetError(
                f"cannot write to the cache folder {folder.parent} ({error.strerror}): "
                f"name another with --cache-dir DIR or {CACHE_VARIABLE}"
            ) from error
        return made, True

    def _fill(self, work: Path, say: Callable[[str], None]) -> Manifest:
        # Here and not above: a call that finds its cache needs none of these.
        from dataset import indexed
        from dataset.tokenizer import ByteLevelBpe, required_eod

        documents = list(self.documents())
        say(f"building the default corpus from {len(documents):,} documents (seconds, once)")
        tokenizer, prefix = ByteLevelBpe.learn(documents, self._vocab_size), work / self.prefix.name
        path, eod = work / TOKENIZER_NAME, required_eod(tokenizer)
        with writing(path):
            tokenizer.save(path)
        counts = indexed.write(prefix, map(tokenizer.encode, documents), eod, tokenizer.vocab_size)
        files = [indexed.bin_path(prefix), indexed.idx_path(prefix), path]
        return Manifest(
            key=self.key,
            prefix=prefix.name,
            documents=counts.documents,
            tokens=counts.tokens,
            text_bytes=sum(len(text.encode()) for text in documents),
            vocab_size=tokenizer.vocab_size,
            eod=eod,
            tokenizer=TOKENIZER_NAME,
            settings={"source": SOURCE, "append_eod": True, "vocab_size": self._vocab_size},
            versions={
                "format": str(FORMAT_VERSION),
                "tokenizers": version("tokenizers"),
                "python": python_version(),
            },
            files={path.name: manifest.file_facts(path) for path in files},
        )

    def documents(self) -> Iterator[str]:
        """Yield topics by name, then modules by path; those without a word are left out."""
        for _, text in sorted(_read_topics(self._topics_path()).items()):
            yield _encodable(text.strip())
        for path in self._module_paths():
            module = _module_name(path.relative_to(self.stdlib))
            text = "\n\n".join(_docstrings(path, module))
            if text:
                yield _encodable(text)

    def _topics_path(self) -> Path:
        path = self.stdlib / TOPICS_FILE
        if not path.is_file():
            raise DatasetError(
                f"no {TOPICS_FILE} under {self.stdlib}: this Python came without its "
                "documentation topics; install its full standard library or use another Python"
            )
        return path

    def _module_paths(self) -> list[Path]:
        # The names come from the interpreter, because distributions put packages of others
        # (site-packages, dist-packages, build leftovers) beside the library's own modules.
        paths: list[Path] = []
        for name in sorted(sys.stdlib_module_names):
            file = self.stdlib / f"{name}.py"
            folder = self.stdlib / name
            paths += [file] if file.is_file() else sorted(folder.rglob("*.py"))
        paths = [
            path
            for path in paths
            if not SKIPPED_FOLDERS.intersection(path.relative_to(self.stdlib).parts)
        ]
        if not paths:
            raise DatasetError(
                f"no source files of the standard library under {self.stdlib}: "
                "use a Python whose library is installed as .py files"
            )
        return paths


def _read_topics(path: Path) -> dict[str, str]:
    for node in _parse(path).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            topics = ast.literal_eval(node.value)
            if isinstance(topics, dict):
                return topics
    raise DatasetError(f"{path} holds no documentation topics: is this Python's library intact?")


def _parse(path: Path) -> ast.Module:
    try:
        with warnings.catch_warnings():
            # Invalid escapes in the library's older strings are not ours to report.
            warnings.simplefilter("ignore")
            return ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise DatasetError(
            f"{path} cannot be parsed ({error}): is this Python's library intact?"
        ) from error


def _module_name(relative: Path) -> str:
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _docstrings(path: Path, module: str) -> Iterator[str]:
    tree = _parse(path)
    if text := ast.get_docstring(tree):
        yield f"module {module}\n\n{text}"
    yield from _docstrings_inside(tree, module)


def _docstrings_inside(parent: ast.AST, scope: str) -> Iterator[str]:
    """Yield the docstrings of classes and functions in source order, each under its own heading."""
    for node in ast.iter_child_nodes(parent):
        # No expression contains a definition, and expressions are nine tenths of the nodes.
        if not isinstance(node, _HOLDS_STATEMENTS):
            continue
        name = scope
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{scope}.{node.name}"
            if text := ast.get_docstring(node):
                yield f"{_heading(node, name)}\n\n{text}"
        yield from _docstrings_inside(node, name)


def _heading(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {name}({bases})" if bases else f"class {name}"
    return f"def {name}({ast.unparse(node.args)})"


def _encodable(text: str) -> str:
    # A lone surrogate is a legal Python string and not a legal text: UTF-8 has no bytes for it.
    return text.encode("utf-8", "replace").decode("utf-8")
