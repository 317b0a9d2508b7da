"""The source of vLLM: the installed version, and another one to compare, read without importing it."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

SINCE = {"beam": "0.33", "muse": "0.33", "musespark1x": "0.33", "step5": "0.33"}
"""Parsers that the oldest version that penstock works with does not have, with the first version that has them."""


@dataclass(frozen=True)
class VllmSource:
    """The folder ``vllm`` of one version."""

    folder: Path

    def module(self, name: str) -> Path | None:
        """Return the file of a module, or None if there is none."""
        path = self.folder.parent.joinpath(*name.split("."))
        files = (path.with_suffix(".py"), path / "__init__.py")
        return next((file for file in files if file.exists()), None)

    def has(self, module: str, name: str) -> bool:
        """True if ``name`` can be imported from ``module``."""
        file = self.module(module)
        return file is not None and (name in _bound(file) or self.module(f"{module}.{name}") is not None)

    def attributes(self, module: str, owner: str) -> frozenset[str]:
        """Return the names of a class's methods and fields, and of what its methods set."""
        file = self.module(module)
        assert file
        (found,) = (
            node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef) and node.name == owner
        )
        return frozenset(_attributes(found))

    def registered(self, package: str, table: str) -> frozenset[str]:
        """Return the keys of the dictionary ``table`` in the package ``package``."""
        file = self.module(package)
        assert file
        for node in ast.parse(file.read_text()).body:
            match node:
                case ast.Assign([ast.Name(id=assigned)], ast.Dict(keys)) if assigned == table:
                    return frozenset(ast.literal_eval(key) for key in keys if key)
                case _:
                    pass
        raise AssertionError(f"{file} has no {table}")


@cache
def _bound(file: Path) -> frozenset[str]:
    """Return the names that a module binds: by definition, import, assignment, or lazily by name in a string."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.ClassDef(name) | ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.Name(name):
                found.add(name)
            case ast.alias(name, asname):
                found.add(asname or name)
            case ast.Constant(str(text)) if text.isidentifier():
                found.add(text)
            case _:
                pass
    return frozenset(found)


def _attributes(owner: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(owner):
        match node:
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.AnnAssign(ast.Name(name)):
                yield name
            case ast.Attribute(ast.Name("self"), name, ast.Store()):
                yield name
            case _:
                pass


def _sources() -> list[VllmSource]:
    installed = find_spec("vllm")
    folders = [Path(next(iter(installed.submodule_search_locations or ())))] if installed else []
    if sdist := os.environ.get("SDIST_OF_VLLM"):
        folders.append(Path(sdist) / "vllm")
    return [VllmSource(folder) for folder in folders]


SOURCES = _sources()
"""The installed vLLM, and the one whose unpacked sdist ``SDIST_OF_VLLM`` names."""
