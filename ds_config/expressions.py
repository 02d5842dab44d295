"""What expressions of a release's source hold of the configuration, without running them.

Names are looked up in the constants of all the release's files that may read the configuration.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Key = tuple[str, ...]
"""A key with the blocks around it: ``("zero_optimization", "stage")``."""
UNKNOWN = object()
"""A value that only running the code would tell."""
LOOKUPS = ("get_scalar_param", "get_list_param", "get_dict_param")
MODEL = "DeepSpeedConfigModel"


@dataclass
class KeyFact:
    """What a release says of a key."""

    default: Any = None
    """None where the release has no constant for it."""
    type: str = ""
    """As the release's model declares it; empty for a key that is looked up by a function."""
    deprecated: bool = False
    replaced_by: str = ""
    """Key of the same block that took its place, if the release names one."""
    is_model: bool = False
    """A field of a pydantic model, whose siblings are known in full: any other raises an error."""
    removed: bool = False
    """The release knows the key only to refuse it."""
    limits: dict[str, float] = field(default_factory=dict)
    """Bounds of the value: ``ge``, ``gt``, ``le``, ``lt``."""
    choices: list[Any] = field(default_factory=list)
    """Values of an enumeration."""


@dataclass(frozen=True)
class Part:
    """The part of the configuration that an expression holds."""

    key: Key


@dataclass
class Module:
    """One file: what its names stand for."""

    constants: dict[str, Any] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)


class ReleaseFiles(ABC):
    """The files of a release that may read its configuration, and what their expressions hold."""

    def __init__(self, package: Path) -> None:
        if not (package / "runtime" / "config.py").is_file():
            raise FileNotFoundError(package / "runtime" / "config.py")
        self._modules = {path: Module() for path in _config_files(package)}
        self._everywhere: dict[str, Any] = {}
        for _ in range(2):  # a constant may be made of one of a module that is read later
            for path, module in self._modules.items():
                self._read_module(module, ast.parse(path.read_text(encoding="utf-8")))

    @abstractmethod
    def note(self, key: Key, fact: KeyFact) -> Part:
        """Take notice of a key that an expression looks up."""

    def _read_module(self, module: Module, tree: ast.Module) -> None:
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                module.functions[node.name] = node
            elif isinstance(node, ast.ClassDef):
                module.classes[node.name] = node
                for inner in node.body:
                    if isinstance(inner, ast.Assign) and isinstance(inner.targets[0], ast.Name):
                        name = f"{node.name}.{inner.targets[0].id}"
                        module.constants[name] = self._value(module, inner.value, {})
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                module.constants[name] = self._value(module, node.value, {})
        for name, value in module.constants.items():
            if value is not UNKNOWN:
                self._everywhere[name] = value

    def _class(self, name: str) -> tuple[Module, ast.ClassDef]:
        for module in self._modules.values():
            if name in module.classes:
                return module, module.classes[name]
        raise LookupError(name)

    def _home(self, name: str) -> Module:
        return self._class(name)[0]

    def _is_model(self, name: str) -> bool:
        try:
            _, node = self._class(name)
        except LookupError:
            return False
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        return MODEL in bases or any(self._is_model(base) for base in bases if base != name)

    # What an expression holds.

    def _value(self, module: Module, node: ast.expr | None, held: dict[str, Any]) -> Any:  # noqa: ANN401
        """A constant, a :class:`Part`, or UNKNOWN."""
        match node:
            case None:
                return UNKNOWN
            case ast.Constant(value=value):
                return value
            case ast.Name(id=name):
                known = {**self._everywhere, **module.constants}
                return held.get(name, known.get(name, UNKNOWN))
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                return held.get(f"self.{name}", UNKNOWN)
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                return self._everywhere.get(f"{owner}.{name}", UNKNOWN)
            case ast.Attribute(value=ast.Attribute() | ast.Name(), attr="value"):
                return self._value(module, node.value, held)
            case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
                values = [self._value(module, part, held) for part in parts]
                return UNKNOWN if UNKNOWN in values else values
            case ast.Dict():
                return {
                    str(self._value(module, key, held)): self._value(module, value, held)
                    for key, value in zip(node.keys, node.values, strict=True)
                }
            case ast.DictComp(
                generators=[ast.comprehension(target=ast.Name(id=name), iter=source)]
            ):
                turns = self._value(module, source, held)
                return {
                    turn: self._value(module, node.value, {**held, name: turn})
                    for turn in (turns if isinstance(turns, list) else [])
                }
        return self._computed(module, node, held)

    def _computed(self, module: Module, node: ast.expr, held: dict[str, Any]) -> Any:  # noqa: ANN401
        match node:
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                value = self._value(module, operand, held)
                return -value if isinstance(value, int | float) else UNKNOWN
            case ast.BinOp(left=left, op=op, right=right):
                return _arithmetic(
                    op, self._value(module, left, held), self._value(module, right, held)
                )
            case ast.Subscript(value=owner, slice=index):
                return self._inside(
                    self._value(module, owner, held), self._value(module, index, held)
                )
            case ast.Call():
                return self._result(module, node, held)
        return UNKNOWN

    def _result(self, module: Module, call: ast.Call, held: dict[str, Any]) -> Any:  # noqa: ANN401
        arguments = [self._value(module, argument, held) for argument in call.args]
        match call.func:
            case ast.Attribute(value=owner, attr="get"):
                return self._inside(self._value(module, owner, held), *arguments)
            case ast.Attribute(value=owner, attr="keys" | "items" | "copy"):
                return self._value(module, owner, held)
            case ast.Attribute(value=ast.Name(id="copy"), attr="copy" | "deepcopy"):
                return arguments[0] if arguments else UNKNOWN
            case ast.Name(id="int" | "float" | "pp_int" | "list" | "dict") if arguments:
                return arguments[0]
            case ast.Name(id=name) if name in LOOKUPS and len(arguments) == 3:
                return self._inside(*arguments)
        return UNKNOWN

    def _inside(self, owner: Any, name: Any = UNKNOWN, default: Any = None) -> Any:  # noqa: ANN401
        """What lies under a name; a lookup in the configuration is noted."""
        if isinstance(owner, Part) and isinstance(name, str):
            return self.note((*owner.key, name), KeyFact(_plain(default)))
        return UNKNOWN

    def _default(self, module: Module, node: ast.expr | None) -> Any:  # noqa: ANN401
        if isinstance(node, ast.Attribute):
            inside = self._everywhere.get(ast.unparse(node), UNKNOWN)
            return _plain(inside)
        return _plain(self._value(module, node, {}))


def _config_files(package: Path) -> list[Path]:
    """Files that may read the configuration: those whose name says so, the nearest first."""
    names = ("config", "constants", "offload", "compiler")
    found = [path for path in package.rglob("*.py") if any(n in path.name for n in names)]
    skipped = (
        "inference",
        "model_implementations",
        "ops",
        "launcher",
        "autotuning/config_templates",
    )
    kept = [p for p in found if not p.relative_to(package).as_posix().startswith(skipped)]
    return sorted(kept, key=lambda path: (len(path.parts), path))


def _arithmetic(op: ast.operator, left: Any, right: Any) -> Any:  # noqa: ANN401
    if not isinstance(left, int | float) or not isinstance(right, int | float):
        return UNKNOWN
    match op:
        case ast.Add():
            return left + right
        case ast.Mult():
            return left * right
        case ast.Pow():
            return left**right
        case ast.Div():
            return left / right
    return UNKNOWN


def _plain(value: Any) -> Any:  # noqa: ANN401
    """A default as JSON holds it."""
    if value is UNKNOWN or isinstance(value, Part):
        return None
    if isinstance(value, dict):
        return None if any(item is UNKNOWN for item in value.values()) else value
    return value
