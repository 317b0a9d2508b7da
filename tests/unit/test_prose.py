from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import PRODUCT, ROOT
from tests.support.statements import statements

MODULES = sorted(path for top in PRODUCT for path in (ROOT / top).rglob("*.py"))
PAGES = sorted(path for top in ("deploy", "docs", "extensions") for path in (ROOT / top).rglob("*.md"))
RULES = {
    "name the value, not that it was said": re.compile(r"\b(told|said|asked)\b"),
    "name the client, engine, peer or operator": re.compile(
        r"\b(whoever|whomever|nobody|somebody|anybody)\b", re.IGNORECASE
    ),
    "before and after": re.compile(r"\b(ahead of|so many seconds)\b"),
}
RELATIVE = re.compile(r"(What|Whether|Who|Whom|Whose|How|Where|Those|That which)\b")
CODE = re.compile(r"``.*?``|`[^`]*`", re.DOTALL)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Find every string that is a statement: docstrings, also of attributes."""
    for node in statements(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Find the comments, if any line with one may break a rule: finding them is slow."""
    lines = [line for line in text.splitlines() if "#" in line]
    if not any(words.search(line) for words in RULES.values() for line in lines):
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def broken(where: str, prose: str) -> list[str]:
    plain = CODE.sub("", prose)
    return [f"{where}: {rule}: {match[0]!r}" for rule, words in RULES.items() if (match := words.search(plain))]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_is_in_plain_english(path: Path) -> None:
    text = path.read_text()
    strings = list(docstrings(ast.parse(text)))
    relative = [f"line {line}: {prose[:60]!r}" for line, prose in strings if RELATIVE.match(prose)]
    assert not relative
    assert not [fault for line, prose in (*strings, *comments(text)) for fault in broken(f"line {line}", prose)]


@pytest.mark.parametrize("path", [*sorted(ROOT.glob("*.md")), *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_page_is_in_plain_english(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    assert not [fault for number, line in enumerate(text.splitlines(), 1) for fault in broken(f"line {number}", line)]
