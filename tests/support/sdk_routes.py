"""The routes that an SDK calls, as the sources of its resources have them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

METHODS = {
    "_get": "GET",
    "_get_api_list": "GET",
    "_post": "POST",
    "_put": "PUT",
    "_patch": "PATCH",
    "_delete": "DELETE",
}
"""The methods of HTTP by the methods of a resource that send."""

GIVEN = frozenset({"batch.results_url"})
"""Expressions for URLs that an answer of the server has, and no SDK."""


class Route(NamedTuple):
    """A method and a path, in which ``{}`` stands for each parameter."""

    method: str
    path: str

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def sdk_routes(package: str) -> set[Route]:
    """Return the routes that the resources of a package call."""
    spec = find_spec(package)
    assert spec
    assert spec.origin
    modules = sorted((Path(spec.origin).parent / "resources").rglob("*.py"))
    return {route for module in modules for route in _called(ast.parse(module.read_text()), module)}


def _called(tree: ast.Module, module: Path) -> Iterator[Route]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=name), args=[path, *_]) if name in METHODS:
                if path_of := _path(path):
                    keywords = {each.arg: each.value for each in node.keywords}
                    match keywords.get("method"):
                        case ast.Constant(value=str(method)):
                            yield Route(method.upper(), path_of)
                        case None:
                            yield Route(METHODS[name], path_of)
                        case other:
                            raise ValueError(f"{module}:{node.lineno}: the method is {ast.unparse(other)}")
            case _:
                pass


def _path(expression: ast.expr) -> str | None:
    """Return the path under the URL of the server; None for one that an answer has."""
    match expression:
        case ast.Call(args=[template, *_]):  # path_template("/files/{file_id}", file_id=file_id)
            return _path(template)
        case ast.Constant(value=str(path)):
            path = re.sub(r"\{\w+\}", "{}", path.partition("?")[0])
            return path if path.startswith("/v1/") else f"/v1{path}"
        case _ if ast.unparse(expression) in GIVEN:
            return None
        case _:
            raise ValueError(f"no path: {ast.unparse(expression)}")
