"""The layout of the tests: shared helpers live in `tests.support`, and nowhere else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.support.paths import ROOT

TESTS = ROOT / "tests"
SUPPORT = sorted((TESTS / "support").glob("*.py"))
WITHOUT_PENSTOCK = ("client_server", "paths", "processes", "progress")
"""Helpers of the client suites, which run where penstock is not installed."""


def imported(path: Path) -> set[str]:
    """The names of all modules that a file imports."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}


def test_shared_helpers_are_imported_from_support() -> None:
    """A test imports `tests.support` and plain modules of its own folder, but no conftest and no other test."""
    wrong = set()
    for path in TESTS.rglob("*.py"):
        top, *below = path.relative_to(TESTS).parts
        folder = f"tests.{top}" if top == "bench" else f"tests.{top}.{below[0] if below else ''}"
        for module in imported(path):
            name = module.rpartition(".")[2]
            is_own = module.startswith(folder) and not name.startswith(("test_", "conftest"))
            if module.startswith("tests.") and not (module.startswith("tests.support.") or is_own):
                wrong.add((str(path.relative_to(ROOT)), module))
    assert not wrong


@pytest.mark.parametrize("path", SUPPORT, ids=lambda path: path.stem)
def test_support_modules_are_of_readable_size(path: Path) -> None:
    """No helper module has more than 450 lines."""
    assert len(path.read_text().splitlines()) <= 450


@pytest.mark.parametrize("name", WITHOUT_PENSTOCK)
def test_client_suites_need_no_penstock(name: str) -> None:
    """Helpers of the client suites import nothing of the product, directly or through another helper."""
    modules = imported(TESTS / "support" / f"{name}.py")
    helpers = {module.removeprefix("tests.support.") for module in modules if module.startswith("tests.")}
    assert helpers <= set(WITHOUT_PENSTOCK)
    assert not {module.partition(".")[0] for module in modules} & {"penstock"}
