"""The keys that a release of DeepSpeed reads from its configuration, from the release's own source.

DeepSpeed has no list of its keys: part of them are fields of pydantic models, the others are looked
up by functions here and there. So the functions are followed from the place where the configuration
comes in, with what each of their variables holds of it; nothing of DeepSpeed is imported or run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Key = tuple[str, ...]
"""A key with the blocks around it: ``("zero_optimization", "stage")``."""
UNKNOWN = object()
"""A value that only running the code would tell."""
_MODEL = "DeepSpeedConfigModel"
_LOOKUPS = ("get_scalar_param", "get_list_param", "get_dict_param")
_MAX_DEPTH = 12


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
class _Path:
    """The part of the configuration that an expression holds."""

    key: Key


@dataclass
class _Module:
    constants: dict[str, Any] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)


def read_keys(package: Path) -> dict[Key, KeyFact]:
    """Every key of a release.

    Args:
        package: Its folder ``deepspeed``, installed or unpacked.

    Raises:
        FileNotFoundError: there is no ``runtime/config.py`` below it.
    """
    return _Reader(package).read()


class _Reader:
    def __init__(self, package: Path) -> None:
        if not (package / "runtime" / "config.py").is_file():
            raise FileNotFoundError(package / "runtime" / "config.py")
        self.keys: dict[Key, KeyFact] = {}
        self._modules = {path: _Module() for path in _config_files(package)}
        self._everywhere: dict[str, Any] = {}
        self._returned: dict[tuple[str, str], Any] = {}
        for _ in range(2):  # a constant may be made of one of a module that is read later
            for path, module in self._modules.items():
                self._read_module(module, ast.parse(path.read_text(encoding="utf-8")))

    def read(self) -> dict[Key, KeyFact]:
        """Follow the configuration through DeepSpeedConfig."""
        _, config = self._class("DeepSpeedConfig")
        module = self._home("DeepSpeedConfig")
        for statement in config.body:
            if isinstance(statement, ast.FunctionDef):
                names = [a.arg for a in statement.args.args if a.arg in ("param_dict", "config")]
                held: dict[str, Any] = dict.fromkeys(names, _Path(()))
                held["self._param_dict"] = _Path(())
                self._follow(module, config, statement, held, 0)
        self._mark_removed()
        for key in [key for key in self.keys if key[0] == "bfloat16"]:
            # The older name of the block, which is still read; the newer one is `bf16`.
            self.keys[("bf16", *key[1:])] = self.keys[key]
        return self.keys

    def _mark_removed(self) -> None:
        blocks = {
            "_REMOVED_TOP_LEVEL_CONFIG_KEYS": (),
            "_REMOVED_ZERO_CONFIG_KEYS": ("zero_optimization",),
        }
        for table, block in blocks.items():
            for name in self._everywhere.get(table, ()):
                self.keys[(*block, name)].removed = True

    # What the files say.

    def _read_module(self, module: _Module, tree: ast.Module) -> None:
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

    def _class(self, name: str) -> tuple[_Module, ast.ClassDef]:
        for module in self._modules.values():
            if name in module.classes:
                return module, module.classes[name]
        raise LookupError(name)

    def _home(self, name: str) -> _Module:
        return self._class(name)[0]

    def _is_model(self, name: str) -> bool:
        try:
            _, node = self._class(name)
        except LookupError:
            return False
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        return _MODEL in bases or any(self._is_model(base) for base in bases if base != name)

    # What an expression holds.

    def _value(self, module: _Module, node: ast.expr | None, held: dict[str, Any]) -> Any:  # noqa: ANN401
        """A constant, a :class:`_Path`, or UNKNOWN."""
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

    def _computed(self, module: _Module, node: ast.expr, held: dict[str, Any]) -> Any:  # noqa: ANN401
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

    def _result(self, module: _Module, call: ast.Call, held: dict[str, Any]) -> Any:  # noqa: ANN401
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
            case ast.Name(id=name) if name in _LOOKUPS and len(arguments) == 3:
                return self._inside(*arguments)
        return UNKNOWN

    def _inside(self, owner: Any, name: Any = UNKNOWN, default: Any = None) -> Any:  # noqa: ANN401
        """What lies under a name; a lookup in the configuration is noted."""
        if isinstance(owner, _Path) and isinstance(name, str):
            return self._note((*owner.key, name), KeyFact(_plain(default)))
        return UNKNOWN

    def _note(self, key: Key, fact: KeyFact) -> _Path:
        known = self.keys.setdefault(key, fact)
        if known.default is None and not known.is_model:
            known.default = fact.default
        return _Path(key)

    # Where it goes.

    def _follow(
        self,
        module: _Module,
        owner: ast.ClassDef | None,
        function: ast.FunctionDef,
        held: dict[str, Any],
        depth: int,
    ) -> Any:  # noqa: ANN401
        """Read a function with what its arguments hold; what it returns of the configuration."""
        name = f"{id(module)}.{owner.name if owner else ''}.{function.name}"
        mark = (name, repr(sorted(held.items(), key=lambda item: item[0])))
        if mark not in self._returned and depth < _MAX_DEPTH:
            self._returned[mark] = UNKNOWN
            self._returned[mark] = self._statements(module, owner, function.body, held, depth)
        return self._returned.get(mark, UNKNOWN)

    def _statements(
        self,
        module: _Module,
        owner: ast.ClassDef | None,
        body: list[ast.stmt],
        held: dict[str, Any],
        depth: int,
    ) -> Any:  # noqa: ANN401
        returned = UNKNOWN
        for statement in body:
            if isinstance(statement, ast.For):
                for values in self._turns(module, statement, held):
                    inner = {**held, **values}
                    found = self._statements(module, owner, statement.body, inner, depth)
                    returned = found if isinstance(found, _Path) else returned
                continue
            for call in _calls_of(statement):
                self._call(module, owner, call, held, depth)
            for node in _expressions_of(statement):
                self._look(module, node, held)
            if isinstance(statement, ast.Assign):
                self._assign(module, owner, statement, held, depth)
            elif isinstance(statement, ast.Return):
                found = self._value(module, statement.value, held)
                returned = found if isinstance(found, _Path) else returned
            for part in ("body", "orelse", "finalbody"):
                found = self._statements(module, owner, getattr(statement, part, []), held, depth)
                returned = found if isinstance(found, _Path) else returned
        return returned

    def _assign(
        self,
        module: _Module,
        owner: ast.ClassDef | None,
        statement: ast.Assign,
        held: dict[str, Any],
        depth: int,
    ) -> None:
        target = ast.unparse(statement.targets[0])
        value = self._value(module, statement.value, held)
        if value is UNKNOWN and isinstance(statement.value, ast.Call):
            value = self._call(module, owner, statement.value, held, depth)
        # The branch for a configuration without a block does not hide the one for it.
        if not isinstance(held.get(target), _Path) or isinstance(value, _Path):
            held[target] = value

    def _turns(
        self, module: _Module, loop: ast.For, held: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        source = self._value(module, loop.iter, held)
        names = loop.target.elts if isinstance(loop.target, ast.Tuple) else [loop.target]
        if isinstance(source, _Path):  # keys that are given replace those of a table of defaults
            for node in ast.walk(loop):
                if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                    table = self._value(module, node.value, held)
                    for key, default in table.items() if isinstance(table, dict) else ():
                        self._inside(source, key, default)
        turns = list(source) if isinstance(source, list | dict) else [UNKNOWN]
        yield from ({ast.unparse(names[0]): value} for value in turns)

    def _look(self, module: _Module, node: ast.expr, held: dict[str, Any]) -> None:
        """Note the lookups in an expression."""
        for part in ast.walk(node):
            if isinstance(part, ast.Compare) and isinstance(part.ops[0], ast.In | ast.NotIn):
                name = self._value(module, part.left, held)
                self._inside(self._value(module, part.comparators[0], held), name)
            elif isinstance(part, ast.Subscript | ast.Call):
                self._value(module, part, held)

    def _call(
        self,
        module: _Module,
        owner: ast.ClassDef | None,
        call: ast.Call,
        held: dict[str, Any],
        depth: int,
    ) -> Any:  # noqa: ANN401
        """Go into a function or class that is handed a part of the configuration."""
        starred = [self._value(module, k.value, held) for k in call.keywords if k.arg is None]
        values = [self._value(module, argument, held) for argument in call.args]
        named = {k.arg: self._value(module, k.value, held) for k in call.keywords if k.arg}
        function, inner_owner, home = self._target(module, owner, call.func)
        if isinstance(function, ast.ClassDef):
            for path in starred:
                if isinstance(path, _Path):
                    self._model(function.name, path.key)
                    return path
                if isinstance(path, dict):
                    self._model_of_blocks(function, path)
            inner_owner, values = function, [UNKNOWN, *values]
            function = _method(inner_owner, "__init__")
        elif isinstance(function, ast.FunctionDef) and inner_owner is not None:
            values = [UNKNOWN, *values]
        if not isinstance(function, ast.FunctionDef) or home is None:
            return UNKNOWN
        names = [argument.arg for argument in function.args.args]
        defaults = function.args.defaults
        given = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
        bound = {name: self._value(home, node, {}) for name, node in given.items()}
        bound |= {**dict(zip(names, values, strict=False)), **named}
        passed = {name: value for name, value in bound.items() if value is not UNKNOWN}
        if not any(isinstance(value, _Path) for value in passed.values()):
            return UNKNOWN
        if function.name in _LOOKUPS:
            return UNKNOWN
        return self._follow(home, inner_owner, function, passed, depth + 1)

    def _target(
        self, module: _Module, owner: ast.ClassDef | None, function: ast.expr
    ) -> tuple[ast.FunctionDef | ast.ClassDef | None, ast.ClassDef | None, _Module | None]:
        match function:
            case ast.Attribute(value=ast.Name(id="self"), attr=name) if owner is not None:
                return _method(owner, name), owner, module
            case ast.Name(id=name):
                for home in (module, *self._modules.values()):
                    if name in home.functions:
                        return home.functions[name], None, home
                    if name in home.classes:
                        return home.classes[name], None, home
        return None, None, None

    def _model(self, name: str, key: Key) -> None:
        """Note the fields of a pydantic model, and of those that it holds."""
        module, node = self._class(name)
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id != _MODEL and self._is_model(base.id):
                self._model(base.id, key)
        for statement in node.body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(
                statement.target, ast.Name
            ):
                continue
            fact, names = self._field(module, statement, statement.target.id)
            fact.choices = self._choices(statement.annotation)
            for word in names:
                self.keys[(*key, word)] = fact
            for inner in ast.walk(statement.annotation):
                if isinstance(inner, ast.Name) and self._is_model(inner.id):
                    self._model(inner.id, (*key, names[0]))

    def _field(
        self, module: _Module, statement: ast.AnnAssign, name: str
    ) -> tuple[KeyFact, list[str]]:
        """What a model says of a field, and the names by which it takes it, its alias first."""
        annotation = ast.unparse(statement.annotation)
        fact = KeyFact(type=annotation, is_model=True)
        names = [name]
        value = statement.value
        if isinstance(value, ast.Call) and ast.unparse(value.func) == "Field":
            words = {k.arg: k.value for k in value.keywords}
            if value.args:
                fact.default = self._default(module, value.args[0])
            elif "default" in words:
                fact.default = self._default(module, words["default"])
            limits = {n: self._value(module, words.get(n), {}) for n in ("ge", "gt", "le", "lt")}
            fact.limits = {n: v for n, v in limits.items() if isinstance(v, int | float)}
            alias = self._value(module, words.get("alias"), {})
            # The model takes a field by its own name as well as by its alias.
            names = [alias, *names] if isinstance(alias, str) else names
            extra = self._value(module, words.get("json_schema_extra"), {})
            extra = extra if isinstance(extra, dict) else {}
            for word in ("deprecated", "new_param"):
                if word in words:
                    extra[word] = self._value(module, words[word], {})
            fact.deprecated = extra.get("deprecated") is True
            fact.replaced_by = extra["new_param"] if isinstance(extra.get("new_param"), str) else ""
        else:
            fact.default = self._default(module, value)
        return fact, names

    def _choices(self, annotation: ast.expr) -> list[Any]:
        """Values of the enumeration or literal that a field is declared as."""
        if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal":
            found = ast.literal_eval(annotation.slice)
            return list(found) if isinstance(found, tuple) else [found]
        try:
            _, node = self._class(ast.unparse(annotation))
        except LookupError:
            return []
        if not any(ast.unparse(base) == "Enum" for base in node.bases):
            return []
        values = [
            self._everywhere.get(f"{node.name}.{inner.targets[0].id}")
            for inner in node.body
            if isinstance(inner, ast.Assign) and isinstance(inner.targets[0], ast.Name)
        ]
        return [value for value in values if isinstance(value, str | int)]

    def _model_of_blocks(self, node: ast.ClassDef, blocks: dict[str, Any]) -> None:
        """Note a model whose fields are blocks that were looked up one by one."""
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                path = blocks.get(statement.target.id)
                names = [n.id for n in ast.walk(statement.annotation) if isinstance(n, ast.Name)]
                for name in filter(self._is_model, names):
                    if isinstance(path, _Path):
                        self._model(name, path.key)

    def _default(self, module: _Module, node: ast.expr | None) -> Any:  # noqa: ANN401
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


def _method(owner: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == name), None)


def _expressions_of(statement: ast.stmt) -> Iterator[ast.expr]:
    """The expressions of a statement itself, without those of the statements in it."""
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr):
            yield child


def _calls_of(statement: ast.stmt) -> Iterator[ast.Call]:
    for expression in _expressions_of(statement):
        yield from (node for node in ast.walk(expression) if isinstance(node, ast.Call))


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
    if value is UNKNOWN or isinstance(value, _Path):
        return None
    if isinstance(value, dict):
        return None if any(item is UNKNOWN for item in value.values()) else value
    return value
