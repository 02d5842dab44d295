"""The keys that a release of DeepSpeed reads from its configuration, from the release's own source.

DeepSpeed has no list of its keys: part of them are fields of pydantic models, the others are looked
up by functions here and there. So the functions are followed from the place where the configuration
comes in, with what each of their variables holds of it; nothing of DeepSpeed is imported or run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_config.expressions import LOOKUPS, MODEL, UNKNOWN, Key, KeyFact, Module, Part, ReleaseFiles

_MAX_DEPTH = 12


def read_keys(package: Path) -> dict[Key, KeyFact]:
    """Every key of a release.

    Args:
        package: Its folder ``deepspeed``, installed or unpacked.

    Raises:
        FileNotFoundError: there is no ``runtime/config.py`` below it.
    """
    return _Reader(package).read()


class _Reader(ReleaseFiles):
    def __init__(self, package: Path) -> None:
        super().__init__(package)
        self.keys: dict[Key, KeyFact] = {}
        self._returned: dict[tuple[str, str], Any] = {}

    def read(self) -> dict[Key, KeyFact]:
        """Follow the configuration through DeepSpeedConfig."""
        _, config = self._class("DeepSpeedConfig")
        module = self._home("DeepSpeedConfig")
        for statement in config.body:
            if isinstance(statement, ast.FunctionDef):
                names = [a.arg for a in statement.args.args if a.arg in ("param_dict", "config")]
                held: dict[str, Any] = dict.fromkeys(names, Part(()))
                held["self._param_dict"] = Part(())
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

    def note(self, key: Key, fact: KeyFact) -> Part:
        """Keep a key; its default where no model says it."""
        known = self.keys.setdefault(key, fact)
        if known.default is None and not known.is_model:
            known.default = fact.default
        return Part(key)

    # Where it goes.

    def _follow(
        self,
        module: Module,
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
        module: Module,
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
                    returned = found if isinstance(found, Part) else returned
                continue
            for call in _calls_of(statement):
                self._call(module, owner, call, held, depth)
            for node in _expressions_of(statement):
                self._look(module, node, held)
            if isinstance(statement, ast.Assign):
                self._assign(module, owner, statement, held, depth)
            elif isinstance(statement, ast.Return):
                found = self._value(module, statement.value, held)
                returned = found if isinstance(found, Part) else returned
            for part in ("body", "orelse", "finalbody"):
                found = self._statements(module, owner, getattr(statement, part, []), held, depth)
                returned = found if isinstance(found, Part) else returned
        return returned

    def _assign(
        self,
        module: Module,
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
        if not isinstance(held.get(target), Part) or isinstance(value, Part):
            held[target] = value

    def _turns(
        self, module: Module, loop: ast.For, held: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        source = self._value(module, loop.iter, held)
        names = loop.target.elts if isinstance(loop.target, ast.Tuple) else [loop.target]
        if isinstance(source, Part):  # keys that are given replace those of a table of defaults
            for node in ast.walk(loop):
                if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                    table = self._value(module, node.value, held)
                    for key, default in table.items() if isinstance(table, dict) else ():
                        self._inside(source, key, default)
        turns = list(source) if isinstance(source, list | dict) else [UNKNOWN]
        yield from ({ast.unparse(names[0]): value} for value in turns)

    def _look(self, module: Module, node: ast.expr, held: dict[str, Any]) -> None:
        """Note the lookups in an expression."""
        for part in ast.walk(node):
            if isinstance(part, ast.Compare) and isinstance(part.ops[0], ast.In | ast.NotIn):
                name = self._value(module, part.left, held)
                self._inside(self._value(module, part.comparators[0], held), name)
            elif isinstance(part, ast.Subscript | ast.Call):
                self._value(module, part, held)

    def _call(
        self,
        module: Module,
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
                if isinstance(path, Part):
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
        if not any(isinstance(value, Part) for value in passed.values()):
            return UNKNOWN
        if function.name in LOOKUPS:
            return UNKNOWN
        return self._follow(home, inner_owner, function, passed, depth + 1)

    def _target(
        self, module: Module, owner: ast.ClassDef | None, function: ast.expr
    ) -> tuple[ast.FunctionDef | ast.ClassDef | None, ast.ClassDef | None, Module | None]:
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
            if isinstance(base, ast.Name) and base.id != MODEL and self._is_model(base.id):
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
        self, module: Module, statement: ast.AnnAssign, name: str
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
                    if isinstance(path, Part):
                        self._model(name, path.key)


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
