"""Mutants of the product: list them all, choose some by a seed, and build the mutated tree of one.

A mutant changes one node inside a function.  Its id is made of the folder, the function, the source of the node, and
the source that replaces it.  So it survives when lines move and when a module is renamed.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

from tests.support.paths import PRODUCT

PER_FOLDER = 6
PER_FUNCTION = 2
SEED = 15

Slot: TypeAlias = tuple[ast.AST, str, int | None]
"""The place of a node: its parent, the field there, and the index if the field is a list."""

Span: TypeAlias = tuple[int, int]
"""First and last line."""

SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.Break: ast.Continue,
    ast.Continue: ast.Break,
}

NEGATED = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
"""Comparisons whose swap is their negation."""

EMPTY = {"str": "''", "bytes": "b''", "list": "[]", "tuple": "()", "dict": "{}", "int": "0", "float": "0.0"}
"""The value that is returned instead, by the type that the function returns."""

UNTOUCHED = re.compile(r"#.*(\bpragma\b|type: ignore|pyright:|noqa|fmt:)|\bassert_never\(")
LOG = re.compile(r"_?log(ger|ging)?\.(debug|info|warning|error|exception|critical|log)")


@dataclass(frozen=True)
class Mutant:
    folder: str
    function: str
    kind: str
    old: str
    new: str
    number: int
    """Its number among the mutants of the function that are alike."""
    path: str
    span: Span
    """The lines of the statement that is changed."""

    @property
    def id(self) -> str:
        return f"{self.folder} {self.function}: {self.old} -> {self.new} #{self.number}"


@dataclass(frozen=True)
class Site:
    slot: Slot
    kind: str
    old: ast.AST
    new: ast.AST
    function: str
    span: Span


@dataclass(frozen=True)
class Scope:
    name: str = ""
    returns: str | None = None
    """The type that the function returns; nothing outside of functions."""
    span: Span = (0, 0)

    def inside(self, name: str, returns: str | None = None) -> Scope:
        return Scope(f"{self.name}.{name}".lstrip("."), returns)

    def at(self, span: Span) -> Scope:
        return Scope(self.name, self.returns, span)


def product(root: Path) -> list[Mutant]:
    """Return every mutant of the product, except those whose id also occurs in another module."""
    paths = [root / "server.py", *(path for folder in PRODUCT for path in sorted((root / folder).rglob("*.py")))]
    named = [(path, str(path.relative_to(root))) for path in paths]
    mutants = [mutant for path, name in named for mutant in mutants_of(path.read_text("utf-8"), folder_of(name), name)]
    times = Counter(mutant.id for mutant in mutants)
    return [mutant for mutant in mutants if times[mutant.id] == 1]


def folder_of(path: str) -> str:
    """Return the folder of a module that is sampled: its room, such as ``stages/parse``."""
    return "/".join(path.split("/")[:-1][:2]) or "server"


def mutants_of(source: str, folder: str, path: str) -> Iterator[Mutant]:
    lines = source.splitlines()
    for mutant, _ in _numbered(ast.parse(source), folder, path):
        first, last = mutant.span
        if not any(UNTOUCHED.search(line) for line in lines[first - 1 : last]):
            yield mutant


def mutated(source: str, mutant: Mutant) -> ast.Module:
    tree = ast.parse(source)
    for found, site in _numbered(tree, mutant.folder, mutant.path):
        if found.id == mutant.id:
            _replace(site.slot, ast.copy_location(site.new, site.old))
            return ast.fix_missing_locations(tree)
    raise LookupError(mutant.id)


def chosen(mutants: Iterable[Mutant], per_folder: int = PER_FOLDER, seed: int = SEED) -> list[Mutant]:
    """Choose up to ``per_folder`` mutants of each folder, of all kinds in turn, and few of each function."""
    by_folder: dict[str, dict[str, list[Mutant]]] = defaultdict(lambda: defaultdict(list))
    for mutant in sorted(mutants, key=lambda mutant: sha256(f"{seed} {mutant.id}".encode()).digest()):
        by_folder[mutant.folder][mutant.kind].append(mutant)
    return [
        mutant for _, kinds in sorted(by_folder.items()) for mutant in _spread(dict(sorted(kinds.items())), per_folder)
    ]


def _spread(kinds: dict[str, list[Mutant]], count: int) -> list[Mutant]:
    result: list[Mutant] = []
    used: Counter[tuple[str, str]] = Counter()
    for mutant in (mutant for row in zip_longest(*kinds.values()) for mutant in row if mutant):
        if len(result) < count and used[mutant.path, mutant.function] < PER_FUNCTION:
            used[mutant.path, mutant.function] += 1
            result.append(mutant)
    return result


def _numbered(tree: ast.Module, folder: str, path: str) -> Iterator[tuple[Mutant, Site]]:
    seen: Counter[tuple[str, str, str]] = Counter()
    for site in _sites(tree, Scope()):
        old, new = ast.unparse(site.old), ast.unparse(site.new)
        if old != new:
            key = site.function, old, new
            yield Mutant(folder, site.function, site.kind, old, new, seen[key], path, site.span), site
            seen[key] += 1


def _sites(node: ast.AST, scope: Scope) -> Iterator[Site]:
    for field, index, child in _children(node):
        inner = _scope(child, scope)
        if inner.returns is not None:
            for kind, new in _changes(child, inner, is_test=_is_test(node, field)):
                yield Site((node, field, index), kind, child, new, inner.name, inner.span)
        yield from _sites(child, inner)


def _children(node: ast.AST) -> Iterator[tuple[str, int | None, ast.AST]]:
    for field in _fields(node):
        value = getattr(node, field)
        if isinstance(value, ast.AST):
            yield field, None, value
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, ast.AST) and not _is_left_alone(node, field, index, item):
                    yield field, index, item


def _fields(node: ast.AST) -> tuple[str, ...]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Module():
            return ("body",)
        case ast.AnnAssign() | ast.FormattedValue():
            return ("value",)
        case ast.match_case():
            return ("guard", "body")
        case ast.Assert() | ast.Import() | ast.ImportFrom():
            return ()
        case _:
            return node._fields


def _is_left_alone(node: ast.AST, field: str, index: int, item: ast.AST) -> bool:
    """Return true for docstrings, the text of f-strings, log messages, and types passed as arguments."""
    match node, item:
        case _, ast.Expr(value=ast.Constant()):
            return True
        case _, ast.Expr(value=ast.Call(func=called)):
            return LOG.fullmatch(ast.unparse(called)) is not None
        case ast.JoinedStr(), ast.Constant():
            return True
        case ast.Call(func=ast.Name(id="cast")), _:
            return field == "args" and index == 0
        case ast.Call(func=ast.Name(id="isinstance")), _:
            return field == "args" and index == 1
        case _:
            return False


def _scope(node: ast.AST, scope: Scope) -> Scope:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return scope.inside(node.name, ast.unparse(node.returns) if node.returns else "")
        case ast.ClassDef():
            return scope.inside(node.name)
        case ast.match_case(guard=ast.expr() as guard):
            return scope.at((node.pattern.lineno, guard.end_lineno or guard.lineno))
        case ast.stmt():
            body = getattr(node, "body", None) or getattr(node, "cases", None)
            last = _first_line(body[0]) - 1 if body else node.end_lineno or node.lineno
            return scope.at((node.lineno, max(node.lineno, last)))
        case _:
            return scope


def _first_line(node: ast.stmt | ast.match_case) -> int:
    return node.pattern.lineno if isinstance(node, ast.match_case) else node.lineno


def _is_test(node: ast.AST, field: str) -> bool:
    """Return true if the child is a condition that decides a branch."""
    match node:
        case ast.If() | ast.IfExp() | ast.While():
            return field == "test"
        case ast.comprehension():
            return field == "ifs"
        case ast.match_case():
            return field == "guard"
        case _:
            return False


def _changes(node: ast.AST, scope: Scope, *, is_test: bool) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.stmt):
        yield from _changed_statements(node, scope)
    elif isinstance(node, ast.expr):
        if is_test:
            yield from _negations(node)
        yield from _changed_constants(node)
        yield from _changed_operators(node)
        yield from _changed_bounds(node)


def _changed_statements(node: ast.stmt, scope: Scope) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.Return(value=ast.expr() as value) if scope.returns == "bool":
            yield from ((kind, ast.Return(new)) for kind, new in _negations(value))
        case ast.Return(value=ast.expr()):
            empty = EMPTY.get((scope.returns or "").partition("[")[0], "None")
            yield "return", ast.Return(ast.parse(empty, mode="eval").body)
        case ast.Break() | ast.Continue():
            yield "statement", _swapped(node)
        case ast.Expr() | ast.Raise() | ast.Delete():
            yield "statement", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if not scope.name.endswith("__init__"):
            yield "statement", ast.Pass()
        case ast.AugAssign():
            yield "statement", ast.Pass()
            yield "arithmetic", ast.AugAssign(node.target, _swapped(node.op), node.value)
        case _:
            pass


def _changed_constants(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Constant(value=bool() as value):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=(int() | float()) as value):
            yield "constant", ast.Constant(value + 1)
        case ast.Constant(value=str() as value):
            yield "constant", ast.Constant(value + "~")
        case ast.Constant(value=bytes() as value):
            yield "constant", ast.Constant(value + b"~")
        case _:
            pass


def _changed_operators(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Compare(ops=operators):
            for index, operator in enumerate(operators):
                swapped = [*operators[:index], _swapped(operator), *operators[index + 1 :]]
                yield "comparison", ast.Compare(node.left, swapped, node.comparators)
        case ast.BoolOp():
            yield "boolean", ast.BoolOp(_swapped(node.op), node.values)
        case ast.UnaryOp(op=ast.Not()):
            yield "condition", node.operand
        case ast.BinOp():
            yield "arithmetic", ast.BinOp(node.left, _swapped(node.op), node.right)
        case _:
            pass


def _changed_bounds(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield off-by-one changes of slice bounds and of lengths; a bound that is a constant is changed by itself."""
    match node:
        case ast.Slice(lower=lower, upper=upper):
            if lower and not isinstance(lower, ast.Constant) and not _is_length(lower):
                yield "bound", ast.Slice(_one_more(lower), upper, node.step)
            if upper and not isinstance(upper, ast.Constant) and not _is_length(upper):
                yield "bound", ast.Slice(lower, _one_more(upper), node.step)
        case ast.Call() if _is_length(node):
            yield "bound", _one_more(node)
        case _:
            pass


def _negations(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield the negation of a condition, unless another change has the same effect."""
    match node:
        case ast.UnaryOp(op=ast.Not()) | ast.Constant():
            pass
        case ast.Compare(ops=[operator]) if isinstance(operator, NEGATED):
            pass
        case _:
            yield "condition", ast.UnaryOp(ast.Not(), node)


def _swapped(node: ast.AST) -> Any:
    """Return the opposite of an operator; an operator without an opposite is returned unchanged."""
    return SWAPPED.get(type(node), type(node))()


def _is_length(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"


def _one_more(node: ast.expr) -> ast.BinOp:
    return ast.BinOp(node, ast.Add(), ast.Constant(1))


def _replace(slot: Slot, new: ast.AST) -> None:
    parent, field, index = slot
    if index is None:
        setattr(parent, field, new)
    else:
        getattr(parent, field)[index] = new
