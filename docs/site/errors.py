"""The page of errors: every text that the code can answer with, below its cause and its cure.

Causes and cures are the docstrings of `penstock.pipeline.errors`.  The texts are the messages in the source, in which
``…`` stands for a value.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from docs.site.gather import ROOT
from penstock.pipeline import errors
from penstock.pipeline.errors import CannotRun, CannotStart, StageError

HEAD = """# Errors

Copy a few words of a message into the search of this site, without its names and numbers. `…` stands for a value.

The answer of an error is `{"error": {"message", "type", "param", "code"}}`, and `param` names the parameter to change.
Errors of fields that have the wrong type are not listed: their message names what is expected.
"""
OPERATORS = (CannotStart, CannotRun)
"""Errors of commands, which no client gets."""

_CURE = "Cure: "


@dataclass(frozen=True)
class Text:
    """A message in the source."""

    error: str
    message: str
    param: str
    code: str


def kinds() -> list[type[StageError]]:
    """Return the errors that clients get, in the order of their module."""
    found = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, StageError)]
    return [kind for kind in found if kind is not StageError]


def cause_and_cure(kind: type[Exception]) -> tuple[str, str]:
    """Return two paragraphs of an error's docstring: the first, and the one with the cure; "" without one."""
    cause, *others = inspect.cleandoc(vars(kind).get("__doc__") or "").split("\n\n")
    cures = [part.removeprefix(_CURE) for part in others if part.startswith(_CURE)]
    cure = " ".join(cures[0].split()) if cures else ""
    return " ".join(cause.split()), cure[:1].upper() + cure[1:]


@cache
def texts() -> list[Text]:
    """Find the messages of all errors in the source."""
    names = {kind.__name__ for kind in (*kinds(), *OPERATORS)}
    modules = sorted(
        path
        for folder in ("api", "extensions", "pipeline", "services", "stages", "testing")
        for path in (ROOT / folder).rglob("*.py")
    )
    sources = [source for path in modules if any(name in (source := path.read_text()) for name in names)]
    found = [text for source in sources for text in _texts_of(ast.parse(source), names)]
    return sorted(set(found), key=lambda text: (text.message, text.param))


def _texts_of(module: ast.Module, names: set[str]) -> Iterator[Text]:
    for function in ast.walk(module):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        named = _assigned(function)
        for call in ast.walk(function):
            if isinstance(call, ast.Call) and (name := ast.unparse(call.func).rpartition(".")[2]) in names:
                given = {keyword.arg: _text(keyword.value, {}) for keyword in call.keywords}
                for argument in call.args[:1]:
                    if _is_told(message := _text(argument, named)):
                        yield Text(name, message, given.get("param", ""), given.get("code", ""))
    for kind in (node for node in ast.walk(module) if isinstance(node, ast.ClassDef) and node.name in names):
        yield from _own_texts(kind)


def _own_texts(kind: ast.ClassDef) -> Iterator[Text]:
    """Find the message that the constructor of an error writes."""
    for start in (node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"):
        named = _assigned(start)
        for call in ast.walk(start):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__" and call.args:
                given = {keyword.arg: _text(keyword.value, {}) for keyword in call.keywords}
                if _is_told(message := _text(call.args[0], named)):
                    yield Text(kind.name, message, given.get("param", ""), given.get("code", ""))


def _is_told(message: str) -> bool:
    """Return True if a message has words to search for."""
    return len(re.findall(r"[a-z]{2,}", message)) > 1


def _assigned(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, ast.expr]:
    """Return the values of the names to which a function assigns once."""
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values.setdefault(node.targets[0].id, []).append(node.value)
    return {name: found[0] for name, found in values.items() if len(found) == 1}


def _text(value: ast.expr, named: dict[str, ast.expr]) -> str:
    """Return the text of an expression, with ``…`` for what only a request decides."""
    match value:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, {}) for part in parts)
        case ast.Name(id=name) if name in named:
            return _text(named[name], {})
        case ast.Constant(value=None):
            return ""
        case _:
            return "…"


def errors_page() -> str:
    """Return the page of errors."""
    all_texts = texts()
    clients = "".join(_section(kind, all_texts) for kind in kinds())
    operators = "".join(_section(kind, all_texts) for kind in OPERATORS)
    return f"{HEAD}\n## Errors that clients get\n\n{clients}## Errors of commands\n\n{operators}"


def _section(kind: type[Exception], all_texts: list[Text]) -> str:
    cause, cure = cause_and_cure(kind)
    wire = _wire(kind) if issubclass(kind, StageError) else ""
    rows = [text for text in all_texts if text.error == kind.__name__]
    columns = [("text", [_cell(text.message) for text in rows])]
    columns += [("`param`", [_code(text.param) for text in rows]), ("`code`", [_code(text.code) for text in rows])]
    cured = f"**Cure.** {_plain(cure)}\n\n" if cure else ""
    return f"### {kind.__name__}\n\n{wire}**Cause.** {_plain(cause)}\n\n{cured}{_table(columns)}"


def _table(columns: list[tuple[str, list[str]]]) -> str:
    """Return a table of the columns that have any value."""
    filled = [(name, cells) for name, cells in columns if any(cells)]
    if not filled:
        return ""
    lines = [[name for name, _ in filled], ["---"] * len(filled), *zip(*(cells for _, cells in filled), strict=True)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def _wire(kind: type[StageError]) -> str:
    return f"Status {kind.status}, type `{kind.type}`, code {_code(kind.code or '') or 'null'}.\n\n"


def _plain(prose: str) -> str:
    return prose.replace("``", "`")


def _cell(text: str) -> str:
    escaped = (
        text.replace("\\", "\\\\").replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")
    )
    return " ".join(escaped.replace("`", "").split())


def _code(text: str) -> str:
    return f"`{text}`" if text.strip("…") else ""
