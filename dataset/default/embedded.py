"""The corpus every CPython ships: its documentation topics and the library's docstrings."""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from dataset.errors import DatasetError

TOPICS_FILE = Path("pydoc_data", "topics.py")

# No prose in them, or text about nothing (test data, other people's grammars).
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "lib2to3", "idlelib", "pydoc_data", "site-packages"}
)

_HOLDS_STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)


class EmbeddedSource:
    """Documentation topics, then the docstrings of the standard library, one module a document.

    Modules are read as source, never imported: an import could open a browser (antigravity), need
    a display (turtle) or be missing on this platform (winreg).
    """

    name = "python-docs"

    def __init__(self, stdlib: Path | None = None) -> None:
        """Look under ``stdlib``, by default the running interpreter's own library."""
        self.stdlib = stdlib or Path(sysconfig.get_path("stdlib"))

    def fingerprint(self) -> str:
        """Digest of the names and bytes of every file read, some 11 MB in 0.1 s."""
        digest = hashlib.sha256()
        for path in [self._topics_path(), *self._module_paths()]:
            name = path.relative_to(self.stdlib).as_posix()
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{name} {content}\n".encode())
        return digest.hexdigest()

    def documents(self) -> Iterator[str]:
        """Topics by name, then modules by path; those without a word are left out."""
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
