"""The layout of the product and of its tests, as far as the import contract does not hold it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.paths import PRODUCT, ROOT
from tests.support.statements import statements

TESTS = ROOT / "tests"
MOST_POSITIONAL = 4
"""Positional arguments in a call of a class."""
SUPPORT = sorted((TESTS / "support").glob("*.py"))
WITHOUT_PENSTOCK = ("claude_session", "client_server", "launched_agents", "orphans", "paths", "processes", "progress")
"""Helpers of the client suites, which run where penstock is not installed."""


def imported(path: Path) -> set[str]:
    """The names of all modules that a file imports, and of what it imports from them."""
    nodes = list(statements(ast.parse(path.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {f"{n.module}.{alias.name}" for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names}


def test_shared_helpers_are_imported_from_support() -> None:
    wrong = set()
    for path in TESTS.rglob("*.py"):
        if not re.search(r"\btests\b(?!\.support\b)", path.read_text()):
            continue  # it names no other folder: parsing it takes time
        top, *below = path.relative_to(TESTS).parts
        is_flat = top in ("bench", "examples", "oracles", "simulation")
        folder = f"tests.{top}" if is_flat else f"tests.{top}.{below[0] if below else ''}"
        for module in imported(path):
            is_own = module.startswith(folder) and not re.search(r"\.(test_|conftest\b)", module)
            is_for_all = re.match(r"tests\.(support|examples)\.(?!test_)", module)
            if module.startswith("tests.") and not (is_for_all or is_own):
                wrong.add((str(path.relative_to(ROOT)), module))
    assert not wrong


def test_long_calls_of_classes_name_their_arguments() -> None:
    """No type checker sees that two arguments of one type have changed places."""
    classes, calls = {"cls"}, list[tuple[Path, ast.Call]]()
    for path in (path for top in PRODUCT for path in (ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes.add(node.name)
            elif isinstance(node, ast.Call) and len(node.args) > MOST_POSITIONAL:
                calls.append((path, node))
    wrong = [f"{path.relative_to(ROOT)}:{call.lineno}" for path, call in calls if _last_name(call.func) in classes]
    assert not wrong


def _last_name(called: ast.expr) -> str:
    return called.id if isinstance(called, ast.Name) else called.attr if isinstance(called, ast.Attribute) else ""


@pytest.mark.parametrize("path", SUPPORT, ids=lambda path: path.stem)
def test_support_modules_are_of_readable_size(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 450


@pytest.mark.parametrize("name", WITHOUT_PENSTOCK)
def test_client_suites_need_no_penstock(name: str) -> None:
    modules = imported(TESTS / "support" / f"{name}.py")
    helpers = {module.removeprefix("tests.support.").split(".")[0] for module in modules if module.startswith("tests.")}
    assert helpers <= set(WITHOUT_PENSTOCK)
    assert not {module.partition(".")[0] for module in modules} & {"penstock"}


def test_no_import_is_hidden_in_a_string() -> None:
    """The import contract sees only statements.  Exceptions: plug-ins, parts of vLLM, SDKs that may be missing."""
    product = [path for top in PRODUCT for path in (ROOT / top).rglob("*.py")]
    hiding = {
        str(path.relative_to(ROOT)) for path in product if re.search("import_module|__import__", path.read_text())
    }
    assert hiding == {
        "extensions/workbench/conformance/sdks.py",
        "pipeline/plugins.py",
        "stages/models/vllm_private.py",
    }
