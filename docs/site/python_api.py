"""The page of the Python API: every name that a page of the repository, or a file that it shows, imports from penstock.

Signatures and docstrings are those of the source.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from docs.site.gather import PAGES

HEAD = """# Python API

Names that the pages of this site import from `penstock`, with the docstrings of the source.
"""
_BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"^The file: \[.+\]\((.+\.py)\)\.$", re.MULTILINE)
"""A link of a page to a file that is too long to be shown."""

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


def documented(pages: Iterable[Path] = PAGES) -> dict[str, set[str]]:
    """Return the names that the code on the pages and in their files imports, by module."""
    found: dict[str, set[str]] = {}
    for page in pages:
        text = page.read_text()
        files = ((page.parent / file).read_text() for file in FILE.findall(text))
        for code in (*(block for _, block in _BLOCK.findall(text)), *files):
            for node in _imports(code):
                found.setdefault(str(node.module), set()).update(alias.name for alias in node.names)
    return found


def _imports(code: str) -> Iterator[ast.ImportFrom]:
    try:
        parsed = ast.parse(textwrap.dedent(code), mode="exec")
    except SyntaxError:  # a part of a program
        return
    for node in ast.walk(parsed):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "penstock":
            yield node


def python_page() -> str:
    """Return the page of the Python API."""
    sections = "".join(_module(name, names) for name, names in sorted(documented().items()))
    return f"{HEAD}\n{sections}"


def _module(name: str, names: set[str]) -> str:
    module = import_module(name)
    found = {each: getattr(module, each) for each in sorted(names)}
    entries = "".join(_entry(module, each, value) for each, value in found.items() if not isinstance(value, ModuleType))
    return f"## {name}\n\n{_prose(inspect.getdoc(module))}\n\n{entries}"


def _entry(module: ModuleType, name: str, value: Any) -> str:
    if inspect.isclass(value) or inspect.isfunction(value):
        node = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
        if isinstance(node, ast.ClassDef):
            return _class(node)
        if isinstance(node, _Function):
            return f"### {name}\n\n{_python(_signature(node))}{_prose(ast.get_docstring(node))}\n\n"
    kind = type(value).__name__ if type(value).__module__ != "typing" else "type alias"
    return f"### {name}\n\n{_prose(noted(ast.parse(inspect.getsource(module)).body).get(name) or f'A {kind}.')}\n\n"


def _class(node: ast.ClassDef) -> str:
    bases = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
    said = noted(node.body)
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and _is_public(ast.unparse(each.target))]
    methods = [each for each in node.body if isinstance(each, _Function) and _is_public(each.name)]
    lines = [f"class {node.name}{bases}:", *(f"    {ast.unparse(each)}" for each in fields)]
    code = _python("\n".join(lines))
    about = [
        f"* `{name}`: {' '.join(_prose(text).split())}\n"
        for each in fields
        if (text := said.get(name := ast.unparse(each.target)))
    ]
    told = "".join(_method(each) for each in methods)
    listed = f"{''.join(about)}\n" if about else ""
    return f"### {node.name}\n\n{code}{_prose(ast.get_docstring(node))}\n\n{listed}{told}"


def _method(node: _Function) -> str:
    doc = _prose(ast.get_docstring(node))
    return f"{_python(_signature(node))}{doc}\n\n"


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def noted(body: list[ast.stmt]) -> dict[str, str]:
    """Return the docstrings of assigned names, each a string after the assignment."""
    said = dict[str, str]()
    for statement, after in pairwise(body):
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            match statement:
                case ast.AnnAssign(target=target) | ast.Assign(targets=[target]):
                    said[ast.unparse(target)] = str(after.value.value)
                case _:
                    pass
    return said


def _signature(node: _Function) -> str:
    start = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    decorators = "".join(f"@{ast.unparse(each)}\n" for each in node.decorator_list)
    line = f"{start} {node.name}({ast.unparse(node.args)})"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if len(line + returns) <= 100:
        return f"{decorators}{line}{returns}"
    arguments = "".join(f"    {each},\n" for each in _arguments(node.args))
    return f"{decorators}{start} {node.name}(\n{arguments}){returns}"


def _arguments(arguments: ast.arguments) -> Iterator[str]:
    """Yield each argument as it stands in a signature."""
    rest = ast.unparse(arguments)
    depth, start = 0, 0
    for at, sign in enumerate(rest):
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and not depth:
            yield rest[start:at].strip()
            start = at + 1
    yield rest[start:].strip()


def _python(code: str) -> str:
    return f"```python\n{code}\n```\n\n"


def _prose(doc: str | None) -> str:
    return (doc or "").replace("``", "`")
