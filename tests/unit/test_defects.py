from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.paths import ROOT

TESTS = ROOT / "tests"
SOURCES = [path.read_text() for path in TESTS.rglob("test_*.py") if "node_modules" not in path.parts]
LINES = re.findall(r"^\* \*\*([VB]?\d+)\*\* (.*)$", (TESTS / "DEFECTS.md").read_text(), re.MULTILINE)


def marked(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "defect":
            yield from (ast.literal_eval(argument) for argument in node.args)


@pytest.fixture(scope="module")
def tested() -> set[str]:
    return {defect for source in SOURCES if "mark.defect" in source for defect in marked(source)}


def test_ids_are_listed_once_and_in_order() -> None:
    order = [("V", "", "B").index(defect.rstrip("0123456789")) for defect, _ in LINES]
    ids = [(place, int(defect.lstrip("VB"))) for place, (defect, _) in zip(order, LINES, strict=True)]
    assert ids == sorted(set(ids))


def test_every_id_of_a_marker_is_listed(tested: set[str]) -> None:
    assert tested <= {defect for defect, _ in LINES}


def test_every_listed_id_has_a_test_or_a_reason(tested: set[str]) -> None:
    for defect, line in LINES:
        assert (defect in tested) is ("No test: " not in line), defect


def test_no_test_name_carries_an_id() -> None:
    assert not [name for source in SOURCES for name in re.findall(r"def (test_(?:[vb]|row)\d\w*)", source)]


def test_markers_are_found_on_any_test() -> None:
    source = """
class TestIt:
    @pytest.mark.defect("V1", "46")
    @pytest.mark.parametrize("x", [1])
    def test_a(self): ...
@pytest.mark.defect("B2")
async def test_b(): ...
def test_c(): ...
"""
    assert list(marked(source)) == ["B2", "V1", "46"]
